"""Activations with a factor per row and their base class, by public names."""

from te_fast._names import publish
from te_fast.ops.basic.scaled import (
    ScaledActivation,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
)

__all__ = [
    "ScaledActivation",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
]

publish(__name__)
