"""Rows of quantised tensors in the form that the kernels move: pairs of bytes, and their block scales."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import UnsupportedError
from te_fast.runtime.layouts import BLOCK
from te_fast.tensor.blockwise import scale_shape
from te_fast.tensor.primary import is_quantized

#: Kernels move bytes without interpreting them; this type has two bytes.
_PAIR = torch.bfloat16


def split(inp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Return the tensors to move: rows, their scales, and the input if it is quantised.

    The scales are FP32 ``(blocks, at least rows)``: a line for each block of 128 columns, as GEMMs read them.

    A tensor is dequantised if its rows cannot be moved separately: if several rows share a scale, if it has no row
    layout, or if the number of columns is odd.

    Parameters
    ----------
    inp : torch.Tensor
        ``(rows, hidden)``.
    """
    if not is_quantized(inp):
        return inp, None, None
    if torch.compiler.is_compiling():
        message = f"{type(inp).__name__}: permutations of quantised tensors are not traced by torch.compile"
        raise UnsupportedError(message)
    given: Any = inp
    value = given._value
    if value.row is None or value.block == 2 or inp.dim() != 2 or inp.shape[1] % 2:
        return given.dequantize(), None, None
    rows = value.row.detach().contiguous().view(_PAIR)
    scales = None
    if value.block == 1:
        blocks = -(-inp.shape[1] // BLOCK)
        scales = value.row_scale.detach().view(blocks, -1)
    return rows, scales, given


def rows_of_scales(lines: torch.Tensor, rows: int) -> torch.Tensor:
    """Return scales as a row for each row of the tensor, ``(rows, blocks)``.

    Parameters
    ----------
    lines : torch.Tensor
        ``(blocks, at least rows)``.
    rows : int
        Rows of the tensor.
    """
    return lines[:, :rows].t().contiguous()


def lines_of_scales(rows: torch.Tensor) -> torch.Tensor:
    """Return the lines of rows of scales; the places behind the rows are zero.

    Parameters
    ----------
    rows : torch.Tensor
        ``(rows, blocks)``.
    """
    count, blocks = rows.shape
    shape = scale_shape((count, blocks * BLOCK), columnwise=False, is_2d=False)
    lines = rows.new_zeros(shape)
    lines[:, :count] = rows.t()
    return lines


def join(like: Any, rows: torch.Tensor, scales: torch.Tensor | None) -> Any:
    """Return moved rows as a quantised tensor in row layout, with the format of another one.

    Parameters
    ----------
    like : QuantizedTensor
        The tensor whose rows were moved.
    rows : torch.Tensor
        Bytes in pairs.
    scales : torch.Tensor, optional
        Lines of scales, padded as GEMMs read them.
    """
    data = rows.view(torch.uint8)
    value = like._value.share()
    value.row, value.col = data, None
    if scales is not None:
        value.row_scale, value.col_scale = scales, None
    return like._of_value(value, data.shape, like.dtype, like._quantizer)


def plain(tensor: Any) -> Any:
    """Return a tensor dequantised, if it is quantised."""
    return tensor._plain_values(tensor.dtype) if is_quantized(tensor) else tensor
