"""``LayerNorm`` where Transformer Engine has it."""

from te_fast.layers.norm import LayerNorm

__all__ = ["LayerNorm"]
