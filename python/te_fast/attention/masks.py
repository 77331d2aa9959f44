"""Masks, windows and lengths of sequences as functions of their own, for scripts that make arguments of attention."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.attention.rules import (
    Kept,
    Rule,
    allowed,
    kept_of_lengths,
    mask_type_of,
    rule_of,
    sizes_of,
)
from te_fast.errors import ShapeError
from te_fast.runtime.arguments import check_sizes, check_tensors
from te_fast.runtime.device import gpu_or_default


def maybe_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy if its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check_set_window_size(attn_mask_type: str, window_size: Any = None) -> tuple[int, int]:
    """Return the window that a mask type and an argument give.

    Parameters
    ----------
    attn_mask_type : str
        Mask type.
    window_size : tuple of int, optional
        Keys before and behind the diagonal; all that the mask type allows by default. A window that nearly fits is
        corrected with a warning.

    Raises
    ------
    ShapeError
        If the window contradicts the mask type, or the type is unknown.
    """
    rule = rule_of(attn_mask_type, window_size, None, "check_set_window_size")
    return rule.left, rule.right


def _padding(ends: torch.Tensor, batch: int, size: int) -> torch.Tensor:
    # Caches have lengths for more sequences than a batch has.
    return kept_of_lengths(ends[: batch + 1], size).logical_not().view(batch, 1, 1, size)


def get_padding_mask(
    batch_size: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attention_type: str = "self",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return which positions are padding, from cumulative lengths. Nothing waits for the GPU.

    Parameters
    ----------
    batch_size : int
        Number of sequences.
    cu_seqlens_q, cu_seqlens_kv : torch.Tensor
        Integers ``(batch + 1,)`` or longer; those of keys only for cross attention.
    max_seqlen_q, max_seqlen_kv : int
        Positions of a sequence.
    attention_type : {'self', 'cross'}, default = 'self'
        Whether keys have lengths of their own.

    Returns
    -------
    torch.Tensor or tuple
        bool ``(batch, 1, 1, positions)`` on the lengths' device, True for padding; a pair for cross attention.

    Raises
    ------
    ShapeError
        If an argument is missing.
    """
    if cu_seqlens_q is None or max_seqlen_q is None:
        message = "get_padding_mask: cu_seqlens_q and max_seqlen_q are missing; give both"
        raise ShapeError(message)
    queries = _padding(cu_seqlens_q, batch_size, max_seqlen_q)
    if attention_type == "self":
        return queries
    if cu_seqlens_kv is None or max_seqlen_kv is None:
        message = (
            "get_padding_mask: cross attention needs cu_seqlens_kv and max_seqlen_kv; give both"
        )
        raise ShapeError(message)
    return queries, _padding(cu_seqlens_kv, batch_size, max_seqlen_kv)


def _kept(attention_mask: Any, attention_type: str) -> Kept:
    """Return real positions from padding masks ``(batch, 1, 1, positions)``."""
    is_self = attention_type == "self"
    queries, keys = (attention_mask, attention_mask) if is_self else attention_mask
    return Kept(queries.logical_not().flatten(1), keys.logical_not().flatten(1))


