"""Collectives in chunks: a stream of its own moves some rows while products of other rows run.

Ranks have equal shares of the rows, and a chunk has the same number of rows of each share. Chunks of an input are
gathered, and the product of a chunk waits only for the event of that chunk. Chunks of a result are reduced and
scattered as soon as their product is done. The native call knows the events (`program/pieces.rs`), and cuts the product
that reads the input, or writes the result, into pieces. Without a GPU all chunks have arrived when the call begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from te_fast import _config
from te_fast.errors import ArgumentError

if TYPE_CHECKING:
    from te_fast.parallel.collectives import Ranks

#: The chunks in the native call: whether they arrive, the ranks, and the handles of their events.
Native = tuple[bool, int, Sequence[int]]

#: A chunk of this many bytes takes longer to travel than to start.
_BYTES = 8 << 20
#: More chunks hide little more: only the first chunk, or the last, has no product beside it.
_MOST = 4
#: Products of fewer rows do not fill a GPU.
_ROWS = 256
#: Pieces begin at multiples of this many rows, so that they have the alignment of the whole tensor.
_GRANULE = 16

_forced: int | None = None
_threads = threading.local()


def communication_chunks(count: int | None = None) -> int | None:
    """Set the number of chunks in which tensor parallelism gathers inputs and reduces results beside products.

    Results are the same for every number.

    Parameters
    ----------
    count : int, optional
        The number of chunks, if the rows allow it: each rank's part of a chunk is a multiple of 16 rows. 1 cuts
        nothing. By default 1 on CPUs and with ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which keeps streams from running
        beside each other. Otherwise up to 4, with at least 8 MiB and 256 rows of each rank in a chunk. Inside of CUDA
        graphs nothing is cut.

    Returns
    -------
    int or None
        What was there before.

    Raises
    ------
    ArgumentError
        If `count` is not a positive integer.

    See Also
    --------
    te_fast.pytorch.Linear : ``sequence_parallel`` gathers inputs and reduces results.

    Examples
    --------
    >>> import te_fast
    >>> former = te_fast.communication_chunks(2)
    >>> te_fast.communication_chunks(former)
    2
    """
    global _forced
    is_count = isinstance(count, int) and not isinstance(count, bool) and count > 0
    if count is not None and not is_count:
        message = f"communication_chunks: count must be a positive integer or None, got {count!r}"
        raise ArgumentError(message)
    former, _forced = _forced, count
    return former


def setting() -> tuple[int, bool]:
    """Return the settings that numbers of chunks depend on; they must be equal on all ranks."""
    return _forced or 0, _config.ONE_QUEUE


def count_of(rows: int, row_bytes: int, device: torch.device, ranks: int) -> int:
    """Return the number of chunks of a rank's rows.

    Parameters
    ----------
    rows, row_bytes : int
        Rows of this rank, and the bytes of a row.
    device : torch.device
        Device of the rows.
    ranks : int
        Number of ranks, which have equal numbers of rows.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return 1
    wanted = _forced
    if wanted is None:
        # In one queue, products would wait behind a wait for a chunk.
        if device.type != "cuda" or _config.ONE_QUEUE:
            return 1
        wanted = min(_MOST, rows * row_bytes * ranks // _BYTES, rows // _ROWS)
    for count in range(min(wanted, rows // _GRANULE), 1, -1):
        if rows % (count * _GRANULE) == 0:
            return count
    return 1


class _Lane:
    """A stream of a device, and events that the native call records and waits for.

    Each thread has its own, since a second recording of an event would belong to another call.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        # One call may have arriving and leaving rows.
        self._events: dict[bool, list[torch.cuda.Event]] = {True: [], False: []}

    def events(self, count: int, *, arrives: bool) -> list[torch.cuda.Event]:
        """Return as many events, which have handles."""
        made = self._events[arrives]
        while len(made) < count:
            event = torch.cuda.Event()
            event.record(self.stream)
            made.append(event)
        return made[:count]


def _lane_of(device: torch.device) -> _Lane | None:
    if device.type != "cuda":
        return None
    lanes: dict[torch.device, _Lane] | None = getattr(_threads, "lanes", None)
    if lanes is None:
        lanes = _threads.lanes = {}
    if device not in lanes:
        lanes[device] = _Lane(device)
    return lanes[device]


class Chunks:
    """The transfer of one tensor in chunks.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    count : int
        Chunks, two or more.
    device : torch.device
        Device of the tensor.
    arrives : bool
        Whether rows arrive; otherwise they leave.
    """

    def __init__(self, ranks: Ranks, count: int, device: torch.device, *, arrives: bool) -> None:
        self._ranks, self.count = ranks, count
        self._lane = _lane_of(device)
        self._events: list[torch.cuda.Event] = []
        handles = [0] * count
        if self._lane is not None:
            self._events = self._lane.events(count, arrives=arrives)
            handles = [event.cuda_event for event in self._events]
        self.native: Native = (arrives, ranks.size, handles)

    def _beside(self) -> Any:
        return nullcontext() if self._lane is None else torch.cuda.stream(self._lane.stream)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Start to gather the rows of all ranks; each chunk's event marks its arrival.

        Parameters
        ----------
        x : torch.Tensor
            This rank's rows, contiguous.
        """
        size, columns = self._ranks.size, x.shape[-1]
        whole = x.new_empty((size * x.shape[0], *x.shape[1:]))
        places = whole.view(size, self.count, -1, columns)
        if self._lane is not None:
            self._lane.stream.wait_stream(torch.cuda.current_stream(x.device))
        with self._beside():
            started = [
                self._ranks.gather(part, later=True) for part in x.view(self.count, -1, columns)
            ]
            for chunk, (part, handle) in enumerate(started):
                self._ranks.wait(handle)
                places[:, chunk].copy_(part.view(size, -1, columns))
                if self._lane is not None:
                    self._events[chunk].record(self._lane.stream)
        return whole

    def scatter(self, y: torch.Tensor, out: torch.Tensor) -> None:
        """Sum `y` over ranks, chunk by chunk when its event has come, and keep this rank's rows.

        Parameters
        ----------
        y : torch.Tensor
            Contiguous, with the rows of all ranks.
        out : torch.Tensor
            This rank's rows. It must have been allocated before the events were recorded: memory that was freed later
            may still be read until then.
        """
        size, columns = self._ranks.size, y.shape[-1]
        places = y.view(size, self.count, -1, columns)
        started = []
        with self._beside():
            for chunk, share in enumerate(out.view(self.count, -1, columns)):
                if self._lane is not None:
                    self._lane.stream.wait_event(self._events[chunk])
                sent = places[:, chunk].reshape(-1, columns)
                started.append((sent, self._ranks.scatter_into(share, sent)))
            # Wait on the stream that owns the memory, so that it can reuse the memory afterwards.
            for _, handle in started:
                self._ranks.wait(handle)
        if self._lane is not None:
            torch.cuda.current_stream(y.device).wait_stream(self._lane.stream)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Let this stream wait for the other one if something raises, since memory of both may be freed then."""
        try:
            yield
        except BaseException:
            if self._lane is not None:
                current = torch.cuda.current_stream(self._lane.device)
                current.wait_stream(self._lane.stream)
            raise
