"""``RMSNorm`` where Transformer Engine has it."""

from te_fast.layers.norm import RMSNorm

__all__ = ["RMSNorm"]
