"""Rows of quantised tensors as the kernels move them: bytes in pairs, and scales of blocks as rows of their own."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import UnsupportedError
from te_fast.runtime.layouts import BLOCK
from te_fast.tensor.blockwise import scale_shape
from te_fast.tensor.primary import is_quantized

#: Kernels move bytes whatever they mean; of the types that they take, this is two of them.
_PAIR = torch.bfloat16


def split(inp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Return what is moved of an input: rows, rows of scales, and the input where it is quantised.

    A tensor whose rows cannot be moved by themselves is dequantised: scales that several rows share, no row layout, an
    odd number of columns.

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
        scales = value.row_scale.detach().view(blocks, -1)[:, : inp.shape[0]].t().contiguous()
    return rows, scales, given


def join(like: Any, rows: torch.Tensor, scales: torch.Tensor | None) -> Any:
    """Return moved rows as a tensor quantised as another one is, in row layout.

    Parameters
    ----------
    like : QuantizedTensor
        What they were of.
    rows : torch.Tensor
        Bytes in pairs.
    scales : torch.Tensor, optional
        Rows of scales.
    """
    data = rows.view(torch.uint8)
    value = like._value.share()
    value.row, value.col = data, None
    if scales is not None:
        shape = scale_shape(data.shape, columnwise=False, is_2d=False)
        padded = scales.new_zeros(shape)
        padded[:, : data.shape[0]] = scales.t()
        value.row_scale, value.col_scale = padded, None
    return like._of_value(value, data.shape, like.dtype, like._quantizer)


def plain(tensor: Any) -> Any:
    """Return a tensor dequantised, if it is quantised."""
    return tensor._plain_values(tensor.dtype) if is_quantized(tensor) else tensor
