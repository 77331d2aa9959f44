"""``Quantize`` where Transformer Engine has it."""

from te_fast.ops.basic.quantize import Quantize

__all__ = ["Quantize"]
