"""The recipes that te_fast runs, by their names in the ids of tests."""

from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}


def name_of(recipe):
    """The key of a recipe in `RECIPES`."""
    return next(name for name, kind in RECIPES.items() if isinstance(recipe, kind))
