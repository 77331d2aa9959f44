"""The scales of delayed scaling around graphs: saves and restores them, and notes them as due after a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from te_fast.errors import StateError
from te_fast.recipe import DelayedScaling, Recipe
from te_fast.runtime.delayed import DelayedScalingRecipeState, resized
from te_fast.runtime.inner_layers import parts_of
from te_fast.state.module import StatefulModule


class _Saved(NamedTuple):
    scale: torch.Tensor
    amax_history: torch.Tensor
    #: Whether maxima were waiting for the next update.
    ran: bool


def _states(module: torch.nn.Module) -> list[DelayedScalingRecipeState | None]:
    """Return the states of a module itself, forward and backward."""
    if not isinstance(module, StatefulModule):
        return []
    return list(module._scaling_states())


def save_fp8_tensors(modules: Iterable[torch.nn.Module], recipe: Recipe | None) -> list[Any] | None:
    """Return copies of the scales and histories of modules, for :func:`restore_fp8_tensors`.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        Modules, with those within.
    recipe : Recipe, optional
        The recipe that the modules will run under. Histories are cut, or extended by zeros, to the recipe's length
        first, so that their memory does not move later.

    Returns
    -------
    list or None
        None if the recipe is not delayed scaling.

    See Also
    --------
    restore_fp8_tensors : Puts them back.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
    >>> from te_fast.pytorch.graph import save_fp8_tensors
    >>> layer = te.Linear(16, 16, device="cpu")
    >>> len(save_fp8_tensors([layer], DelayedScaling()))
    1
    >>> save_fp8_tensors([layer], Float8CurrentScaling()) is None
    True
    """
    if not isinstance(recipe, DelayedScaling):
        return None
    length = recipe.amax_history_len
    saved: list[Any] = []
    for module in modules:
        for part in parts_of(module):
            kept: list[_Saved | None] = []
            for state in _states(part):
                if state is None:
                    kept.append(None)
                    continue
                ran = state.slots.ran
                if state.amax_history.shape[0] != length:
                    state.amax_history = resized(state.amax_history, length)
                    part._drop_slots()  # type: ignore[operator]
                kept.append(_Saved(state.scale.clone(), state.amax_history.clone(), ran))
            saved.append(kept)
    return saved


def restore_fp8_tensors(modules: Iterable[torch.nn.Module], fp8_tensors: list[Any] | None) -> None:
    """Restore the scales that :func:`save_fp8_tensors` saved; scales that did not exist then get their initial values.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        The same modules.
    fp8_tensors : list, optional
        The saved copies; with None nothing happens.

    Raises
    ------
    StateError
        If the copies belong to other modules. Nothing has changed then.

    See Also
    --------
    save_fp8_tensors : Saves them.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.common.recipe import DelayedScaling
    >>> from te_fast.pytorch.graph import restore_fp8_tensors, save_fp8_tensors
    >>> layer, recipe = te.Linear(16, 16, device="cpu"), DelayedScaling()
    >>> saved = save_fp8_tensors([layer], recipe)
    >>> with te.autocast(recipe=recipe):
    ...     y = layer(torch.ones(16, 16))
    >>> restore_fp8_tensors([layer], saved)
    """
    if fp8_tensors is None:
        return
    parts = [part for module in modules for part in parts_of(module)]
    if len(parts) != len(fp8_tensors):
        message = (
            f"restore_fp8_tensors: {len(fp8_tensors)} modules were saved and {len(parts)} are to be restored; pass the "
            "modules that save_fp8_tensors was given"
        )
        raise StateError(message)
    for part, saved in zip(parts, fp8_tensors, strict=True):
        for index, state in enumerate(_states(part)):
            if state is None:
                continue
            kept = saved[index] if saved else None
            if kept is None:
                state.reset()
                state.slots.clear_ran()
                continue
            state.load(kept.scale, kept.amax_history)
            (state.slots.mark_ran if kept.ran else state.slots.clear_ran)()


class _Known(NamedTuple):
    owner: StatefulModule
    #: 0 forward, 1 backward.
    direction: int
    state: DelayedScalingRecipeState
    scale: torch.Tensor
    amax_history: torch.Tensor


class RunScales:
    """The scales that the graphs of one run read, by direction.

    Parameters
    ----------
    module : torch.nn.Module
        The callable.
    recipe, group
        Recipe and group of the capture.
    """

    def __init__(self, module: torch.nn.Module, recipe: Recipe | None, group: Any) -> None:
        self._parts = [part for part in parts_of(module) if isinstance(part, StatefulModule)]
        self._recipe, self._group = recipe, group
        self.forward: list[_Known] = []
        self.backward: list[_Known] = []

    @contextmanager
    def noting(self, *, forward: bool) -> Iterator[None]:
        """Note the layers whose scales a capture uses."""
        if not isinstance(self._recipe, DelayedScaling):
            yield
            return
        direction = 0 if forward else 1
        for part in self._parts:
            state = part._scaling_states()[direction]
            if state is not None:
                state.slots.clear_ran()
        yield
        known = []
        for part in self._parts:
            state = part._scaling_states()[direction]
            if state is not None and state.slots.ran:
                known.append(_Known(part, direction, state, state.scale, state.amax_history))
        setattr(self, "forward" if forward else "backward", known)

    def prepare(self) -> None:
        """Let a replay use the scales.

        Raises
        ------
        StateError
            If scales were replaced, so that the graphs use other scales.
        """
        for known in (self.forward, self.backward):
            for owner, direction, state, scale, amax_history in known:
                is_same = owner._scaling_states()[direction] is state
                if is_same:
                    state.use(self._recipe, self._group)  # type: ignore[arg-type]
                if not (is_same and state.scale is scale and state.amax_history is amax_history):
                    message = (
                        f"{owner._state_name()}: its scales of delayed scaling lie elsewhere than when the graph was "
                        "captured; capture it once more after exchanging them, or changing the length of histories"
                    )
                    raise StateError(message)

    def mark_ran(self, *, forward: bool) -> None:
        """Note that a graph has raised maxima, which the next update must read."""
        for known in self.forward if forward else self.backward:
            known.state.slots.mark_ran()
