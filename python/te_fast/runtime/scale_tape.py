"""The scales of delayed scaling in activation recomputation.

A region's scales are updated when it ends, before backward runs its forwards again. Each linear op or Quantize notes
its scales on a tape in the first phase, and uses them again in the second phase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch

from te_fast.errors import StateError
from te_fast.runtime import delayed, native
from te_fast.runtime.global_state import FP8GlobalStateManager, place_in_recompute_buffer

Note = tuple[torch.Tensor, int, bool]


class Tape:
    """The notes of the linear ops in one first phase, for each op in the order of its calls.

    Parameters
    ----------
    updates : bool, default = True
        Whether the nodes that update the gradients' scales are those of the second phase: the first phase runs without
        gradients, to be repeated with them.
    """

    def __init__(self, *, updates: bool = True) -> None:
        self.updates = updates
        # By identity, with the op's handle, which keeps the id from being reused.
        self._notes: dict[int, tuple[Any, deque[Note]]] = {}

    def push(self, handle: Any, note: Note) -> None:
        """Add an op's note."""
        self._notes.setdefault(id(handle), (handle, deque()))[1].append(note)

    def take(self, handle: Any) -> Note:
        """Take an op's oldest note.

        Raises
        ------
        StateError
            If there is no note.
        """
        if id(handle) not in self._notes:
            name = getattr(handle, "name", type(handle).__name__)
            message = (
                f"{name}: a recomputation runs this layer more often than the forward that it "
                "repeats; checkpointed functions must run the same layers each time"
            )
            raise StateError(message)
        notes = self._notes[id(handle)][1]
        note = notes.popleft()
        if not notes:
            del self._notes[id(handle)]
        return note

    def copy(self) -> Tape:
        """Return a copy to read from, so that this tape can be read once more."""
        other = Tape(updates=self.updates)
        other._notes = {key: (handle, notes.copy()) for key, (handle, notes) in self._notes.items()}
        return other


#: Layers by the number of their slots; layers in a first phase have an entry for it in ``fp8_meta``.
layers: WeakValueDictionary[int, Any] = WeakValueDictionary()

#: The phases in force by the dispatcher's number of their thread, outermost first: a tape, and whether it is read.
_phases: dict[int, list[tuple[Tape, bool]]] = {}


def _own_phases() -> list[tuple[Tape, bool]]:
    """Return the phases of this thread, or of the thread that it works for."""
    thread = native.autocast_phase_thread()
    return [] if thread is None else _phases.get(thread, [])


@contextmanager
def phase(tape: Tape, *, reads: bool) -> Iterator[None]:
    """Let layers of delayed scaling write to a tape, or read it."""
    thread = native.autocast_enter_phase()
    _phases.setdefault(thread, []).append((tape, reads))
    try:
        yield
    finally:
        native.autocast_leave_phase(thread)
        own = _phases[thread]
        own.pop()
        if not own:
            del _phases[thread]


@contextmanager
def recorded_region(state: tuple[Any, ...]) -> Iterator[None]:
    """Put the region of a snapshot in force for this thread, and restore the former region afterwards.

    If the snapshot has no region, layers run in high precision. Without this, they would repeat their last region in a
    backward.
    """
    enabled, calibrating, recipe, group, _, graph = state
    if recipe is not None:
        delayed.native_recipe(recipe)
    held = native.HeldRegion(recipe, enabled, calibrating, graph, group)
    try:
        yield
    finally:
        held.take_back()


class Recording:
    """The autocast region of a forward and a tape of its scales, for the forward that repeats it.

    Parameters
    ----------
    updates : bool, default = True
        As of :class:`Tape`.
    """

    def __init__(self, *, updates: bool = True) -> None:
        self.tape = Tape(updates=updates)
        self._region = FP8GlobalStateManager.get_autocast_state()
        #: Whether no region was in force, so that the forward and its repetition use the layers' last region.
        self._is_repeated = is_repeating()

    def region(self) -> AbstractContextManager[None]:
        """Put the region in force for a while."""
        return nullcontext() if self._is_repeated else recorded_region(self._region)


def is_second() -> bool:
    """Return whether a forward runs again, whose maxima are recorded already."""
    return any(reads for _, reads in _own_phases())


def is_to_be_repeated() -> bool:
    """Return whether a forward runs without gradients, to be repeated with them."""
    return any(tape.updates and not reads for tape, reads in _own_phases())


def is_outside() -> bool:
    """Return whether this thread is in no region, entered or recorded."""
    enabled, _, _, _, depth, _ = native.autocast_region()
    return not enabled and depth == 0 and not native.autocast_held()[0]


def is_repeating() -> bool:
    """Return whether layers repeat their last region: torch's checkpoint runs a forward again, outside of regions."""
    return is_outside() and torch._C._current_graph_task_id() >= 0


def is_in_phase() -> bool:
    """Return whether layers of delayed scaling must note or read scales on a tape."""
    return bool(_own_phases())


def scales(
    handle: Any, slots: int, generation: int, grads: bool
) -> tuple[torch.Tensor, int] | None:
    """Note an op's scales, or return those of the first phase; the dispatcher calls this."""
    phases = _own_phases()
    if not phases:  # the phases belong to another thread
        return None
    read = next((tape for tape, reads in reversed(phases) if reads), None)
    if read is None:
        scale, made, first = delayed.scale_of(slots).clone(), generation, False
        layer = layers.get(slots)
        if layer is not None and layer.training:
            place_in_recompute_buffer(layer.fp8_meta)
    else:
        scale, made, first = read.take(handle)
    if not grads and is_to_be_repeated():
        # A node of the second phase updates the backward scales.
        first = native.autocast_take_first() or first
    elif first:
        # This op's node does so now; the next op's if this one has no gradients.
        native.autocast_set_first(True)
    note = scale, made, first
    for tape, reads in phases:
        if not reads:
            tape.push(handle, note)
    return None if read is None else note[:2]
