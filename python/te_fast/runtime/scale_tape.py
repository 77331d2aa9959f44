"""The scales of delayed scaling in activation recomputation.

A region's scales are updated when it ends, before backward runs its forwards again. Each linear op
or Quantize that runs in the first phase notes its scales on a tape; in the second phase it takes them back.
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
    """What the linear ops of one first phase noted, each in the order of its calls."""

    def __init__(self) -> None:
        # By identity, with the op's handle: while it lives, nothing else has its id.
        self._notes: dict[int, tuple[Any, deque[Note]]] = {}

    def push(self, handle: Any, note: Note) -> None:
        """Add an op's note."""
        self._notes.setdefault(id(handle), (handle, deque()))[1].append(note)

    def take(self, handle: Any) -> Note:
        """Take an op's oldest note.

        Raises
        ------
        StateError
            If there is none.
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
        """Return a tape to take from, so that this one serves once more."""
        other = Tape()
        other._notes = {key: (handle, notes.copy()) for key, (handle, notes) in self._notes.items()}
        return other


#: Layers by the number of their slots: those that take part in a first phase have an entry of it in ``fp8_meta``.
layers: WeakValueDictionary[int, Any] = WeakValueDictionary()

#: The phases in force by the dispatcher's number of their thread, outermost first: a tape, and whether it is read.
_phases: dict[int, list[tuple[Tape, bool]]] = {}


def _own_phases() -> list[tuple[Tape, bool]]:
    """Return those of this thread, or of the one that it works for."""
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

    Layers that find it to be none run in high precision then, where in a backward they would repeat
    their last region otherwise.
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
    """The autocast region of a forward and a tape of its scales, for the forward that repeats it."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._region = FP8GlobalStateManager.get_autocast_state()
        #: The forward repeats its layers' last region, and its repetition will, too: none was in force.
        self._is_repeated = is_repeating()

    def region(self) -> AbstractContextManager[None]:
        """Put the region in force for a while."""
        return nullcontext() if self._is_repeated else recorded_region(self._region)


def is_second() -> bool:
    """Return whether a forward is run again, whose maxima are recorded already."""
    return any(reads for _, reads in _own_phases())


def is_outside() -> bool:
    """Return whether this thread is in no region, entered or recorded."""
    enabled, _, _, _, depth, _ = native.autocast_region()
    return not enabled and depth == 0 and not native.autocast_held()[0]


def is_repeating() -> bool:
    """Return whether layers repeat their last region: torch's checkpoint runs a forward again, outside of any."""
    return is_outside() and torch._C._current_graph_task_id() >= 0


def is_in_phase() -> bool:
    """Return whether layers of delayed scaling have to ask for their scales."""
    return bool(_own_phases())


def scales(
    handle: Any, slots: int, generation: int, grads: bool
) -> tuple[torch.Tensor, int] | None:
    """Note an op's scales, or return those of the first phase; the dispatcher calls this."""
    phases = _own_phases()
    if not phases:  # another thread's
        return None
    read = next((tape for tape, reads in reversed(phases) if reads), None)
    if read is None:
        # With gradients, the first phase's own node updates the backward scales.
        first = not grads and native.autocast_take_first()
        note = delayed.scale_of(slots).clone(), generation, first
        layer = layers.get(slots)
        if layer is not None and layer.training:
            place_in_recompute_buffer(layer.fp8_meta)
    else:
        note = read.take(handle)
        if grads and note[2]:
            native.autocast_set_first(True)
    for tape, reads in phases:
        if not reads:
            tape.push(handle, note)
    return None if read is None else note[:2]
