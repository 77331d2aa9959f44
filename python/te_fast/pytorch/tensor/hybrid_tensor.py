"""The quantizer of two quantizers where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.pytorch._missing import missing
from te_fast.tensor.passthrough import HybridQuantizer

__all__ = ["HybridQuantizer"]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
