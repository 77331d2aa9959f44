"""Detects graphs that overwrite what others need for their backward, since all share one pool."""

from __future__ import annotations

from typing import Any
from weakref import ref


class Left:
    """The memory that one replay of a forward has left for its backward.

    Parameters
    ----------
    begin, end : int
        Numbers of the step that wrote the memory, and of the last step that reads it.
    """

    __slots__ = ("__weakref__", "begin", "by", "end")

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        #: Name of the callable that has overwritten it.
        self.by: str | None = None


class SharedMemory:
    """The memory of graphs that share a pool.

    When a graph is captured, it may use all free memory of the pool: memory of runs that are over, and of runs that
    have not begun. A replay in another order overwrites memory that is still needed.
    """

    def __init__(self) -> None:
        # By identity; a weakref.WeakSet takes a microsecond more for each replay.
        self._left: dict[int, ref[Left]] = {}
        self._steps = 0

    def take_steps(self, count: int) -> int:
        """Return the first of so many new numbers of steps.

        Parameters
        ----------
        count : int
            How many graphs are captured next.
        """
        first = self._steps
        self._steps += count
        return first

    def leave(self, left: Left) -> None:
        """Note that a forward has left memory for its backward."""
        known, key = self._left, id(left)
        known[key] = ref(left, lambda _: known.pop(key, None))

    def replayed(self, step: int, name: str) -> None:
        """Note that a graph has run.

        Parameters
        ----------
        step : int
            Its number.
        name : str
            Its callable in messages.
        """
        for kept in tuple(self._left.values()):
            left = kept()
            if left is not None and left.by is None and not left.begin < step <= left.end:
                left.by = name

    def forget(self, left: Left) -> None:
        """Note that the memory is no longer needed."""
        self._left.pop(id(left), None)


_of_pools: dict[Any, SharedMemory] = {}


def memory_of(pool: Any) -> SharedMemory:
    """Return the memory of the caller's pool; for None, memory that is not shared."""
    return SharedMemory() if pool is None else _of_pools.setdefault(pool, SharedMemory())
