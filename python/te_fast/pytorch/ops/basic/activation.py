"""Activations where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.ops.basic.activation import GELU, QGELU, Activation, ReLU, SiLU, SReLU
from te_fast.ops.basic.glu import GEGLU, GLU, QGEGLU, ReGLU, SReGLU

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "SiLU",
]

publish(__name__)
