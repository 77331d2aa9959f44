"""Quantisation recipes where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

# A Format is pickled with it; code that lets torch.load read recipes names it, by Transformer Engine's name.
from te_fast.recipe.base import _FormatHelper as _FormatHelper

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]

publish(__name__, "_FormatHelper")
