"""``LayerNorm`` where Transformer Engine has it."""

from te_fast.pytorch.norm import LayerNorm

__all__ = ["LayerNorm"]
