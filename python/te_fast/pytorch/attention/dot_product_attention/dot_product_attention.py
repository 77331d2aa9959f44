"""Dot product attention where Transformer Engine has it."""

from te_fast.attention.dot_product import DotProductAttention

__all__ = ["DotProductAttention"]
