"""Undo the changes of delayed scaling that a forward made before it failed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fast.runtime import native

if TYPE_CHECKING:
    from te_fast.ops.op import BasicOperation
    from te_fast.recipe import Recipe

_LIMIT = 256


class Undo:
    """The live maxima of some operations, and whether the next FP8 module is the region's first.

    An update skips tensors whose maximum is 0.

    Parameters
    ----------
    ops : sequence of BasicOperation
        The operations that are about to run.
    recipe : Recipe, optional
        The region's recipe; only delayed scaling has maxima to restore, which a factory may give to an operation.
    """

    def __init__(self, ops: Sequence[BasicOperation], recipe: Recipe | None) -> None:
        may_be_delayed = recipe is not None and (recipe.delayed() or recipe.custom())
        self._ops = list(ops) if may_be_delayed else []
        states = [op._delayed_state("forward") for op in self._ops]
        self._made = [state is not None for state in states]
        self._rows = [state.amax_history[0] for state in states if state is not None]
        # One launch for all.
        self._kept = torch.cat(self._rows) if self._rows else None
        self._first = native.autocast_region()[3]

    def restore(self) -> None:
        """Restore all maxima. Weights that were quantised meanwhile will be quantised, and measured, again."""
        if not self._ops:
            return
        if self._kept is not None:
            parts = self._kept.split([row.numel() for row in self._rows])
            torch._foreach_copy_(self._rows, list(parts))
        for op, made in zip(self._ops, self._made, strict=True):
            state = op._delayed_state("forward")
            if not made and state is not None:  # the failed forward made the state
                state.amax_history.zero_()
        native.note_scale_change()
        native.autocast_set_first(self._first)


class Trials:
    """Kinds of calls that have succeeded once, so that sizes, types and options fit for all values.

    If a later step of a call raises, the earlier steps are undone. A call of a known kind cannot raise, and needs no
    preparation for that.

    Attributes
    ----------
    ends : bool
        Whether a kind of calls that has succeeded once will always succeed.
    """

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self.ends = True

    def run(
        self,
        function: Callable[[], Any],
        ops: Sequence[BasicOperation],
        recipe: Recipe | None,
        epoch: int,
        x: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
    ) -> Any:
        """Call `function`, which runs `ops` on these inputs in a region of this recipe and epoch."""
        if recipe is None:
            return function()
        # A checkpoint that repeats a forward may end it by an exception once it has the tensors that it needs.
        learns = self.ends and torch._C._current_graph_task_id() < 0
        kind: tuple[Hashable, ...] = ()
        if learns:
            kind = (epoch, torch.is_grad_enabled(), x.shape, x.dtype, x.device)
            for tensor in extra_inputs:
                kind += (tensor.shape, tensor.dtype, tensor.device)
            if kind in self._known:
                return function()
        undo = Undo(ops, recipe)
        try:
            result = function()
        except BaseException:
            undo.restore()
            raise
        if learns:
            if len(self._known) >= _LIMIT:
                self._known.clear()
            self._known.add(kind)
        return result
