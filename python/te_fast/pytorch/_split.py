"""Parameters that are split along dimension 0: their sizes, and the whole that the GEMM sees."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import DtypeError, ShapeError
from te_fast.pytorch import _high_precision

if TYPE_CHECKING:
    from te_fast.pytorch.linear import Linear

__all__ = ["concatenate", "split_sizes"]

# Stands in for the version of a copy, which nothing may take for another copy's.
_unique = itertools.count(1 << 62)


def split_sizes(
    parameters_split: tuple[str, ...] | dict[str, int] | None, total: int, layer: str
) -> dict[str, int] | None:
    """Return the parts' names, without trailing underscore, and sizes.

    Raises
    ------
    DtypeError
        If it is neither a tuple nor a dict.
    ShapeError
        If it is empty, or does not add up.
    """
    if parameters_split is None:
        return None
    if not isinstance(parameters_split, dict | tuple | list):
        got = type(parameters_split).__name__
        message = f"{layer}: parameters_split must be a tuple of names or a dict, got {got}"
        raise DtypeError(message)
    if not parameters_split:
        message = f"{layer}: parameters_split must name at least one part, got an empty one"
        raise ShapeError(message)
    if isinstance(parameters_split, dict):
        sizes = list(parameters_split.values())
    else:
        sizes = [total // len(parameters_split)] * len(parameters_split)
    if sum(sizes) != total or min(sizes) <= 0:
        message = f"{layer}: parameters_split must add up to out_features = {total}, got {sizes}"
        raise ShapeError(message)
    names = [name.removesuffix("_") for name in parameters_split]
    if len(set(names)) != len(names):
        message = f"{layer}: parameters_split must name different parts, got {names}"
        raise ShapeError(message)
    return dict(zip(names, sizes, strict=True))


class _Concatenate(torch.autograd.Function):
    """Concatenation without a copy where the parts lie one after the other."""

    @staticmethod
    def forward(ctx: Any, layer: Linear, adjacent: bool, *parts: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.parts = layer, parts
        if not adjacent:
            return torch.cat([part.detach() for part in parts])
        first = parts[0].detach()
        rows = sum(part.shape[0] for part in parts)
        whole = first.new_empty(0)
        size, stride = (rows, *first.shape[1:]), first.stride()
        return whole.set_(first.untyped_storage(), first.storage_offset(), size, stride)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = grad.split([part.shape[0] for part in ctx.parts])
        if not ctx.layer.fuse_wgrad_accumulation:
            return (None, None, *parts)
        given = [
            _high_precision.give(parameter, part, fuse=True, overwrite=False)
            for parameter, part in zip(ctx.parts, parts, strict=True)
        ]
        return (None, None, *given)


def concatenate(parts: list[torch.Tensor], layer: Linear) -> tuple[torch.Tensor, int]:
    """Return the whole and a number that changes whenever a part's content may have."""
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    adjacent = all(part.is_contiguous() for part in parts) and all(
        following.data_ptr() == end
        and following.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        for following, end in zip(parts[1:], ends, strict=False)
    )
    whole: torch.Tensor = _Concatenate.apply(layer, adjacent, *parts)
    version = sum(part._version for part in parts) if adjacent else next(_unique)
    return whole, version
