"""MoE permutation where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.moe.permutation import (
    moe_dropped_rows,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_and_quantize,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)

__all__ = [
    "moe_dropped_rows",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_and_quantize",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

publish(__name__)
