"""Maxima, scales and casts of parts, with the arguments of Transformer Engine's extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fast.runtime import native
from te_fast.runtime.arguments import check_sizes
from te_fast.runtime.layouts import BLOCK
from te_fast.tensor.dtypes import DType, TE_DType_To_Torch, fp8_name
from te_fast.tex.errors import ExtensionError, check_lists, check_rows, check_tensors

_LARGEST = torch.finfo(torch.float32).max


@torch.no_grad()
def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of a tensor.

    Parameters
    ----------
    input : torch.Tensor
        float32, float16 or bfloat16; values that are not numbers do not count.
    amax : torch.Tensor
        One float32, written.

    Raises
    ------
    ExtensionError
        If `amax` is not one float32.
    """
    check_tensors("compute_amax", input=input, amax=amax)
    if amax.dtype != torch.float32 or amax.numel() != 1:
        message = f"compute_amax: amax must be one float32, got {amax.dtype} of {list(amax.shape)}"
        raise ExtensionError(message)
    amax.copy_(native.amax(input.detach().contiguous()).view(amax.shape))


def fp8_transpose(
    input: torch.Tensor,
    dtype: Any,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return FP8 bytes with the last dimension first.

    Parameters
    ----------
    input : torch.Tensor
        Bytes ``(..., cols)``.
    dtype : DType
        Their FP8 type.
    out : torch.Tensor, optional
        Bytes ``(cols, ...)``, written and returned.

    Raises
    ------
    ExtensionError
        If the tensors do not have bytes, or `out` has another number of them.
    """
    check_tensors("fp8_transpose", input=input)
    if input.element_size() != 1 or (out is not None and out.element_size() != 1):
        message = "fp8_transpose: input and out must have bytes (torch.uint8)"
        raise ExtensionError(message)
    shape = (*input.shape[-1:], *input.shape[:-1])
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=input.device)
    if out.numel() != input.numel() or not out.is_contiguous():
        message = (
            f"fp8_transpose: out must be contiguous of shape {list(shape)}, got {list(out.shape)}"
        )
        raise ExtensionError(message)
    if input.numel() == 0:
        return out
    rows = input.detach().contiguous().view(torch.uint8)
    one = torch.ones(1, dtype=torch.float32, device=input.device)
    made = out.view(torch.uint8).view(shape)
    native.QuantizedValue(0, fp8_name(dtype), rows, one, made, None).transpose()
    return out


@torch.no_grad()
def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a contiguous tensor with the first two dimensions swapped.

    Parameters
    ----------
    tensor : torch.Tensor
        Of two dimensions or more.
    out : torch.Tensor, optional
        Is written and returned.

    Raises
    ------
    ExtensionError
        If the tensor has fewer dimensions.
    """
    check_rows("swap_first_dims", tensor=tensor)
    if tensor.dim() < 2:
        message = f"swap_first_dims: expected two dimensions or more, got {list(tensor.shape)}"
        raise ExtensionError(message)
    swapped = tensor.detach().transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


@torch.no_grad()
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Update histories and scales of delayed scaling, in place.

    Parameters
    ----------
    amax_reduction_buffer : torch.Tensor
        float32, the maxima of this step, list after list; 0 takes the one in the history.
    amax_histories : sequence of torch.Tensor
        float32 ``(length, scales)``, the newest maximum first.
    scales : sequence of torch.Tensor
        float32 ``(scales,)``.
    amax_compute_algo : {'max', 'most_recent'}
        Which maximum scales follow from.
    fp8_dtype : DType
        FP8 type.
    margin : float
        Scales are smaller by ``2 ** margin``.

    Raises
    ------
    ExtensionError
        If an argument does not fit.
    """
    op = "fused_amax_and_scale_update_after_reduction"
    check_tensors(op, amax_reduction_buffer=amax_reduction_buffer)
    check_lists(op, amax_histories=amax_histories, scales=scales)
    for history, scale in zip(amax_histories, scales, strict=False):
        check_rows(op, amax_histories=history)
        check_tensors(op, scales=scale)
    if amax_compute_algo not in ("max", "most_recent"):
        message = (
            f"{op}: amax_compute_algo must be 'max' or 'most_recent', got {amax_compute_algo!r}"
        )
        raise ExtensionError(message)
    sizes = [history.shape[-1] for history in amax_histories]
    fits = sizes == [scale.numel() for scale in scales]
    if not fits or sum(sizes) != amax_reduction_buffer.numel():
        message = (
            f"{op}: histories of {sizes} scales do not fit {[scale.numel() for scale in scales]} scales and "
            f"{amax_reduction_buffer.numel()} maxima"
        )
        raise ExtensionError(message)
    fp8_name(fp8_dtype)
    largest = torch.finfo(TE_DType_To_Torch[DType.cast(fp8_dtype)]).max * 2.0**-margin
    maxima = amax_reduction_buffer.view(-1).split(sizes)
    for history, scale, reduced in zip(amax_histories, scales, maxima, strict=True):
        _update(history, scale, reduced, largest, is_newest=amax_compute_algo == "most_recent")


def _update(
    history: torch.Tensor,
    scale: torch.Tensor,
    reduced: torch.Tensor,
    largest: float,
    *,
    is_newest: bool,
) -> None:
    newest = torch.where(reduced != 0, reduced, history[0])
    rolled = torch.cat((history[1:], newest[None]))
    zero = torch.zeros_like(newest)
    # Maxima that are not numbers do not count.
    found = newest if is_newest else rolled.nan_to_num(0.0, torch.inf, -torch.inf).amax(0)
    # A layer that did not run keeps its history.
    ran = newest != 0
    amax = found if is_newest else torch.where(ran, found, zero)
    first = torch.cat((zero[None], rolled[1:]))
    history.copy_(torch.where(ran, first, history))
    usable = amax.isfinite() & (amax > 0)
    # torch would divide a number by a tensor with rounded reciprocals.
    made = torch.full_like(amax, largest) / torch.where(usable, amax, torch.ones_like(amax))
    kept = torch.where(usable, made, scale.view(-1)).clamp_max(_LARGEST)
    scale.copy_(kept.view(scale.shape))


def _check_part(
    op: str,
    part: torch.Tensor,
    tiles: torch.Tensor,
    size: tuple[int, int],
    start: int,
    block_len: int,
) -> None:
    check_rows(op, values=part, blocks=tiles)
    h, w = size
    check_sizes(op, h=h, w=w, start_offset=start, block_len=block_len)
    if block_len != BLOCK:
        message = f"{op}: block_len must be {BLOCK}, got {block_len}"
        raise ExtensionError(message)
    if tiles.dim() != 2 or tiles.dtype != torch.float32:
        message = f"{op}: scales and maxima must be float32 of two dimensions, got {tiles.dtype} {list(tiles.shape)}"
        raise ExtensionError(message)
    if part.dtype not in (torch.float32, torch.bfloat16):
        message = f"{op}: values must be float32 or bfloat16, got {part.dtype}"
        raise ExtensionError(message)
    if any(-(-edge // BLOCK) > count for edge, count in zip(size, tiles.shape, strict=True)):
        message = f"{op}: a matrix of {list(size)} has more blocks than {list(tiles.shape)}"
        raise ExtensionError(message)


def _tile_of(part: torch.Tensor, w: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of the block of each element of a part of a matrix."""
    places = torch.arange(start, start + part.numel(), device=part.device)
    return places // w // BLOCK, places % w // BLOCK


@torch.no_grad()
def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor,
    amax: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
) -> None:
    """Write the maxima of 128x128 blocks of a matrix of which a part is there.

    Parameters
    ----------
    tensor : torch.Tensor
        float32 or bfloat16, the elements from `start_offset` on.
    amax : torch.Tensor
        float32, one for each block; 0 where the part has no element.
    h, w : int
        Shape of the matrix.
    start_offset : int
        Number of elements in front of the part.
    block_len : int
        128.

    Raises
    ------
    ExtensionError
        If an argument does not fit.
    """
    op = "fp8_block_scaling_compute_partial_amax"
    _check_part(op, tensor, amax, (h, w), start_offset, block_len)
    rows, cols = -(-h // BLOCK), -(-w // BLOCK)
    found = torch.zeros(rows * cols, dtype=torch.float32, device=tensor.device)
    row, col = _tile_of(tensor, w, start_offset)
    values = tensor.detach().reshape(-1).float().abs().nan_to_num(0.0, torch.inf)
    found.scatter_reduce_(0, row * cols + col, values, "amax")
    amax[:rows, :cols] = found.view(rows, cols)


@torch.no_grad()
def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: Any,
) -> None:
    """Quantise a part of a matrix with the scales of its 128x128 blocks.

    Parameters
    ----------
    inp : torch.Tensor
        float32 or bfloat16, the elements from `start_offset` on.
    out : torch.Tensor
        As many bytes (uint8), written.
    scale : torch.Tensor
        float32, one for each block.
    h, w, start_offset, block_len
        As of :func:`fp8_block_scaling_compute_partial_amax`.
    out_dtype : DType
        FP8 type.

    Raises
    ------
    ExtensionError
        If an argument does not fit.
    """
    op = "fp8_block_scaling_partial_cast"
    _check_part(op, inp, scale, (h, w), start_offset, block_len)
    fp8_name(out_dtype)
    check_tensors(op, out=out)
    if out.dtype != torch.uint8 or out.numel() != inp.numel():
        message = (
            f"{op}: out must have {inp.numel()} bytes (uint8), got {out.dtype} {list(out.shape)}"
        )
        raise ExtensionError(message)
    dtype = TE_DType_To_Torch[DType.cast(out_dtype)]
    largest = torch.finfo(dtype).max
    spread = scale[_tile_of(inp, w, start_offset)]
    scaled = (inp.detach().reshape(-1).float() * spread).clamp_(-largest, largest)
    made = scaled.to(dtype).view(torch.uint8).masked_fill_(scaled.isnan(), 0x7F)
    out.copy_(made.view(out.shape))
