"""Dot product attention where Transformer Engine has it."""

from te_fast.attention.dot_product import DotProductAttention
from te_fast.pytorch.attention.dot_product_attention import (
    context_parallel,
    dot_product_attention,
    utils,
)

__all__ = ["DotProductAttention", "context_parallel", "dot_product_attention", "utils"]
