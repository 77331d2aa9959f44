"""The scales of delayed scaling in activation recomputation.

A region's scales are updated when it ends, before backward runs its forwards again. Each linear op
or Quantize that runs in the first phase notes its scales on a tape; in the second phase it takes them back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_fast.errors import StateError
from te_fast.pytorch import _delayed, _ops

__all__ = ["Tape", "is_as_recorded", "is_in_phase", "is_repeating", "is_second", "phase", "scales"]

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


#: The phases in force, outermost first: a tape, whether it is read, and whether the region is the first phase's.
_phases: list[tuple[Tape, bool, bool]] = []


@contextmanager
def phase(tape: Tape, *, reads: bool, as_recorded: bool = False) -> Iterator[None]:
    """Let layers of delayed scaling write to a tape, or read it.

    Parameters
    ----------
    tape : Tape
        The tape.
    reads : bool
        Layers take their notes back: the second phase.
    as_recorded : bool, default = False
        Its caller has put the region of the first phase in force. Layers that find none run in high
        precision then, where in a backward they would repeat their last region otherwise.
    """
    _phases.append((tape, reads, as_recorded))
    _ops.autocast_set_recompute(True, is_as_recorded())
    try:
        yield
    finally:
        _phases.pop()
        _ops.autocast_set_recompute(bool(_phases), is_as_recorded())


def is_second() -> bool:
    """Return whether a forward is run again, whose maxima are recorded already."""
    return any(reads for _, reads, _ in _phases)


def is_as_recorded() -> bool:
    """Return whether a second phase has put the region of its first one in force."""
    return any(as_recorded for *_, as_recorded in _phases)


def is_repeating() -> bool:
    """Return whether layers repeat their last region: torch's checkpoint runs a forward again, outside of any."""
    enabled, _, _, _, depth, _ = _ops.autocast_region()
    is_outside = not enabled and depth == 0 and not is_as_recorded()
    return is_outside and torch._C._current_graph_task_id() >= 0


def is_in_phase() -> bool:
    """Return whether layers of delayed scaling have to ask for their scales."""
    return bool(_phases)


def scales(
    handle: Any, slots: int, generation: int, grads: bool
) -> tuple[torch.Tensor, int] | None:
    """Note an op's scales, or return those of the first phase; the dispatcher calls this."""
    read = next((tape for tape, reads, _ in reversed(_phases) if reads), None)
    if read is None:
        # With gradients, the first phase's own node updates the backward scales.
        first = not grads and _ops.autocast_take_first()
        note = _delayed.scale_of(slots).clone(), generation, first
    else:
        note = read.take(handle)
        if grads and note[2]:
            _ops.autocast_set_first(True)
    for tape, reads, _ in _phases:
        if not reads:
            tape.push(handle, note)
    return None if read is None else note[:2]
