"""Operators that read bytes and scales of quantised tensors in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_fast.runtime import native
from te_fast.runtime.compiling import is_traced
from te_fast.runtime.library import register

#: Operators whose parameters may be quantised tensors; graphs define them.
OF_PROGRAMS = frozenset(
    {"te_fast::program_forward", "te_fast::program_backward", "te_fast::inference"}
)


def _dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: int,
    fp8: str,
    columnwise: bool,
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    value = native.QuantizedValue(block, fp8, None, None, None, None, groups)
    if not columnwise:
        value.row, value.row_scale = data, scale
    else:
        value.col = data
        # Both layouts share one scale.
        setattr(value, "col_scale" if block else "row_scale", scale)
    return value.dequantize(dtype)


def _fake(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: int,
    fp8: str,
    columnwise: bool,
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    shape = data.shape
    if columnwise and groups != 1:
        shape = torch.Size((shape[0], *shape[2:], shape[1]))
    elif columnwise:
        shape = torch.Size((*shape[1:], shape[0]))
    return data.new_empty(shape, dtype=dtype)


register(
    "dequantize_value(Tensor data, Tensor scale, int block, str fp8, bool columnwise, int groups, ScalarType dtype) "
    "-> Tensor",
    _dequantize,
    _fake,
)


def dequantized(value: native.QuantizedValue, dtype: torch.dtype) -> torch.Tensor:
    """Return the values in high precision; under a tracer, by an operator."""
    columnwise = value.row is None
    data, scale = (value.col, value.col_scale) if columnwise else (value.row, value.row_scale)
    if data is None or scale is None or not is_traced(data):
        return value.dequantize(dtype)
    made: torch.Tensor = torch.ops.te_fast.dequantize_value(
        data, scale, value.block, value.fp8, columnwise, value.groups, dtype
    )
    return made


def taken_apart(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a program's operator, with bytes and scales in place of quantised tensors.

    Parameters
    ----------
    func : torch._ops.OpOverload
        The operator.
    args : tuple
        Its arguments; quantised tensors are in lists.
    """
    columns: Iterator[bool] = iter(())
    if func.name() == "te_fast::program_backward":
        columns = iter(native.traced_columns(args[3]))
    return tuple(_parts(arg, columns) if isinstance(arg, list) else arg for arg in args)


def _parts(tensors: list[Any], columns: Iterator[bool]) -> list[Any]:
    """Take quantised tensors apart; `columns` tells whose column layout is read."""
    found = []
    for tensor in tensors:
        value = getattr(tensor, "_value", None)
        if value is None:
            found.append(tensor)
        elif next(columns, False):
            found += [value.col, value.col_scale]
        else:
            found += [value.row, value.row_scale]
    return found
