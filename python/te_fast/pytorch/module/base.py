"""The base class of layers where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.layers.base import TransformerEngineBaseModule
from te_fast.pytorch._missing import missing
from te_fast.runtime.main_grad import get_dummy_wgrad

__all__ = ["TransformerEngineBaseModule", "get_dummy_wgrad"]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
