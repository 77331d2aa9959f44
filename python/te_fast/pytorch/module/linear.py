"""``Linear`` where Transformer Engine has it."""

from te_fast.layers.linear import Linear

__all__ = ["Linear"]
