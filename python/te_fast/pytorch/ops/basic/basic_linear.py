"""``BasicLinear`` where Transformer Engine has it."""

from te_fast.ops.basic.basic_linear import BasicLinear

__all__ = ["BasicLinear"]
