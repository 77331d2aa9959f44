"""Attention where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.attention.dot_product import DotProductAttention
from te_fast.attention.inference import InferenceParams
from te_fast.attention.multi_head import MultiheadAttention
from te_fast.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from te_fast.helpers.splitting import SplitAlongDim
from te_fast.pytorch._missing import missing
from te_fast.pytorch.attention import (
    dot_product_attention,
    inference,
    multi_head_attention,
    rope,
)

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
    "dot_product_attention",
    "inference",
    "multi_head_attention",
    "rope",
]

# The name of older versions.
_SplitAlongDim = SplitAlongDim

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
