"""The part of an op that recipes need: delayed scaling's state and its place in checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import StateError
from te_fast.recipe import DelayedScaling, Recipe
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.state import extra_state

__all__ = ["RecipeStateModule"]

_EXTRA_STATE = "_extra_state"
_KEYS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


class RecipeStateModule(torch.nn.Module):
    """Scales and histories of an op, in the layout that Transformer Engine's checkpoints have."""

    def __init__(self) -> None:
        super().__init__()
        self._fp8_metas: dict[str, dict[str, Any] | None] | None = None

    def num_quantizers(self, mode: str) -> int:
        """Return how many tensors the op quantises.

        Parameters
        ----------
        mode : {'forward', 'backward'}
            Direction.
        """
        return 0

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """Make, or keep, the scales and histories that a recipe asks for.

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
        for mode, key in _KEYS.items():
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
            if device is not None:  # an op without parameters learns it in its first forward
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
        """Return the state of a direction, or None where delayed scaling has none."""
        meta = (self._fp8_metas or {}).get(mode)
        return None if meta is None else meta.get(_KEYS[mode])

    def _take_part(self) -> None:
        """Let the states take part in updates: a forward uses them."""
        for mode in _KEYS:
            state = self._delayed_state(mode)
            if state is not None:
                state.take_part()

    # Checkpoints ----------------------------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """Return delayed scaling's state as CPU bytes, none where there is no state."""
        states = {mode: self._delayed_state(mode) for mode in _KEYS}
        first = next((state for state in states.values() if state is not None), None)
        if first is None:
            return extra_state.pack(None)
        tensors: list[torch.Tensor] = []
        for state in states.values():
            if state is None:
                tensors += [torch.empty(0), torch.empty(first.amax_history.shape[0], 0)]
            else:
                tensors += [state.scale, state.amax_history]
        return extra_state.pack(extra_state.ExtraState(first.recipe, *tensors))

    def set_extra_state(self, state: Any) -> None:
        """Restore what :meth:`get_extra_state`, or Transformer Engine's, returned.

        Raises
        ------
        StateError
            If the bytes are damaged or not such a state; nothing has changed then.
        """
        name = type(self).__name__
        read = extra_state.unpack(state, layer=name)
        if read is None:
            return
        expected = tuple(self.num_quantizers(mode) for mode in _KEYS)
        got = (read.scale_fwd.numel(), read.scale_bwd.numel())
        if got != expected:
            message = (
                f"{name}: _extra_state has scales of {got} tensors, the op has {expected}; "
                "it belongs to another op"
            )
            raise StateError(message)
        self.reset_recipe_state(recipe=read.recipe)
        loaded = {
            "forward": (read.scale_fwd, read.amax_history_fwd),
            "backward": (read.scale_bwd, read.amax_history_bwd),
        }
        for mode, tensors in loaded.items():
            own = self._delayed_state(mode)
            if own is not None:
                own.load(*tensors)
        self._recipe_state_changed()

    def _recipe_state_changed(self) -> None:
        """Forget what depends on the scales' memory."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # An op without delayed scaling has the very keys of its torch.nn counterpart.
        if all(self._delayed_state(mode) is None for mode in _KEYS):
            destination.pop(prefix + _EXTRA_STATE, None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        missing_keys: list[str] = rest[2]
        if prefix + _EXTRA_STATE in missing_keys:
            missing_keys.remove(prefix + _EXTRA_STATE)
