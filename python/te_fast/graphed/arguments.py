"""The arguments of ``make_graphed_callables``, checked and in one form."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from te_fast.errors import ArgumentError, DtypeError, ShapeError, StateError
from te_fast.recipe import Recipe
from te_fast.runtime.collectives import check_is_group
from te_fast.runtime.global_state import default_recipe
from te_fast.runtime.module_hooks import has_hooks

_NAME = "make_graphed_callables"

#: Kinds of hooks that run before and after captures, not inside of them.
HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
#: The attribute that marks a module whose calls replay.
GRAPHED = "_te_fast_graphed"
_RENAMED = {
    "enabled": "fp8_enabled",
    "calibrating": "fp8_calibrating",
    "recipe": "fp8_recipe",
    "amax_reduction_group": "fp8_group",
    "cache_quantized_params": "fp8_weight_caching",
}

Hooks = dict[str, dict[Any, Callable[[torch.nn.Module], None]]]


@dataclass(frozen=True)
class Quantization:
    """How callables quantise."""

    #: For each callable, whether it quantises; None if the caller did not say. Such a callable must not be replayed in
    # a region that quantises.
    enabled: list[bool | None]
    calibrating: bool
    recipe: Recipe | None
    group: Any
    caches_weights: bool


@dataclass(frozen=True)
class Options:
    """Other options of a capture."""

    num_warmup_iters: int
    allow_unused_input: bool
    retain_graph: bool
    reuse_buffers: bool
    clone_param_grads: bool
    pre_warmup_hook: Callable[[], Any] | None
    post_warmup_hook: Callable[[], Any] | None
    hooks: list[Hooks] = field(default_factory=list)

    def run_hooks(self, number: int, kind: str, module: torch.nn.Module) -> None:
        """Run the hooks of a callable around its captures.

        Raises
        ------
        StateError
            If a hook does not return None.
        """
        for hook in self.hooks[number][kind].values():
            if hook(module) is not None:
                message = (
                    f"{_NAME}: hooks in capture_time_hooks must return None, one of {kind} did not"
                )
                raise StateError(message)


def quantization(count: int, **given: tuple[Any, Any]) -> Quantization:
    """Return how callables quantise, from arguments under present and former names.

    Parameters
    ----------
    count : int
        Number of callables.
    **given
        By the present name: the values under the present and the former name, or None.

    Raises
    ------
    ArgumentError
        If an argument is given under both of its names, or `enabled` does not fit the callables.
    DtypeError
        If `enabled`, `recipe` or `amax_reduction_group` is of another class.
    """
    values = {}
    for name, (value, deprecated) in given.items():
        values[name], old = value, _RENAMED[name]
        if deprecated is None:
            continue
        if value is not None:
            message = f"{_NAME}: {old} is the deprecated name of {name}; pass {name} alone"
            raise ArgumentError(message)
        message = f"{_NAME}: {old} is deprecated, use {name}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        values[name] = deprecated
    enabled = values["enabled"]
    if isinstance(enabled, tuple):
        if len(enabled) != count:
            message = f"{_NAME}: enabled must have an entry for each of {count} callables, got {len(enabled)}"
            raise ArgumentError(message)
    else:
        enabled = (enabled,) * count
    for value in enabled:
        if not isinstance(value, bool | None):
            message = f"{_NAME}: enabled must be a bool or a tuple of bools, got {value!r}"
            raise DtypeError(message)
    calibrating = bool(values["calibrating"])
    recipe = values["recipe"]
    if not isinstance(recipe, Recipe | None):
        message = (
            f"{_NAME}: recipe must be an object of a class of te_fast.common.recipe, got {recipe!r}"
        )
        raise DtypeError(message)
    if not (any(enabled) or calibrating):
        recipe = None
    elif recipe is None:
        recipe = default_recipe()
    group, caches = values["amax_reduction_group"], bool(values["cache_quantized_params"])
    check_is_group(_NAME, "amax_reduction_group", group)
    return Quantization(list(enabled), calibrating, recipe, group, caches)


def capture_time_hooks(given: Sequence[Any] | None, count: int) -> list[Hooks]:
    """Return the hooks of every callable by kind.

    Parameters
    ----------
    given : sequence of dict, optional
        For each callable, dicts of hooks by kind.
    count : int
        Number of callables.

    Raises
    ------
    ArgumentError
        For another number of entries, and for unknown kinds.
    DtypeError
        If this is not a sequence of dicts, whose values are dicts of functions.
    """
    if given is None:
        given = [None] * count
    if not isinstance(given, list | tuple):
        kind = type(given).__name__
        message = f"{_NAME}: capture_time_hooks must be a list with a dict for each callable, got a {kind}"
        raise DtypeError(message)
    if len(given) != count:
        message = f"{_NAME}: capture_time_hooks must have an entry for each of {count} callables, got {len(given)}"
        raise ArgumentError(message)
    found: list[Hooks] = []
    for entry in given:
        hooks = {} if entry is None else entry
        if not isinstance(hooks, dict):
            message = f"{_NAME}: entries of capture_time_hooks must be dicts of hooks by kind, got {entry!r}"
            raise DtypeError(message)
        unknown = [kind for kind in hooks if kind not in HOOKS]
        if unknown:
            message = f"{_NAME}: capture_time_hooks has {', '.join(map(repr, unknown))}; there are {', '.join(HOOKS)}"
            raise ArgumentError(message)
        for kind, functions in hooks.items():
            if not isinstance(functions, dict) or not all(map(callable, functions.values())):
                message = f"{_NAME}: {kind} of capture_time_hooks must be a dict of functions, got {functions!r}"
                raise DtypeError(message)
        found.append({kind: hooks.get(kind, {}) for kind in HOOKS})
    return found


def check_modules(modules: Sequence[Any]) -> bool:
    """Check that modules can be captured, and return whether they train.

    Parameters
    ----------
    modules : sequence of torch.nn.Module
        The callables.

    Raises
    ------
    DtypeError
        For a callable that is not a module.
    StateError
        For modules with hooks or with buffers that require gradients, and if only some modules train.
    """
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            message = f"{_NAME}: callables must be torch.nn.Modules, got a {type(module).__name__}"
            raise DtypeError(message)
        name = type(module).__name__
        if any(GRAPHED in part.__dict__ for part in module.modules()):
            message = f"{_NAME}: {name} replays graphs already, or a module within it does; reset() that first"
            raise StateError(message)
        if has_hooks(module):
            message = (
                f"{_NAME}: {name} has hooks, which a graph would not run; register them behind the capture, or "
                "pass those that belong beside it as capture_time_hooks"
            )
            raise StateError(message)
        if any(buffer.requires_grad for buffer in module.buffers()):
            message = f"{_NAME}: {name} has buffers that require gradients; only parameters may"
            raise StateError(message)
    training = {module.training for module in modules}
    if len(training) > 1:
        message = f"{_NAME}: some modules are in training mode and others in evaluation mode; capture them apart"
        raise StateError(message)
    return training == {True}


def check_sequence(name: str, samples: Any) -> None:
    """Raise unless an argument is a sequence.

    Raises
    ------
    DtypeError
        If it is none.
    """
    if not isinstance(samples, Sequence) or isinstance(samples, str):
        message = f"{_NAME}: {name} must be a list or tuple, got a {type(samples).__name__}"
        raise DtypeError(message)


def check_counts(callables: int, sample_args: Sequence[Any], sample_kwargs: Sequence[Any]) -> None:
    """Raise unless there are samples for every callable.

    Parameters
    ----------
    callables : int
        The expected number.
    sample_args, sample_kwargs : sequence
        Samples.

    Raises
    ------
    ShapeError
        If the numbers differ.
    DtypeError
        If one of them is not a sequence.
    """
    for name, samples in (("sample_args", sample_args), ("sample_kwargs", sample_kwargs)):
        check_sequence(name, samples)
        if len(samples) != callables:
            message = (
                f"{_NAME}: {name} must have an entry for each of {callables}, got {len(samples)}"
            )
            raise ShapeError(message)
