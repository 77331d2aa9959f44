"""Factories that give every layer what a built-in recipe would, where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.pytorch._missing import missing
from te_fast.tensor.factories import (
    current_scaling_factory,
    delayed_scaling_factory,
    float8_block_scaling_factory,
    high_precision_factory,
)

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
