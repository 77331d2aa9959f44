"""Regions by the names of recipes on command lines."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

RECIPES = ("delayed", "current", "block", "none")


def region(name: str) -> AbstractContextManager[Any]:
    """Return an autocast region.

    Parameters
    ----------
    name : str
        One of `RECIPES`; ``none`` means no region.
    """
    import te_fast.pytorch as te
    from te_fast.common import recipe as recipes

    if name == "none":
        return nullcontext()
    classes = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }
    return te.autocast(enabled=True, recipe=classes[name]())
