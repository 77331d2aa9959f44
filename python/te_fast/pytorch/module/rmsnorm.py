"""``RMSNorm`` where Transformer Engine has it."""

from te_fast.pytorch.norm import RMSNorm

__all__ = ["RMSNorm"]
