"""``GroupedLinear`` where Transformer Engine has it."""

from te_fast.ops.basic.grouped_linear import GroupedLinear
from te_fast.ops.common import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY

__all__ = ["GRAD_INPUT_BUFFER_KEY", "OUTPUT_BUFFER_KEY", "GroupedLinear"]
