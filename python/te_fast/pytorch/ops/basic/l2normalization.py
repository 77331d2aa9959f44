"""``L2Normalization`` where Transformer Engine has it."""

from te_fast.ops.basic.l2normalization import L2Normalization

__all__ = ["L2Normalization"]
