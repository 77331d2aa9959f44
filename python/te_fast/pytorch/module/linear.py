"""``Linear`` where Transformer Engine has it."""

from te_fast.pytorch.linear import Linear

__all__ = ["Linear"]
