"""Factories for :class:`te_fast.common.recipe.CustomRecipe`, where Transformer Engine has them."""
