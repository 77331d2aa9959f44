"""``GroupedLinear`` where Transformer Engine has it."""

from te_fast.layers.grouped_linear import GroupedLinear

__all__ = ["GroupedLinear"]
