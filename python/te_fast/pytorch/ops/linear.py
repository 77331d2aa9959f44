"""``Linear`` where Transformer Engine has it."""

from te_fast.ops.linear import (
    Linear,
)

__all__ = [
    "Linear",
]
