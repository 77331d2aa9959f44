"""The layers where Transformer Engine has them."""

from te_fast.layers.grouped_linear import GroupedLinear
from te_fast.layers.layernorm_linear import LayerNormLinear
from te_fast.layers.layernorm_mlp import LayerNormMLP
from te_fast.layers.linear import Linear
from te_fast.layers.norm import LayerNorm, RMSNorm
from te_fast.moe.padding import Fp8Padding, Fp8Unpadding
from te_fast.pytorch._missing import missing
from te_fast.pytorch.module import (
    base,
    fp8_padding,
    fp8_unpadding,
    grouped_linear,
    layernorm,
    layernorm_linear,
    layernorm_mlp,
    linear,
    rmsnorm,
)

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "base",
    "fp8_padding",
    "fp8_unpadding",
    "grouped_linear",
    "layernorm",
    "layernorm_linear",
    "layernorm_mlp",
    "linear",
    "rmsnorm",
]


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
