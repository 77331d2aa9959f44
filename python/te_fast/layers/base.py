"""The base class of layers, after Transformer Engine's ``TransformerEngineBaseModule``."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import te_fast
from te_fast.errors import DtypeError, ShapeError, UnsupportedError
from te_fast.layers.parameters import check_sizes
from te_fast.layers.wgrad_store import WeightGradStore
from te_fast.parallel.checkpoint import Share, shares_by_marks
from te_fast.parallel.quantized import Role, quantizer_of_rows
from te_fast.parallel.ranks import check_group, reduced_sharing, size_of_group
from te_fast.recipe import DelayedScaling, Recipe
from te_fast.recipe.roles import QuantizerRole
from te_fast.runtime import native, scale_tape
from te_fast.runtime.arguments import check_layer_name
from te_fast.runtime.calls import call_through_forward
from te_fast.runtime.delayed import DelayedScalingRecipeState, resized
from te_fast.runtime.global_state import FP8GlobalStateManager, autocast_state
from te_fast.state.module import StatefulModule
from te_fast.tensor import of_factory, primary
from te_fast.tensor.answers import Kind, LinearRoles, linear_roles
from te_fast.tensor.of_recipe import ONE, Stack, quantizer_of, quantizers_of
from te_fast.tensor.quantizer import Float8QuantizerBase

_layer_numbers = itertools.count(1)
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (te_fast.__file__, torch.__file__))


def _callers_level() -> int:
    """Return the ``stacklevel`` with which a warning points at the code that called the library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level


class _Workspaces(dict[str, torch.Tensor]):
    """A layer's cached weights, for code that frees them between steps."""

    def __init__(self, kept: dict[str, torch.Tensor], drop: Callable[[], None]) -> None:
        super().__init__(kept)
        self._drop = drop

    def clear(self) -> None:
        """Free the weights; the next forward quantises them again."""
        super().clear()
        self._drop()


