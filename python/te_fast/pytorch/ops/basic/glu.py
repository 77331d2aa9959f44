"""Gated activations and their base class, by public names."""

from te_fast._names import publish
from te_fast.ops.basic.glu import (
    GEGLU,
    GLU,
    QGEGLU,
    ClampedSwiGLU,
    GatedActivation,
    ReGLU,
    SiTUGLU,
    SReGLU,
    SwiGLU,
)

__all__ = [
    "GEGLU",
    "GLU",
    "QGEGLU",
    "ClampedSwiGLU",
    "GatedActivation",
    "ReGLU",
    "SReGLU",
    "SiTUGLU",
    "SwiGLU",
]

publish(__name__)
