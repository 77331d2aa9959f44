"""``LayerNormLinear`` where Transformer Engine has it."""

from te_fast.layers.layernorm_linear import LayerNormLinear

__all__ = ["LayerNormLinear"]
