"""Multi-head attention where Transformer Engine has it."""

from te_fast.attention.multi_head import MultiheadAttention

__all__ = ["MultiheadAttention"]
