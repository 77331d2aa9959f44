"""FP8 weights of experts: one value for all experts, or adjacent values, one per expert.

A stack has a layout for all experts, ``(experts, rows, cols)``, and scales of each. Values of single experts that share
one memory in order are read as such a stack without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_fast.errors import ShapeError
from te_fast.runtime import native
from te_fast.tensor.tensor import Float8TensorBase

_LAYOUTS = (("row", "row_scale"), ("col", "col_scale"))


_UNLIKE = (
    "the quantised weights of experts must be of one shape, FP8 type, scaling and device, and have "
    "a layout in common"
)


def check_alike(parts: Sequence[Any]) -> None:
    """Raise unless quantised parts can be one quantised tensor.

    Raises
    ------
    ShapeError
        If the parts differ in shape, type or scaling.
    """
    first = parts[0]
    for part in parts[1:]:
        is_alike = isinstance(part, Float8TensorBase) and _outside(part) == _outside(first)
        if not is_alike or first._value.groups != 1:
            raise ShapeError(_UNLIKE)


def _outside(part: Any) -> tuple[Any, ...]:
    value = part._value
    kind = value.block, value.fp8, value.groups, value.row is None
    return (*kind, part.shape, part.dtype, part.device)


def stack_of(parts: Sequence[Any]) -> Any:
    """Return adjacent quantised parts as one quantised tensor, along their first dimension.

    Raises
    ------
    ShapeError
        If the parts differ in shape, type or scaling.
    """
    first = parts[0]
    value = native.stack_values([part._value for part in parts])
    if value is None:
        raise ShapeError(_UNLIKE)
    rows = sum(part.shape[0] for part in parts)
    return first._of_value(value, (rows, *first.shape[1:]), first.dtype, None)


def lay_together(parts: Sequence[Any]) -> None:
    """Give the layouts of quantised parts one memory each, in order, so that calls read them without a copy."""
    values = [part._value for part in parts]
    valid = [value.col_is_valid for value in values]
    has_row = all(value.row is not None for value in values)
    is_block = values[0].block != 0
    for data, scale in _LAYOUTS:
        is_col = data == "col"
        wanted = all(valid) if is_col else has_row
        if wanted:
            _share_memory(values, data)
        if (wanted and (is_block or not is_col)) or (not is_col and not is_block):
            _share_memory(values, scale)
    for value, was_valid in zip(values, valid, strict=True):
        value.col_is_valid = was_valid


def _share_memory(values: Sequence[native.QuantizedValue], name: str) -> None:
    inner = [getattr(value, name).detach() for value in values]
    size = inner[0].numel() * inner[0].element_size()
    if all(t.data_ptr() == inner[0].data_ptr() + n * size for n, t in enumerate(inner)):
        return
    whole = torch.stack(inner)
    for number, value in enumerate(values):
        part = whole[number]
        # A separate tensor, whose version counts its own writes.
        own = torch.empty(0, dtype=whole.dtype, device=whole.device)
        own.set_(whole.untyped_storage(), part.storage_offset(), part.size(), part.stride())
        setattr(value, name, own)


def _only_expert_of(stack: Any) -> Any:
    """Return the value of a stack of one expert, whose scales are those of a matrix."""
    value, (_, rows, cols) = stack._value, stack.shape
    part = native.QuantizedValue(
        value.block,
        value.fp8,
        None if value.row is None else value.row.view(rows, cols),
        value.row_scale,
        value.col.view(cols, rows) if value.col_is_valid else None,
        value.col_scale if value.col_is_valid and value.block else None,
    )
    return stack._of_value(part, (rows, cols), stack.dtype, None)


def fill_experts(stack: torch.Tensor, init: Callable[[torch.Tensor], Any]) -> None:
    """Initialise the plain values of a stack, one by one.

    Parameters
    ----------
    stack : torch.Tensor
        ``(experts, rows, cols)``. Of a ``DTensor``, whose experts cannot be written one by one, each rank takes its
        share of what the first rank has made.
    init : Callable
        Initialises a value in place.
    """
    values: Any = stack.detach()
    placements = getattr(values, "placements", None)
    if placements is None:
        for expert in values:
            init(expert)
        return
    from torch.distributed.tensor import distribute_tensor

    whole = torch.empty(values.shape, dtype=values.dtype, device=values.to_local().device)
    fill_experts(whole, init)
    values.copy_(distribute_tensor(whole, values.device_mesh, placements))


def experts_of(stack: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the values of a stack, in its memory; an FP8 stack has quantised values."""
    if not isinstance(stack, Float8TensorBase):
        return stack.detach().unbind(0)
    value, valid = stack._value, stack._value.col_is_valid
    if value.groups == 1:
        return (_only_expert_of(stack),)
    made = []
    for number in range(stack.shape[0]):

        def own(inner: torch.Tensor | None, number: int = number) -> torch.Tensor | None:
            if inner is None:
                return None
            return inner[number : number + 1] if inner.dim() == 1 else inner[number]

        part = native.QuantizedValue(
            value.block,
            value.fp8,
            own(value.row),
            own(value.row_scale),
            own(value.col) if valid else None,
            own(value.col_scale) if valid and value.block else None,
        )
        made.append(stack._of_value(part, stack.shape[1:], stack.dtype, None))
    return tuple(made)
