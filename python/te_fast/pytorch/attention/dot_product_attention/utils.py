"""Masks, windows and lengths of sequences where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.attention.masks import (
    check_set_window_size,
    get_cu_seqlens,
    get_cu_seqlens_and_indices,
    get_full_cu_seqlens,
    get_full_mask,
    get_indices,
    get_padding_mask,
    get_qkv_format,
    maybe_contiguous,
)
from te_fast.pytorch._missing import missing

__all__ = [
    "check_set_window_size",
    "get_cu_seqlens",
    "get_cu_seqlens_and_indices",
    "get_full_cu_seqlens",
    "get_full_mask",
    "get_indices",
    "get_padding_mask",
    "get_qkv_format",
    "maybe_contiguous",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
