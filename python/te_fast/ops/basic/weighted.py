"""The base of operations with an FP8 weight: the weight's handle, and weights that are quantised tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from te_fast.ops.basic.native import NativeOperation
from te_fast.runtime.global_state import autocast_state
from te_fast.tensor import primary
from te_fast.tensor.answers import Kind, LinearRoles, linear_roles
from te_fast.tensor.of_factory import own_recipe
from te_fast.tensor.of_recipe import ONE, Stack

#: Index of the weight's scale among the forward scales of delayed scaling, after the input's.
_WEIGHT_SLOT = 1


class WeightedOperation(NativeOperation):
    """An operation with one weight, maybe in parts, which its native program quantises or reads quantised."""

    _handle: Any
    _takes_to_fp8 = True
    #: Names of the parameters that are the weight, or its parts.
    _weight_names: Sequence[str]

    _KIND: Kind = "linear"

    def _linear_roles(self) -> list[LinearRoles]:
        return [linear_roles(self._KIND, getattr(self, "name", "") or "")]

    def _note_init(self) -> None:
        """Note the options of ``quantized_model_init``."""
        self._with_quantized_weight = autocast_state.fp8_parameters
        self._preserves_init_value = autocast_state.high_precision_init_val
        # A factory is not kept: no pickle may take it.
        self._weight_recipe = own_recipe(self, autocast_state.model_recipe)

    def _make_handle(self) -> None:
        """Make the native half."""
        raise NotImplementedError

    def _lay_together(self) -> None:
        """Let the parts of a weight share one memory."""

    # Quantised weights ----------------------------------------------------------------------------

    def _stack_of_weight(self) -> Stack:
        """Return the values that a weight is a stack of."""
        return ONE

    def _slot_of_weight(self, number: int) -> int:
        return number * self.num_quantizers("forward") // len(self._weight_names) + _WEIGHT_SLOT

    def _quantize_weights(self) -> None:
        """Replace the weights by quantised tensors, if the operation was made in ``quantized_model_init``."""
        recipe = self._weight_recipe
        if not self._with_quantized_weight or recipe is None:
            return
        for number, name in enumerate(self._weight_names):
            weight = getattr(self, name)
            if primary.is_quantized(weight):
                continue
            self.reset_recipe_state(recipe=recipe)
            slot, state = self._slot_of_weight(number), self._scaling_states()[0]
            quantizer = primary.weight_quantizer(recipe, state, slot, self._stack_of_weight())
            preserves = self._preserves_init_value
            made = primary.quantized_parameter(weight, quantizer, preserves=preserves)
            self.register_parameter(name, made)

    def _quantized_weights(self) -> list[tuple[int, Any]]:
        """Return the weights that are quantised tensors, or a rank's parts of them, with their numbers."""
        parts = [primary.quantized_part(self._parameters.get(name)) for name in self._weight_names]
        return [(number, part) for number, part in enumerate(parts) if part is not None]

    def _point_weights(self) -> None:
        """Let weights of delayed scaling be quantised with the scales that the operation has now."""
        state, stack = self._scaling_states()[0], self._stack_of_weight()
        for number, weight in self._quantized_weights():
            primary.point_at(weight, state, self._slot_of_weight(number), stack)

    # The native half ------------------------------------------------------------------------------

    def _set_slots(self, epoch: int) -> None:
        self._point_weights()
        forward, backward = self._scaling_states()
        if forward is not None and backward is not None:
            self._handle.set_slots(epoch, forward.slots, backward.slots, 0, 0)

    def _drop_slots(self) -> None:
        self._handle.drop_slots()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a weight that is set again may have other values at the same address and version."""
        super().__setattr__(name, value)
        if isinstance(value, torch.Tensor) and "_handle" in self.__dict__:
            self._drop_weight_cache()
            if primary.settle_shard(value):
                self._point_weights()

    def _drop_weight_cache(self, *, of_graphs: bool = True) -> None:
        self._handle.drop_weight_cache(of_graphs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Drop the FP8 weights, since ``.to()`` and its kin replace the weights' memory."""
        kept = primary.attributes_of(self)
        self._drop_weight_cache()  # torch exchanges no parameter to which a cached weight refers
        result = super()._apply(partial(primary.keep_quantized, fn), recurse)
        primary.restore_attributes(self, kept)
        self._point_weights()
        self._lay_together()
        return result

    # Copies and checkpoints -----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave the native half out; the copy makes its own."""
        state = super().__getstate__()
        state.pop("_handle", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a native half of this copy's own."""
        super().__setstate__(state)
        self._make_handle()
        self._point_weights()
        self._lay_together()

    def set_extra_state(self, state: Any) -> None:
        """Restore a state of :meth:`get_extra_state`, or of Transformer Engine."""
        super().set_extra_state(state)
        self._point_weights()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Values in high precision are quantised as they are loaded, with the scales of the checkpoint.
        key = f"{prefix}_extra_state"
        if key in state_dict and self._quantized_weights():
            self.set_extra_state(state_dict[key])
        self._drop_weight_cache()  # as in `_apply`
        super()._load_from_state_dict(state_dict, prefix, *rest)
