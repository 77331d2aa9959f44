"""Scales and histories of delayed scaling: the tensors of a layer, and their update.

The dispatcher knows which layers take part in an update, and updates them in one launch. Python does only two things:
it reduces the maxima over ranks, in one collective for all layers of a recipe, group and device, and it runs users'
algorithms.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any
from weakref import WeakValueDictionary

import torch

from te_fast import _config
from te_fast.errors import RanksError, RecipeError, StateError
from te_fast.recipe import DelayedScaling, Format, Recipe
from te_fast.runtime import native
from te_fast.runtime.collectives import check_is_group, named
from te_fast.runtime.scale_update import largest_of, scaling_factor, update_history

# torch without torch.distributed has no such function.
_is_initialized = getattr(torch.distributed, "is_initialized", lambda: False)

# States by the number of their slots.
_states: WeakValueDictionary[int, DelayedScalingRecipeState] = WeakValueDictionary()


def native_recipe(recipe: Any) -> Any:
    """Return the native form of a recipe, which is made again after an assignment."""
    if recipe._native is None:
        recipe._native = native.Recipe(**recipe._describe())
    return recipe._native


class DelayedScalingRecipeState:
    """Scales and histories of one layer in one direction.

    Parameters
    ----------
    recipe : DelayedScaling
        Recipe that they are kept under.
    mode : {'forward', 'backward'}
        Direction.
    num_quantizers : int, default = 1
        Number of tensors.
    device : torch.device, optional
        Device of the layer's weight; by default the current GPU, or the CPU without one.
    group : torch.distributed.ProcessGroup, optional
        Ranks that the maxima are reduced over; all by default.

    Attributes
    ----------
    scale : torch.Tensor
        FP32 ``(num_quantizers,)``, initially 1.
    amax_history : torch.Tensor
        FP32 ``(amax_history_len, num_quantizers)``, initially 0. Quantisation raises row 0.
    """

    __slots__ = (
        "__weakref__",
        "_amax_history",
        "_has_failed",
        "_native",
        "_owner",
        "_pickled",
        "_scale",
        "_slots",
        "group",
        "mode",
        "num_quantizers",
        "recipe",
        "when_moved",
    )

    def __init__(
        self,
        recipe: DelayedScaling,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        group: Any = None,
    ) -> None:
        if mode not in ("forward", "backward"):
            message = (
                f"DelayedScalingRecipeState: mode must be 'forward' or 'backward', got {mode!r}"
            )
            raise StateError(message)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.mode = mode
        self.num_quantizers = num_quantizers
        size = (recipe.amax_history_len, num_quantizers)
        self._scale = torch.ones(num_quantizers, dtype=torch.float32, device=device)
        self._amax_history = torch.zeros(size, dtype=torch.float32, device=device)
        #: Called when other tensors have replaced the scales or histories.
        self.when_moved: list[Callable[[], None]] = []
        self._register(recipe, group)

    def _register(self, recipe: DelayedScaling, group: Any) -> None:
        # Tensors that are made under torch.inference_mode() cannot be written outside of it.
        if self._scale.is_inference() or self._amax_history.is_inference():
            with torch.inference_mode(mode=False):
                self._scale, self._amax_history = self._scale.clone(), self._amax_history.clone()
        self.recipe = recipe
        self.group = group
        #: Whether the recipe's algorithms have failed; the error is raised once for each time that the owner ran.
        self._has_failed = False
        form = native_recipe(recipe)
        forward = self.mode == "forward"
        former = getattr(self, "_slots", None)
        tensors = self._amax_history, self._scale
        self._slots = native.AmaxSlots(*tensors, form, forward, group, former)
        self._native = form
        _states[self._slots.id] = self

    def take_part(self, owner: str = "a layer") -> None:
        """Take part in updates from now on: a forward of `owner` uses the scales.

        Copies and loaded states take no part before, since they may exist on one rank only, and the others would not
        reduce with it.
        """
        self._owner = owner
        self._slots.take_part()

    @property
    def slots(self) -> Any:
        """The dispatcher's handle; it changes after :meth:`use` or an assignment."""
        return self._slots

    @property
    def scale(self) -> torch.Tensor:
        """Scales."""
        return self._scale

    @scale.setter
    def scale(self, value: torch.Tensor) -> None:
        self._exchange(value, self._amax_history)

    @property
    def amax_history(self) -> torch.Tensor:
        """Histories of absolute maxima."""
        return self._amax_history

    @amax_history.setter
    def amax_history(self, value: torch.Tensor) -> None:
        self._exchange(self._scale, value)

    def _exchange(self, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        """Register other tensors; if they do not fit, the former ones stay."""
        former = self._scale, self._amax_history
        self._scale, self._amax_history = scale, amax_history
        try:
            self._register(self.recipe, self.group)
        except Exception:
            self._scale, self._amax_history = former
            raise
        self._tell_moved()

    def _tell_moved(self) -> None:
        for call in self.when_moved:
            call()

    def use(self, recipe: DelayedScaling, group: Any) -> None:
        """Continue under another recipe or group.

        Scales stay; for another format they are adapted to its largest number. Histories are cut, or
        extended by zeros, to the recipe's length.

        Parameters
        ----------
        recipe : DelayedScaling
            The recipe.
        group : torch.distributed.ProcessGroup, optional
            Ranks that the maxima are reduced over.
        """
        history = self._amax_history
        same_length = history.shape[0] == recipe.amax_history_len
        if same_length and native_recipe(recipe) is self._native and group is self.group:
            return
        forward = self.mode == "forward"
        ratio = fp8_max(recipe, forward=forward) / fp8_max(self.recipe, forward=forward)
        if ratio != 1.0:
            self._scale.mul_(torch.where(history.amax(0) > 0, ratio, 1.0))
            native.note_scale_change()
        if same_length:
            self._register(recipe, group)
            return
        self._amax_history = resized(history, recipe.amax_history_len)
        self._register(recipe, group)
        self._tell_moved()

    def to(self, device: torch.device | str) -> None:
        """Move to another device."""
        if self._scale.device != torch.device(device):
            self._scale = self._scale.to(device)
            self._amax_history = self._amax_history.to(device)
            self._register(self.recipe, self.group)
            self._tell_moved()

    def reset(self) -> None:
        """Set all scales to 1 and all maxima to 0."""
        self._scale.fill_(1.0)
        self._amax_history.zero_()
        native.note_scale_change()

    def load(self, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        """Copy the values of a checkpoint; the histories' length follows it."""
        if scale.numel() != self.num_quantizers:
            message = f"expected scales of {self.num_quantizers} tensors, got {scale.numel()}"
            raise StateError(message)
        if amax_history.shape == self._amax_history.shape:
            self._amax_history.copy_(amax_history)
        else:
            device = self._amax_history.device
            history = amax_history.to(device=device, dtype=torch.float32, copy=True)
            self._exchange(self._scale, history)
        self._scale.copy_(scale)
        native.note_scale_change()

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedScalingRecipeState:
        """Copy tensors; the copy has its own registration."""
        return _rebuild(*self._parts(copy.deepcopy(self.recipe, memo)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the tensors; process groups cannot be pickled, and are left out."""
        # A process that is being spawned takes the memory of what is pickled after the pickling, so the copies live on.
        # torch moves tensors that it pickles for a process to other memory, so the state's own tensors are not pickled.
        self._pickled = self._parts(self.recipe)[:-1]
        return (_rebuild, (*self._pickled, None))

    def _parts(self, recipe: DelayedScaling) -> tuple[Any, ...]:
        return (recipe, self.mode, self._scale.clone(), self._amax_history.clone(), self.group)


def resized(history: torch.Tensor, length: int) -> torch.Tensor:
    """Return histories cut, or extended by zeros, to `length` rows."""
    fresh = history.new_zeros(length, history.shape[1])
    kept = min(length, history.shape[0])
    fresh[:kept] = history[:kept]
    return fresh


def _rebuild(
    recipe: DelayedScaling,
    mode: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor,
    group: Any,
) -> DelayedScalingRecipeState:
    state = DelayedScalingRecipeState.__new__(DelayedScalingRecipeState)
    state.mode = mode
    state.num_quantizers = scale.numel()
    state._scale = scale
    state._amax_history = amax_history
    state.when_moved = []
    state._register(recipe, group)
    return state


def scale_of(number: int) -> torch.Tensor:
    """Return the scales of the state whose slots have this number."""
    return _states[number].scale


def forget_maximum(number: int, tensor: int) -> None:
    """Set the live maximum of a tensor of the state whose slots have this number to 0."""
    state = _states.get(number)
    if state is not None:
        with torch.no_grad():
            state.amax_history[0, tensor].zero_()


def states(*, forward: bool) -> list[DelayedScalingRecipeState]:
    """Return the living states of a direction that take part in updates, in order."""
    return [_states[number] for number in native.amax_participants(forward) if number in _states]


def fp8_max(recipe: DelayedScaling, *, forward: bool) -> float:
    """Return the largest value that a direction's tensors can take."""
    value = recipe.fp8_format.value
    return float(value.max_fwd if forward else value.max_bwd)


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """Return torch's type of a recipe's forward or backward tensors."""
    number_format = fp8_recipe.fp8_format
    e4m3 = number_format is Format.E4M3 or (number_format is Format.HYBRID and fprop_tensor)
    return torch.float8_e4m3fn if e4m3 else torch.float8_e5m2


def update_scales(*, forward: bool) -> None:
    """Update the scales of all layers that ran since the last update on this rank or on ranks that reduce with it.

    Parameters
    ----------
    forward : bool
        Scales of inputs and weights, or of gradients.
    """
    native.update_scales(forward, _is_initialized(), _config.UNFUSED_UPDATE)


def update_all(*, forward: bool) -> None:
    """Update the scales of all layers, including those that a replayed graph ran.

    Parameters
    ----------
    forward : bool
        Scales of inputs and weights, or of gradients.
    """
    native.amax_mark_all_ran(forward)
    update_scales(forward=forward)


def _world_size(group: Any, all_gone: bool) -> int:
    """Return the number of ranks that reduce together; 1 for a destroyed group whose layers are all gone."""
    if all_gone and group is not None:
        try:
            torch.distributed.get_process_group_ranks(group)
        except KeyError:
            return 1
    try:
        size = torch.distributed.get_world_size(group=group)
    except (AttributeError, TypeError, ValueError):
        check_is_group("autocast", "amax_reduction_group", group)
        raise
    if hasattr(group, "get_group"):  # a mesh, which has ranks, but no collectives
        check_is_group("autocast", "amax_reduction_group", group)
    return size


def _agree(slots: list[tuple[int | None, int]], group: Any, maxima: torch.Tensor) -> None:
    """Raise unless all ranks reduce maxima of equal numbers of layers and tensors.

    Parameters
    ----------
    slots : list of tuple
        For each layer, the number of its slots (None if it is gone) and of its tensors.
    group : torch.distributed.ProcessGroup, optional
        The ranks.
    maxima : torch.Tensor
        Tensor on the device of the reduction.

    Raises
    ------
    RanksError
        With the names of the layers that differ; all ranks raise.
    """
    counts = [count for _, count in slots]
    kind = [len(counts), sum(counts), zlib.crc32(repr(counts).encode())]
    mine = torch.tensor(kind, dtype=torch.int64, device=maxima.device)
    everyones = mine.new_empty(torch.distributed.get_world_size(group=group) * len(kind))
    with named("delayed scaling", "the comparison of layers in amax_reduction_group"):
        torch.distributed.all_gather_into_tensor(everyones, mine, group=group)
        table = everyones.view(-1, len(kind)).tolist()
        if all(row == kind for row in table):
            return
        names = [(_name_of(number), count) for number, count in slots]
        of_all: list[Any] = [None] * len(table)
        torch.distributed.all_gather_object(of_all, names, group=group)
    differ = [place for place, them in enumerate(zip_longest(*of_all)) if len(set(them)) > 1]
    first = differ[0] if differ else 0
    shown = "; ".join(
        f"rank {rank} has {len(names)}, "
        + (f"there {names[first][0]}" if first < len(names) else "none there")
        for rank, names in enumerate(of_all)
    )
    message = (
        "delayed scaling: all ranks of amax_reduction_group must run the same layers for the first time in the same "
        f"order, also those that have no rows for one (call it with none); from number {first + 1} on they differ: "
        f"{shown}"
    )
    raise RanksError(message)


def _name_of(number: int | None) -> str:
    if number is None:
        return "one that is gone"
    state = _states.get(number)
    return "one that is gone" if state is None else state._owner


def _all_reduce(maxima: torch.Tensor, group: Any) -> None:
    with named("delayed scaling", "the reduction of maxima in amax_reduction_group"):
        torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX, group=group)


def _update_in_python(
    forward: bool, slots: list[tuple[int, int]], maxima: torch.Tensor | None
) -> None:
    """Update states one by one, from the maxima of all ranks; each state begins at an index."""
    for number, first in slots:
        state = _states.get(number)
        if state is None:
            continue
        if maxima is not None:
            state.amax_history[0].copy_(maxima[first : first + state.num_quantizers])
        if state._has_failed and not state.slots.ran:
            continue
        state._has_failed = True
        state.slots.clear_ran()
        _update_unfused(state, fp8_max(state.recipe, forward=forward))
        state._has_failed = False
    native.note_scale_change()


def _checked(result: Any, state: DelayedScalingRecipeState, field: str) -> torch.Tensor:
    """Return what a user's algorithm has computed, if it is a number for each tensor, or one for all."""
    is_tensor = isinstance(result, torch.Tensor)
    if is_tensor and result.shape in (state.scale.shape, (1,), ()):
        return result
    got = f"one of shape {list(result.shape)}" if is_tensor else type(result).__name__
    message = (
        f"{state._owner}: delayed scaling: the recipe's {field} must return a tensor of shape "
        f"{list(state.scale.shape)}, a number for each tensor of the layer, got {got}"
    )
    raise RecipeError(message)


def _update_unfused(state: DelayedScalingRecipeState, largest: float) -> None:
    """Update one state with torch operations, in the order that Transformer Engine documents.

    Unlike the kernel, this rolls the history also when the newest maximum is 0.
    """
    recipe, history, scale = state.recipe, state.amax_history, state.scale
    amax = largest_of(history, recipe.amax_compute_algo)
    if callable(recipe.amax_compute_algo):
        amax = _checked(amax, state, "amax_compute_algo")
    update_history(history)
    made = scaling_factor(amax, scale, largest, recipe)
    if made is not scale:
        scale.copy_(_checked(made, state, "scaling_factor_compute_algo"))


native.delayed_callbacks(_world_size, _agree, _all_reduce, _update_in_python)
