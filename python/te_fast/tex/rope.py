"""Rotary embeddings with the names of Transformer Engine's extension."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.attention.rope import apply_rotary_pos_emb, rotate, waves_of
from te_fast.attention.shares import share_of
from te_fast.tex.enums import NVTE_QKV_Format
from te_fast.tex.errors import ExtensionError, check_tensors

_FORMATS: dict[int, str] = {
    NVTE_QKV_Format.NVTE_SBHD: "sbhd",
    NVTE_QKV_Format.NVTE_BSHD: "bshd",
    NVTE_QKV_Format.NVTE_THD: "thd",
}


def _format_of(op: str, qkv_format: Any) -> str:
    name = _FORMATS.get(qkv_format) if isinstance(qkv_format, int) else None
    if name is None:
        known = ", ".join(NVTE_QKV_Format(member).name for member in _FORMATS)
        message = f"{op}: qkv_format must be one of {known}, got {qkv_format!r}"
        raise ExtensionError(message)
    return name


@torch.no_grad()
def fused_rope_forward(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Rotate queries or keys, in FP32.

    Parameters
    ----------
    input : torch.Tensor
        ``(s, b, h, d)``, ``(b, s, h, d)`` or ``(t, h, d)``.
    freqs : torch.Tensor
        Angles ``(positions, 1, 1, d_rot)``, float32.
    start_positions : torch.Tensor, optional
        ``(b,)``, the position of each sequence's first token.
    qkv_format : NVTE_QKV_Format
        NVTE_SBHD, NVTE_BSHD or NVTE_THD.
    interleaved : bool
        Rotate channels 2i and 2i + 1 together, instead of i and i + d_rot / 2.
    cu_seqlens : torch.Tensor, optional
        int32 ``(b + 1,)``: where sequences begin in ``thd``.
    cp_size, cp_rank : int
        Ranks of context parallelism, and which.

    Raises
    ------
    ExtensionError
        If the format is another one.
    ShapeError, DtypeError, DeviceError, ArgumentError
        If the arguments do not fit.
    """
    form = _format_of("fused_rope_forward", qkv_format)
    return apply_rotary_pos_emb(
        *(input, freqs, form, start_positions, interleaved),
        fused=True,
        cu_seqlens=cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


@torch.no_grad()
def fused_rope_backward(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Rotate gradients of :func:`fused_rope_forward` back.

    Parameters
    ----------
    output_grads : torch.Tensor
        Gradient of the result.
    freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank
        As of :func:`fused_rope_forward`.

    Raises
    ------
    ExtensionError, ShapeError, DtypeError, DeviceError, ArgumentError
        As of :func:`fused_rope_forward`.
    """
    form = _format_of("fused_rope_backward", qkv_format)
    check_tensors("fused_rope_backward", output_grads=output_grads, freqs=freqs)
    share = share_of(cp_size, cp_rank, "fused_rope_backward")
    waves = waves_of(
        *(freqs, output_grads.shape, form, start_positions, cu_seqlens, share),
        interleaved=interleaved,
    )
    return rotate(output_grads, waves, interleaved=interleaved, transposed=True)