class TransformerEngineBaseModule(StatefulModule):
    """State and checkpoints of FP8 layers.

    Attributes
    ----------
    name : str
        Name in messages; ``Layer_<n>`` unless given.
    fp8_meta : dict
        ``recipe``, ``fp8_group``, ``num_gemms``, after the first FP8 forward ``fp8_max_fwd`` and ``fp8_max_bwd``, the
        largest FP8 numbers, and, under delayed scaling, ``scaling_fwd`` and ``scaling_bwd`` with ``scale`` and
        ``amax_history``.
    fp8, fp8_calibration, fp8_initialized : bool
        State of the last region that the layer ran in.
    """

    #: Attributes that hold native objects. Copies and pickles leave them out and make their own.
    _NATIVE: tuple[str, ...] = ()
    #: Attributes that the native half is made from. Setting one of them makes the native half anew.
    _CONSTANTS = frozenset(
        {"return_bias", "apply_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute"}
    )
    delay_wgrad_compute: bool = False
    #: FP8 slots: input, weight, output per GEMM forward; output's and input's gradient backward.
    _FORWARD_ROLES: tuple[str, ...] = ("input", "weight", "input")
    _BACKWARD_ROLES: tuple[str, ...] = ("grad", "grad")
    _FORWARD_SLOTS = len(_FORWARD_ROLES)
    _BACKWARD_SLOTS = len(_BACKWARD_ROLES)
    #: The name that a CustomRecipe's factory is told: that of the constructor.
    _role_name = ""
    _KIND: Kind = "linear"

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        check_layer_name(self, name)
        number = next(_layer_numbers)
        self.name = f"Layer_{number}" if name is None else name
        self._role_name = name or ""
        self._output_quantizer_role: QuantizerRole | None = None
        self._grad_input_quantizer_role: QuantizerRole | None = None
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {
            "recipe": None,
            "fp8_group": None,
            "num_gemms": 1,
            "fp8_checkpoint": False,
        }
        self.fp8_meta_tensors_initialized = False
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.primary_weights_in_fp8 = FP8GlobalStateManager.with_fp8_parameters()
        self.preserve_high_precision_init_val = FP8GlobalStateManager.with_high_precision_init_val()
        # A factory is not kept: no pickle may take it.
        self._weight_recipe = of_factory.own_recipe(self, autocast_state.model_recipe)
        self.fsdp_wrapped = False
        self.fsdp_group: Any = None
        self.activation_dtype: torch.dtype | None = None
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        """Let subclasses that override ``forward`` be called as any module."""
        super().__init_subclass__(**options)
        call_through_forward(cls)

    # The native half ------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and make the native half anew if it depends on that."""
        is_constant, is_tensor = name in self._CONSTANTS, isinstance(value, torch.Tensor)
        is_read = (is_constant or is_tensor) and any(part in self.__dict__ for part in self._NATIVE)
        former: Any = self.__dict__.get(name)
        super().__setattr__(name, value)
        if not is_read:
            return
        if is_tensor:
            # FSDP takes parameters away and brings them back, with other values at the same address and version.
            self._drop_weight_cache()
            if primary.settle_shard(value):
                self._point_weights()
            return
        try:
            self._make_native()
        except Exception:
            super().__setattr__(name, former)
            self._make_native()
            raise

    def _make_native(self) -> None:
        """Make the attributes of ``_NATIVE`` from the attributes that the constructor has set."""

    def _weight_handles(self) -> dict[str, Any]:
        """Return the native halves of the layer's weights, by name."""
        return {}

    def _plan_count(self) -> int:
        """Return how many plans the native half holds."""
        raise NotImplementedError

    def _set_slots(self, epoch: int, forward: Any, backward: Any) -> None:
        """Register scales for the regions of an epoch with the native half."""
        raise NotImplementedError

    def _drop_slots(self) -> None:
        for handle in self._weight_handles().values():
            handle.drop_slots()

    def _drop_weight_cache(self, *, of_graphs: bool = True) -> None:
        for handle in self._weight_handles().values():
            handle.drop_weight_cache(of_graphs)

    @property
    def _fp8_workspaces(self) -> dict[str, torch.Tensor]:
        """Quantised weights that are cached, as bytes; clearing the dict frees them."""
        caches = {name: handle.weight_cache() for name, handle in self._weight_handles().items()}
        kept = {name: cache[0] for name, cache in caches.items() if cache is not None}
        return _Workspaces(kept, self._drop_weight_cache)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the ranks that share the layer, before its first forward.

        Parameters
        ----------
        tp_group : torch.distributed.ProcessGroup or None
            A group of ``tp_size`` ranks; None means one rank.

        Raises
        ------
        RanksError
            If it has another number of ranks, or this one is not in it.
        """
        check_group(self.name, tp_group, self.tp_size)
        self.tp_group = tp_group

    def _share_among_ranks(self, tp_group: Any, tp_size: int, *, sequence_parallel: bool) -> None:
        """Take a constructor's arguments of tensor parallelism; without a group, one has to be set before a forward."""
        self.tp_size = size_of_group(self.name, tp_group, tp_size)
        self.tp_group = tp_group
        # As in Transformer Engine, the argument has no effect with one rank.
        self.sequence_parallel = self.tp_size > 1 and bool(sequence_parallel)

    def set_activation_dtype(self, inp: torch.Tensor) -> None:
        """Set ``activation_dtype``: autocast's, or the input's, which the parameters must share.

        Raises
        ------
        DtypeError
            If a parameter has another type.
        """
        kind = inp.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        else:
            dtype = inp.dtype
            self._check_types(inp)
        if dtype != self.activation_dtype:  # a module's attributes are slow to set
            self.activation_dtype = dtype

    def _check_types(self, inp: torch.Tensor) -> None:
        """Raise unless all parameters have the type of the input."""
        dtype = inp.dtype
        # A walk over modules takes several times as long.
        own = self.named_parameters() if self._modules else self._parameters.items()
        for name, parameter in own:
            if parameter is not None and parameter.dtype != dtype:
                message = (
                    f"{self.name}: the input is {inp.dtype} and parameter {name} is "
                    f"{parameter.dtype}; cast one, or run under torch.autocast"
                )
                raise DtypeError(message)

    def _refuse_functorch(self, where: str) -> None:
        if torch._C._are_functorch_transforms_active():
            message = f"{self.name}: torch.func transforms (vmap, grad, ...) do not work {where}"
            raise UnsupportedError(message)

    # Delayed scaling -----------------------------------------------------------------------------

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Take the recipe and group of the autocast region."""
        self.fp8_meta["num_gemms"] = num_gemms
        self._enter_region()
        if self.fp8 or self.fp8_calibration:
            self.init_fp8_meta_tensors(self.fp8_meta["recipe"])
            for state in self._delayed_states() or ():
                state.take_part(self._state_name())

    def _enter_region(self) -> None:
        """Note recipe and group of the autocast region; called when they differ from those of the last forward."""
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.fp8_calibration = FP8GlobalStateManager.is_fp8_calibration()
        # Whether checkpoints have a state of FP8; Megatron-LM asks.
        self.fp8_meta["fp8_checkpoint"] = self.fp8 or self.fp8_calibration
        if not (self.fp8 or self.fp8_calibration):
            return
        if self.fp8:
            self._check_quantized_weights(FP8GlobalStateManager.get_fp8_recipe())
        former, recipe = self.fp8_meta.get("recipe"), FP8GlobalStateManager.get_fp8_recipe()
        self.fp8_meta["recipe"] = recipe
        self.fp8_meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
        largest = recipe.fp8_format.value
        self.fp8_meta.update(fp8_max_fwd=largest.max_fwd, fp8_max_bwd=largest.max_bwd)
        self.fp8_initialized = True
        if former is not None and former._scaling != recipe._scaling:
            message = (
                f"{self.name}: Recipe type changed from {type(former).__name__} to "
                f"{type(recipe).__name__}; what the model computes changes with it"
            )
            warnings.warn(message, UserWarning, stacklevel=_callers_level())

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Make, or keep, the scales and histories that the recipe needs."""
        self.set_meta_tensor(True, recipe)
        self.set_meta_tensor(False, recipe)
        self.fp8_meta_tensors_initialized = True

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Make, or keep, the scales and histories of one direction."""
        if not isinstance(recipe, DelayedScaling):
            return
        key = "scaling_fwd" if fwd else "scaling_bwd"
        slots = (self._FORWARD_SLOTS if fwd else self._BACKWARD_SLOTS) * self.fp8_meta["num_gemms"]
        group = self.fp8_meta["fp8_group"]
        parameter = next(self.parameters(), None)
        # Scales without memory (meta device) get their memory in reset_parameters().
        device = None if parameter is None or parameter.is_meta else parameter.device
        state = self.fp8_meta.get(key)
        if isinstance(state, DelayedScalingRecipeState):
            if device is not None:
                state.to(device)
            former = state.amax_history.shape[0]
            state.use(recipe, group)
            if fwd and former != recipe.amax_history_len and self._quantized_weights():
                message = (
                    f"{self.name}: Quantizer is being updated, this may affect model behavior: the scales of the "
                    f"quantised weights follow {recipe.amax_history_len} maxima, not {former} as before"
                )
                warnings.warn(message, UserWarning, stacklevel=_callers_level())
            return
        mode = "forward" if fwd else "backward"
        self.fp8_meta[key] = DelayedScalingRecipeState(
            recipe, mode=mode, num_quantizers=slots, device=device, group=group
        )

    @property
    def quantizers(self) -> dict[str, list[Float8QuantizerBase]]:
        """Quantizers of the GEMMs' operands under the recipe of the last FP8 forward; empty lists before the first one.

        Forward: input, weight and output of each GEMM; backward: gradients of its output and input. Quantizers of
        delayed scaling have the layer's own scales and live maxima. Setting their attributes changes no forward.
        """
        recipe, gemms = self.fp8_meta["recipe"], self.fp8_meta["num_gemms"]
        sides = {"scaling_fwd": self._FORWARD_ROLES, "scaling_bwd": self._BACKWARD_ROLES}
        if recipe is None:
            return {key: [] for key in sides}
        return {
            key: quantizers_of(recipe, roles * gemms, self.fp8_meta.get(key))
            for key, roles in sides.items()
        }

    def _init_delayed_scaling(self) -> None:
        """Register scales with the dispatcher; it calls this when the autocast region is new."""
        self.init_fp8_metadata(self.fp8_meta["num_gemms"])
        states = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        self._point_weights()
        scale_tape.layers[states[0].slots.id] = self
        self._set_slots(native.autocast_region()[5], *(state.slots for state in states))

    def get_fp8_meta_tensors(self) -> dict[str, list[torch.Tensor]] | None:
        """Return copies of the scales and histories, or None where there are none."""
        states = self._delayed_states()
        if states is None:
            return None
        return {
            key: [state.scale.clone(), state.amax_history.clone()]
            for key, state in zip(("scaling_fwd", "scaling_bwd"), states, strict=True)
        }

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: dict[str, Any] | None = None) -> None:
        """Set scales and histories to their initial values, or to saved ones."""
        states = self._delayed_states()
        if states is None:
            return
        for key, state in zip(("scaling_fwd", "scaling_bwd"), states, strict=True):
            if fp8_meta_tensors is None:
                state.reset()
            else:
                state.load(*fp8_meta_tensors[key])
        self._drop_slots()

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Cut the histories, or extend them by zeros, to `length` rows.

        Raises
        ------
        DtypeError, ShapeError
            If `length` is no integer of 1 or more.
        """
        check_sizes(self.name, length=length)
        if length == 0:
            message = f"{self.name}: length must be at least 1, got 0"
            raise ShapeError(message)
        states = self._delayed_states()
        if states is None:
            return
        for state, is_forward in zip(states, (True, False), strict=True):
            if fwd is None or fwd == is_forward:
                state.amax_history = resized(state.amax_history, length)
        self._point_weights()
        self._drop_slots()

    def _delayed_states(self) -> tuple[DelayedScalingRecipeState, DelayedScalingRecipeState] | None:
        forward, backward = self._scaling_states()
        return None if forward is None or backward is None else (forward, backward)

    # Recipes of a factory ------------------------------------------------------------------------

    def _names_of_linears(self) -> tuple[str, ...]:
        """Return the names of the linear ops for a CustomRecipe's factory; none for attention, which is not in FP8."""
        return (self._role_name,)

    def _linear_roles(self) -> list[LinearRoles]:
        """Return what a CustomRecipe's factory is asked for each linear op."""
        linears = [linear_roles(self._KIND, name) for name in self._names_of_linears()]
        pairs = list(itertools.pairwise(linears))
        outputs = [after.input for _, after in pairs] + [self._output_quantizer_role]
        grads = [self._grad_input_quantizer_role] + [before.grad_output for before, _ in pairs]
        return [
            linear._replace(output=output, grad_input=grad)
            for linear, output, grad in zip(linears, outputs, grads, strict=False)
        ]

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """Return what a :class:`CustomRecipe`'s factory is asked in one direction.

        Parameters
        ----------
        fwd : bool
            Forward: input, weight and output of each GEMM; otherwise the gradients of its output and input.
        num_quantizers : int
            Length of the list.
        """
        fields = ("input", "weight", "output") if fwd else ("grad_output", "grad_input")
        asked = [getattr(roles, field) for roles in self._linear_roles() for field in fields]
        return [asked[slot % len(asked)] if asked else None for slot in range(num_quantizers)]

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """The operand that the output is for its reader, which a factory is told; None if the reader is unknown."""
        return self._output_quantizer_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._set_role("_output_quantizer_role", role)

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """The operand that the input's gradient is for its reader; None if the reader is unknown."""
        return self._grad_input_quantizer_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._set_role("_grad_input_quantizer_role", role)

    def _set_role(self, name: str, role: QuantizerRole | None) -> None:
        if role != getattr(self, name):
            setattr(self, name, role)
            of_factory.forget(self)

    # Quantised weights ---------------------------------------------------------------------------

    def _stack_of_weight(self) -> Stack:
        """Return the values that a weight is a stack of."""
        return ONE

    def _linear_weights(self) -> tuple[str, ...]:
        """Return the names of the weights of the linear ops, in order; None for weights in parts."""
        return ()

    def _quantized_weights(self) -> list[tuple[int, str, Any]]:
        """Return the weights that are quantised tensors: number of the linear op, name, parameter or a rank's part."""
        found = [
            (linear, name, primary.quantized_part(self._parameters.get(name)))
            for linear, name in enumerate(self._linear_weights())
        ]
        return [weight for weight in found if weight[2] is not None]

    def _check_quantized_weights(self, recipe: Recipe) -> None:
        """Raise unless a recipe quantises weights in the same way as the layer's quantised weights."""
        for _, name, weight in self._quantized_weights():
            primary.check_recipe(weight, recipe, self.name, name)

    def _outer_quantizer(self, is_grad: bool, columnwise: bool) -> Any:
        """Return the quantizer of the output for `fp8_output`, or of the input's gradient for `fp8_grad`."""
        recipe = self.fp8_meta["recipe"]
        key, slot = ("scaling_bwd", 1) if is_grad else ("scaling_fwd", self._FORWARD_SLOTS - 1)
        options: dict[str, Any] = {"rowwise": True, "columnwise": columnwise}
        role = "grad" if is_grad else "input"
        return quantizer_of(recipe, role, self.fp8_meta.get(key), slot, **options)

    def _quantizer_of_rows(self, recipe: Recipe, role: Role, group: Any) -> Any:
        """Return the quantizer for gathered rows of the input or of the result's gradient; None to gather values."""
        key, slot = "scaling_fwd", 0
        if role == "grad":
            key, slot = "scaling_bwd", (self.fp8_meta["num_gemms"] - 1) * self._BACKWARD_SLOTS
        return quantizer_of_rows(recipe, role, self.fp8_meta.get(key), slot, group)

    def _quantize_weight(self, name: str) -> None:
        """Replace an initialised weight by a quantised tensor, if the layer has quantised weights."""
        recipe, parameter = self._weight_recipe, self._parameters[name]
        if not self.primary_weights_in_fp8 or recipe is None or parameter is None:
            return
        if primary.is_quantized(parameter):
            return
        self.fp8_meta["recipe"] = recipe
        self.init_fp8_meta_tensors(recipe)
        slot = self._linear_weights().index(name) * self._FORWARD_SLOTS + 1
        state, stack = self.fp8_meta.get("scaling_fwd"), self._stack_of_weight()
        quantizer = primary.weight_quantizer(recipe, state, slot, stack)
        preserves = self.preserve_high_precision_init_val
        made = primary.quantized_parameter(parameter, quantizer, preserves=preserves)
        self.register_parameter(name, made)

    def _point_weights(self) -> None:
        """Let weights of delayed scaling be quantised with the scales that the layer has now."""
        for linear, _, weight in self._quantized_weights():
            slot = linear * self._FORWARD_SLOTS + 1
            state, stack = self.fp8_meta.get("scaling_fwd"), self._stack_of_weight()
            primary.point_at(weight, state, slot, stack)

    # Checkpoints ---------------------------------------------------------------------------------

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

    _STATE_OWNER = "layer"

    def _state_name(self) -> str:
        return self._path or self.name

    def _state_sizes(self) -> tuple[int, int]:
        gemms = self.fp8_meta["num_gemms"]
        return self._FORWARD_SLOTS * gemms, self._BACKWARD_SLOTS * gemms

    def _scaling_states(self) -> tuple[Any, Any]:
        return self.fp8_meta.get("scaling_fwd"), self.fp8_meta.get("scaling_bwd")

    def _after_scales(self) -> None:
        primary.restore_maxima(self)

    def _make_scaling_states(self, recipe: Recipe) -> None:
        self.fp8_meta.update(recipe=recipe, fp8_checkpoint=True)
        self.init_fp8_meta_tensors(recipe)

    # Checkpoints of several ranks ----------------------------------------------------------------

    def _shares_of_parameters(self) -> dict[str, Share]:
        """Return which parameters ranks share."""
        is_shared = getattr(self, "parallel_mode", None) or getattr(
            self, "set_parallel_mode", False
        )
        if not is_shared or self.tp_size == 1:
            return {}
        return shares_by_marks(self, self.tp_group)

    # Copies --------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave the native half out; the copy makes its own, with empty caches."""
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in self._NATIVE}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let deep copies share process groups."""
        groups = self.tp_group, self.fsdp_group, self.fp8_meta.get("fp8_group")
        return reduced_sharing(super().__reduce_ex__(protocol), groups)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a native half of this copy's own."""
        super().__setstate__(state)
        self._make_native()
        self._point_weights()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Drop the FP8 weights, since ``.to()`` and its kin replace the parameters' memory."""
        kept = primary.attributes_of(self)
        self._drop_weight_cache()  # torch exchanges no parameter to which a cached weight refers
        result = super()._apply(partial(primary.keep_quantized, fn), recurse)
        primary.restore_attributes(self, kept)
        for state in self._scaling_states():
            weight = next((weight for _, _, weight in self._quantized_weights()), None)
            if state is not None and weight is not None and not weight.is_meta:
                state.to(weight.device)
        self._point_weights()
        return result

    # Descriptions --------------------------------------------------------------------------------

    def _repr_of(self, **options: Any) -> str:
        """List options, then the common ones: type, and recipe and parallel arguments if there are any."""
        parameter = next(self.parameters(), None)
        if parameter is not None:
            options["params_dtype"] = parameter.dtype
        recipe = self.fp8_meta.get("recipe")
        if recipe is not None:
            options["recipe"] = type(recipe).__name__
        for name, default in (
            ("parallel_mode", None),
            ("tp_size", 1),
            ("sequence_parallel", False),
        ):
            if getattr(self, name, default) != default:
                options[name] = getattr(self, name)
        return ", ".join(f"{name}={value}" for name, value in options.items())

    # Weight gradients ----------------------------------------------------------------------------

    @property
    def wgrad_store(self) -> WeightGradStore:
        """Transformer Engine's name for the delayed weight gradients."""
        return WeightGradStore(self)

    def need_backward_dw(self) -> bool:
        """Tell whether :meth:`backward_dw` computes the weights' gradients."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weights' gradients that a backward left; a layer without weights has none."""

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        """Call a hook after each :meth:`backward_dw`."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute that is no parameter, buffer or module."""
        self.__dict__[name] = value

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute as ``nn.Module`` does."""
        super().__setattr__(name, value)

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 has taken the layer over."""
        return hasattr(self, "_get_fsdp_state")
