"""Checks of the permutations' arguments, and the errors that name wrong ones."""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, NoReturn

import torch

from te_fast.errors import DtypeError, ShapeError, TeFastError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def is_integer(value: object) -> bool:
    """Tell whether a value is an integer; numpy's integers are."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _are_integers(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (list, tuple)) and all(map(is_integer, value))


# The class of each argument, by name: a check, and its description.
_TENSOR = (_is_tensor, "a torch.Tensor")
_INTEGER = (is_integer, "an integer")
_INTEGERS = (_are_integers, "a sequence of integers or a tensor")
_KINDS = {
    "inp": _TENSOR,
    "probs": _TENSOR,
    "routing_map": _TENSOR,
    "row_id_map": _TENSOR,
    "merging_probs": _TENSOR,
    "pad_offsets": _TENSOR,
    "split_sizes": _TENSOR,
    "sorted_index": _TENSOR,
    "scale": _TENSOR,
    "amax": _TENSOR,
    "num_out_tokens": _INTEGER,
    "align_size": _INTEGER,
    "tokens_per_expert": _INTEGERS,
    "restore_shape": _INTEGERS,
    "m_splits": _INTEGERS,
}


def blame(
    op: str, error: Exception, values: Mapping[str, object], optional: Sequence[str] = ()
) -> Exception:
    """Return an error that names the argument of the wrong class.

    Arguments are checked only after a call has failed, so that successful calls pay nothing for the check.

    Parameters
    ----------
    op : str
        The function.
    error : Exception
        The error that Python, torch or a kernel raised.
    values : mapping of str to object
        The function's arguments, as `locals()` has them.
    optional : sequence of str
        Arguments that may be None.

    Returns
    -------
    Exception
        A :class:`te_fast.errors.DtypeError`, or `error` if every argument has its class; an error of te_fast, with the
        function's name.
    """
    if isinstance(error, TeFastError):
        # Several functions share a kernel, whose errors have the name of one of them.
        named, colon, rest = str(error).partition(": ")
        if colon and named != op and (named == "te_fast" or named.startswith("moe_")):
            return type(error)(f"{op}: {rest}")
        return error
    for name, (fits, expected) in _KINDS.items():
        if name not in values or (values[name] is None and name in optional):
            continue
        if not fits(values[name]):
            got = type(values[name]).__name__
            return DtypeError(f"{op}: {name} must be {expected}, got {got}")
    return error


def is_index(map_type: str, op: str) -> bool:
    """Tell whether a routing map holds expert ids; raise if it holds neither ids nor a mask."""
    if map_type == "mask":
        return False
    if map_type == "index":
        return True
    msg = f"{op}: map_type should be one of 'mask' or 'index', got {map_type!r}"
    raise ShapeError(msg)


def warn(message: str) -> None:
    """Warn the caller of a permutation."""
    # Under torch.compile a warning would be a graph break.
    if not torch.compiler.is_compiling():
        warnings.warn(message, stacklevel=3)


def recommends(name: str, dtype: torch.dtype, op: str, recommended: torch.dtype) -> str:
    """Warn that an input should have another type, in Transformer Engine's words."""
    return (
        f"The data type of the input `{name}` of {op} is {dtype}! "
        f"The recommended type is {recommended}."
    )


def as_int32(tensor: torch.Tensor, name: str, op: str) -> torch.Tensor:
    """Return a tensor of integers as int32, with a warning if it has another type."""
    if tensor.dtype == torch.int32:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        msg = f"moe_{op.lower()}: {name} must be of an integer type, got {tensor.dtype}"
        raise DtypeError(msg)
    warn(recommends(name, tensor.dtype, op, torch.int32))
    return tensor.to(torch.int32)


def empty_map(inp: torch.Tensor, routing_map: torch.Tensor, *, index: bool = False) -> torch.Tensor:
    """Row map of no rows: all tokens without an expert."""
    if routing_map.dim() != 2:
        refuse_rank("moe_permute", "routing_map", routing_map, 2)
    tokens, columns = routing_map.shape
    size = (tokens * columns,) if index else (tokens, 2 * columns + 1)
    return torch.full(size, -1 if index else 0, dtype=torch.int32, device=inp.device)


def refuse_rank(op: str, name: str, tensor: torch.Tensor, rank: int) -> NoReturn:
    """Raise for a tensor with another number of dimensions."""
    dimensions = "two dimensions" if rank == 2 else "one dimension"
    msg = f"{op}: {name} must be of {dimensions}, got {tuple(tensor.shape)}"
    raise ShapeError(msg)


def check_counts(counts: torch.Tensor | Sequence[int], routing_map: torch.Tensor) -> None:
    """Raise unless there is one integer per expert; counts on a GPU are not read."""
    op = "moe_permute_and_pad_with_probs"
    if routing_map.dim() != 2:
        refuse_rank(op, "routing_map", routing_map, 2)
    experts = routing_map.size(1)
    if isinstance(counts, torch.Tensor):
        if counts.dim() != 1:
            refuse_rank(op, "tokens_per_expert", counts, 1)
        if counts.dtype.is_floating_point or counts.dtype.is_complex:
            msg = f"{op}: tokens_per_expert must be integers, got {counts.dtype}"
            raise DtypeError(msg)
    if len(counts) != experts:
        msg = f"{op}: tokens_per_expert must have {experts} entries, one per expert, got {len(counts)}"
        raise ShapeError(msg)


def nothing_to_merge(
    inp: torch.Tensor, merging_probs: torch.Tensor | None, shape: torch.Size | Sequence[int]
) -> torch.Tensor:
    """Zeros that depend on both arguments, so that a rank without rows still takes part in backward."""
    out = inp.new_zeros(tuple(shape)) + inp.sum()
    return out if merging_probs is None else out + merging_probs[:0].sum().to(out.dtype)


def on_device(inp: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return sizes and order of chunks on the device of their rows; raise unless both have the same length."""
    if inp.dim() != 2:
        refuse_rank("moe_sort_chunks_by_index", "inp", inp, 2)
    if tensors[0].numel() != tensors[1].numel():
        msg = (
            f"moe_sort_chunks_by_index: sorted_index must have {tensors[0].numel()} entries, one per "
            f"chunk, got {tensors[1].numel()}"
        )
        raise ShapeError(msg)
    return [tensor if tensor.device == inp.device else tensor.to(inp.device) for tensor in tensors]
