"""The transformer layer where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.attention.transformer_layer import DropPath, TransformerLayer

__all__ = ["DropPath", "TransformerLayer"]

publish(__name__)
