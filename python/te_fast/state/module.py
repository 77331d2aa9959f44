"""Modules whose checkpoints keep the state of delayed scaling."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from te_fast.errors import StateError
from te_fast.recipe import Recipe
from te_fast.state import extra_state

_EXTRA_STATE = "_extra_state"


class StatefulModule(torch.nn.Module):
    """A module that may have scales and histories, forward and backward."""

    #: The module in messages.
    _STATE_OWNER: ClassVar[str]
    #: Path of the module in the model whose checkpoint was loaded last, for messages.
    _path: str = ""

    def _state_name(self) -> str:
        """Return the module's name in messages."""
        raise NotImplementedError

    def _state_sizes(self) -> tuple[int, int]:
        """Return the numbers of scales, forward and backward."""
        raise NotImplementedError

    def _scaling_states(self) -> tuple[Any, Any]:
        """Return the states of forward and backward, or None."""
        raise NotImplementedError

    def _make_scaling_states(self, recipe: Recipe) -> None:
        """Make, or keep, the states that a recipe needs."""
        raise NotImplementedError

    def _drop_slots(self) -> None:
        """Drop everything that depends on the scales' memory."""

    def _after_scales(self) -> None:
        """Adapt loaded histories to this rank's parameters."""

    def get_extra_state(self) -> torch.Tensor:
        """Return delayed scaling's state as CPU bytes, or None."""
        states = self._scaling_states()
        first = next((state for state in states if state is not None), None)
        if first is None:
            return extra_state.pack(None)
        tensors: list[torch.Tensor] = []
        for state in states:
            if state is None:
                tensors += [torch.empty(0), torch.empty(first.amax_history.shape[0], 0)]
            else:
                tensors += [state.scale, state.amax_history]
        state = extra_state.ExtraState(first.recipe, *tensors)
        return extra_state.pack(state, of_op=self._STATE_OWNER == "op")

    def set_extra_state(self, state: Any) -> None:
        """Restore a state of :meth:`get_extra_state`, or of Transformer Engine.

        Raises
        ------
        StateError
            If the bytes are damaged or not such a state. Nothing has changed then.
        """
        name, owner = self._state_name(), self._STATE_OWNER
        read = extra_state.unpack(state, layer=name)
        if read is None:
            return
        got, expected = (read.scale_fwd.numel(), read.scale_bwd.numel()), self._state_sizes()
        if got != expected:
            message = (
                f"{name}: _extra_state has scales of {got} tensors, the {owner} has {expected}; "
                f"it belongs to another {owner}"
            )
            raise StateError(message)
        self._make_scaling_states(read.recipe)
        forward, backward = self._scaling_states()
        if forward is not None:
            forward.load(read.scale_fwd, read.amax_history_fwd)
        if backward is not None:
            backward.load(read.scale_bwd, read.amax_history_bwd)
        self._after_scales()
        self._drop_slots()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A module without delayed scaling has exactly the keys of its counterpart in torch.nn, or in Transformer
        # Engine.
        is_stateless = self._scaling_states() == (None, None)
        if is_stateless and extra_state.written_as() == "te_fast":
            destination.pop(prefix + _EXTRA_STATE, None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.__dict__["_path"] = prefix.removesuffix(".")
        super()._load_from_state_dict(state_dict, prefix, *rest)
        # Checkpoints of torch.nn modules have no state; the module then begins with fresh scales.
        missing_keys: list[str] = rest[2]
        if prefix + _EXTRA_STATE in missing_keys:
            missing_keys.remove(prefix + _EXTRA_STATE)
