"""``Sequential`` where Transformer Engine has it."""

from te_fast.ops.sequential import (
    Sequential,
)

__all__ = [
    "Sequential",
]
