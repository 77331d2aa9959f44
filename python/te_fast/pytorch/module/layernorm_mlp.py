"""``LayerNormMLP`` where Transformer Engine has it."""

from te_fast.layers.layernorm_mlp import LayerNormMLP

__all__ = ["LayerNormMLP"]
