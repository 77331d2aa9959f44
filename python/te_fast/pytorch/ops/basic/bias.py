"""``Bias`` where Transformer Engine has it."""

from te_fast.ops.basic.bias import Bias

__all__ = ["Bias"]
