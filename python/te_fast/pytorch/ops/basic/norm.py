"""Norms and their base class, by public names."""

from te_fast._names import publish
from te_fast.ops.basic.norm import LayerNorm, Norm, RMSNorm

__all__ = ["LayerNorm", "Norm", "RMSNorm"]

publish(__name__)
