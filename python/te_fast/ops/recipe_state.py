"""The part of an op that recipes need: delayed scaling's state and its place in checkpoints."""

from __future__ import annotations

from typing import Any, Literal

import torch

from te_fast.recipe import DelayedScaling, Recipe
from te_fast.recipe.roles import QuantizerRole
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.state.module import StatefulModule
from te_fast.tensor import primary
from te_fast.tensor.answers import LinearRoles
from te_fast.tensor.of_recipe import quantizers_of
from te_fast.tensor.quantizer import Float8QuantizerBase

_META_KEYS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


class RecipeStateModule(StatefulModule):
    """Scales and histories of an op, in the layout that Transformer Engine's checkpoints have."""

    def __init__(self) -> None:
        super().__init__()
        self._fp8_metas: dict[str, dict[str, Any] | None] | None = None

    def num_quantizers(self, mode: str) -> int:
        """Return the number of tensors that the op quantises.

        Parameters
        ----------
        mode : {'forward', 'backward'}
            Direction.
        """
        return 0

    def _linear_roles(self) -> list[LinearRoles]:
        """Return what a CustomRecipe's factory is asked for each linear operation within."""
        return []

    def get_quantizer_roles(
        self, mode: Literal["forward", "backward"]
    ) -> list[QuantizerRole] | None:
        """Return what a :class:`CustomRecipe`'s factory is asked in one direction; None if no operand is quantised.

        Parameters
        ----------
        mode : {'forward', 'backward'}
            Forward: input and weight; backward: the gradient of the output.
        """
        fields = ("input", "weight") if mode == "forward" else ("grad_output",)
        asked = [getattr(roles, field) for roles in self._linear_roles() for field in fields]
        return asked * (self.num_quantizers(mode) // len(asked)) if asked else None

    def get_quantizer(
        self, mode: Literal["forward", "backward"], index: int
    ) -> Float8QuantizerBase | None:
        """Return the quantizer of an operand under the region's recipe, or else under the recipe of its scales.

        Parameters
        ----------
        mode : {'forward', 'backward'}
            Direction.
        index : int
            Operand, less than ``num_quantizers(mode)``: forward input and weight of each GEMM, backward gradients
            of the outputs.

        Returns
        -------
        Float8QuantizerBase or None
            A quantizer of delayed scaling has the operation's own scale and live maximum. Setting its attributes
            changes no forward. None without a recipe, and under delayed scaling before the first forward.
        """
        meta = (self._fp8_metas or {}).get(mode) or {}
        recipe = meta.get("recipe")
        if FP8GlobalStateManager.is_fp8_enabled():
            recipe = FP8GlobalStateManager.get_fp8_recipe()
        if recipe is None:
            return None
        pattern = ("input", "weight") if mode == "forward" else ("grad",)
        count = self.num_quantizers(mode)
        roles = [pattern[slot % len(pattern)] for slot in range(count)]
        made = quantizers_of(recipe, roles, meta.get(_META_KEYS[mode]))
        return made[index] if made else None

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """Make, or keep, the scales and histories that a recipe needs.

        Parameters
        ----------
        recipe : Recipe, optional
            The recipe; ``None`` drops all state.
        """
        if recipe is None:
            self._fp8_metas = None
            return
        metas = self._fp8_metas or {"forward": None, "backward": None}
        group = FP8GlobalStateManager.get_fp8_group()
        for mode, key in _META_KEYS.items():
            count = self.num_quantizers(mode)
            if count == 0:
                continue
            meta = metas[mode] or {}
            meta.update(recipe=recipe, fp8_group=group)
            if isinstance(recipe, DelayedScaling):
                self._use(meta, mode, key, count)
            else:
                meta.pop(key, None)
            metas[mode] = meta
        self._fp8_metas = metas

    def _use(self, meta: dict[str, Any], mode: str, key: str, count: int) -> None:
        state, device = meta.get(key), self._state_device()
        if state is not None:
            if (
                device is not None
            ):  # an op without parameters learns its device in the first forward
                state.to(device)
            state.use(meta["recipe"], meta["fp8_group"])
            return
        meta[key] = DelayedScalingRecipeState(
            meta["recipe"], mode=mode, num_quantizers=count, device=device, group=meta["fp8_group"]
        )

    def _state_device(self) -> torch.device | None:
        parameter = next(self.parameters(), None)
        return None if parameter is None else parameter.device

    def _delayed_state(self, mode: str) -> DelayedScalingRecipeState | None:
        """Return delayed scaling's state of a direction, or None if there is none."""
        meta = (self._fp8_metas or {}).get(mode)
        return None if meta is None else meta.get(_META_KEYS[mode])

    def _take_part(self) -> None:
        """Let the states take part in updates, since a forward uses them."""
        for state in self._scaling_states():
            if state is not None:
                state.take_part(self._state_name())

    # Checkpoints ----------------------------------------------------------------------------------

    _STATE_OWNER = "op"

    def _state_name(self) -> str:
        return self._path or type(self).__name__

    def _state_sizes(self) -> tuple[int, int]:
        return self.num_quantizers("forward"), self.num_quantizers("backward")

    def _scaling_states(self) -> tuple[Any, Any]:
        return self._delayed_state("forward"), self._delayed_state("backward")

    def _after_scales(self) -> None:
        primary.restore_maxima(self)

    def _make_scaling_states(self, recipe: Recipe) -> None:
        self.reset_recipe_state(recipe=recipe)
