"""The base class of layers where Transformer Engine has it."""

from te_fast.pytorch.base import TransformerEngineBaseModule, get_dummy_wgrad

__all__ = ["TransformerEngineBaseModule", "get_dummy_wgrad"]
