"""Quantised tensors in graphs: operators that read their bytes and scales."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.runtime import native
from te_fast.runtime.compiling import is_traced

_library = torch.library.Library("te_fast", "FRAGMENT")


def _dequantize(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: int,
    fp8: str,
    columnwise: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    layout, other = (data, scale), (None, None)
    parts = (*other, *layout) if columnwise else (*layout, *other)
    if columnwise and block == 0:
        parts = (None, scale, data, None)
    return native.QuantizedValue(block, fp8, *parts).dequantize(dtype)


def _fake(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: int,
    fp8: str,
    columnwise: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    shape = (*data.shape[1:], *data.shape[:1]) if columnwise else data.shape
    return data.new_empty(shape, dtype=dtype)


_library.define(
    "dequantize_value(Tensor data, Tensor scale, int block, str fp8, bool columnwise, ScalarType dtype) -> Tensor"
)
for _key in ("CPU", "CUDA"):
    _library.impl("dequantize_value", _dequantize, _key)
torch.library.register_fake("te_fast::dequantize_value", _fake, lib=_library)


def dequantized(value: native.QuantizedValue, dtype: torch.dtype) -> torch.Tensor:
    """Return the values in high precision, by an operator where a tracer watches."""
    columnwise = value.row is None
    data, scale = (value.col, value.col_scale) if columnwise else (value.row, value.row_scale)
    if data is None or scale is None or not is_traced(data):
        return value.dequantize(dtype)
    made: torch.Tensor = torch.ops.te_fast.dequantize_value(
        data, scale, value.block, value.fp8, columnwise, dtype
    )
    return made


def taken_apart(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operator of programs with bytes and scales in the place of quantised tensors.

    Parameters
    ----------
    func : torch._ops.OpOverload
        The operator.
    args : tuple
        Its arguments: lists of tensors that are read and written, the program, the number of the call.
    """
    reads, *others = args
    columns = iter(())
    if func is torch.ops.te_fast.program_backward.default:
        columns = iter(native.traced_columns(args[3]))
    found = []
    for tensor in reads:
        value = getattr(tensor, "_value", None)
        if value is None:
            found.append(tensor)
        elif next(columns, False):
            found += [value.col, value.col_scale]
        else:
            found += [value.row, value.row_scale]
    return (found, *others)