@torch.no_grad()
def get_full_mask(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_mask_type: str = "no_mask",
    attention_mask: Any = None,
    window_size: tuple[int, int] | None = None,
    attention_type: str = "self",
    bottom_right_alignment: bool = True,
) -> tuple[str, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the whole mask that a mask type, a mask and a window stand for.

    Parameters
    ----------
    max_seqlen_q, max_seqlen_kv : int
        Queries and keys of a sequence.
    attn_mask_type : str, default = 'no_mask'
        Mask type.
    attention_mask : torch.Tensor or tuple, optional
        bool, True where nothing is attended to: of paddings ``(batch, 1, 1, positions)``, for cross attention a pair of
        these, and of ``arbitrary`` broadcastable to ``(batch, heads, queries, keys)``.
    window_size : tuple of int, optional
        Keys before and behind the diagonal; -1 is all of them.
    attention_type : {'self', 'cross'}, default = 'self'
        Whether keys have a padding mask of their own.
    bottom_right_alignment : bool, default = True
        Which diagonal windows use, if the mask type does not say.

    Returns
    -------
    str
        ``arbitrary`` if there is a window, else the mask type.
    torch.Tensor
        bool ``(1 or batch, 1 or heads, queries, keys)``, True where a query does not attend.
    torch.Tensor or None
        With padding, the number of queries of each sequence ``(batch,)``.
    torch.Tensor or None
        With padding, the number of keys.
    """
    kind = mask_type_of(attn_mask_type, "get_full_mask")
    check_sizes("get_full_mask", max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv)
    left, right = (-1, -1) if window_size is None else sizes_of(window_size, "get_full_mask")
    has_window = window_size is not None and (left != -1 or right not in (-1, 0))
    right = 0 if "causal" in kind else right
    is_fixed = kind in ("causal", "padding_causal")
    diagonal = not is_fixed and (bottom_right_alignment or kind.endswith("bottom_right"))
    rule = Rule(kind, left, right, diagonal)
    kept = _kept(attention_mask, attention_type) if rule.is_padded else None
    masked = None if rule.is_padded else attention_mask
    given = kept.queries if kept is not None else masked
    device = gpu_or_default() if given is None else given.device
    mask = allowed(rule, (max_seqlen_q, max_seqlen_kv), kept, masked, device)
    everything = torch.ones(1, 1, max_seqlen_q, max_seqlen_kv, dtype=torch.bool, device=device)
    mask = everything if mask is None else mask & everything
    lengths = (None, None) if kept is None else (kept.queries.sum(1), kept.keys.sum(1))
    return "arbitrary" if has_window else attn_mask_type, mask.logical_not(), *lengths


def get_cu_seqlens(mask: torch.Tensor) -> torch.Tensor:
    """Return cumulative lengths from a padding mask.

    Parameters
    ----------
    mask : torch.Tensor
        bool ``(batch, 1, 1, positions)``, True for padding.

    Returns
    -------
    torch.Tensor
        INT32 ``(batch + 1,)``.
    """
    check_tensors("get_cu_seqlens", mask=mask)
    if mask.dim() < 2:
        message = f"get_cu_seqlens: mask must be (batch, 1, 1, positions), got {list(mask.shape)}"
        raise ShapeError(message)
    lengths = mask.squeeze(1).squeeze(1).logical_not().sum(1)
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _valid_first(valid: torch.Tensor) -> torch.Tensor:
    """Return numbers of valid positions in order, then the number of positions: ``(positions, 1, 1)``."""
    positions = valid.numel()
    order = torch.argsort(valid.logical_not(), stable=True)
    is_real = torch.arange(positions, device=valid.device) < valid.sum()
    return torch.where(is_real, order, positions)[:, None, None]


def get_cu_seqlens_and_indices(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cumulative lengths, and where the tokens of all sequences are, from a padding mask.

    Parameters
    ----------
    mask : torch.Tensor
        bool ``(batch, 1, 1, positions)``, True for padding.

    Returns
    -------
    torch.Tensor
        INT32 ``(batch + 1,)``.
    torch.Tensor
        INT64 ``(batch * positions, 1, 1)``: the numbers of all tokens in order, then ``batch * positions``.
    """
    return get_cu_seqlens(mask), _valid_first(mask.logical_not().flatten())


def get_indices(max_seqlen: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return where the tokens of all sequences are, from cumulative lengths. Nothing waits for the GPU.

    Parameters
    ----------
    max_seqlen : int
        Positions of a sequence.
    cu_seqlens : torch.Tensor
        Integers ``(batch + 1,)``.

    Returns
    -------
    torch.Tensor
        INT64 ``(batch * max_seqlen, 1, 1)``: the numbers of all tokens in order, then ``batch * max_seqlen``.
    """
    check_sizes("get_indices", max_seqlen=max_seqlen)
    check_tensors("get_indices", cu_seqlens=cu_seqlens)
    return _valid_first(kept_of_lengths(cu_seqlens, max_seqlen).flatten())


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device) -> torch.Tensor:
    """Return cumulative lengths of sequences that are all of the largest length: INT32 ``(batch_size + 1,)``."""
    check_sizes("get_full_cu_seqlens", batch_size=batch_size, max_seqlen=max_seqlen)
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * max_seqlen


def get_qkv_format(
    qkv_layout: str = "bshd_bshd_bshd", inference_params: Any = None
) -> tuple[str, str, str]:
    """Return the formats in a layout of queries, keys and values.

    Parameters
    ----------
    qkv_layout : str, default = 'bshd_bshd_bshd'
        A layout of ``te_fast.pytorch.constants.QKVLayouts``.
    inference_params : InferenceParams, optional
        A cache: with one, keys may have another format than queries.

    Returns
    -------
    tuple of str
        The format of all, such as ``bshd`` or ``thd_2bshd``, of queries, and of keys and values.
    """
    parts = qkv_layout.removeprefix("paged_kv_").split("_")
    queries, keys = ("".join(filter(str.isalpha, part)) for part in (parts[0], parts[-1]))
    if inference_params is None:
        return queries, queries, queries
    return queries if queries == keys else f"{queries}_2{keys}", queries, keys
