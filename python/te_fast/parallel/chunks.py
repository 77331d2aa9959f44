"""Collectives in chunks: a stream of its own moves some rows while products of other rows run.

Ranks have equal shares of the rows, and a chunk has the same number of rows of each share. Chunks of an input are
gathered, and the product of a chunk waits for its event alone; chunks of a result are shared out as soon as their
product is done. The native call knows the events (`program/pieces.rs`), and cuts the product that reads what comes, or
writes what goes. Without a GPU everything has come when the call begins.
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

#: What the native call is told of chunks: whether they come, the ranks, and the handles of their events.
Native = tuple[bool, int, Sequence[int]]

#: A chunk that is as long as this in bytes takes longer to travel than to start.
_BYTES = 8 << 20
#: More chunks hide little more: what stays in sight is the first one's way, or the last one's.
_MOST = 4
#: Products of fewer rows do not fill a GPU.
_ROWS = 256
#: Pieces begin at multiples of this many rows, so that they are as aligned as the whole is.
_GRANULE = 16

_forced: int | None = None
_threads = threading.local()


def communication_chunks(count: int | None = None) -> int | None:
    """Say in how many chunks tensor parallelism gathers inputs and shares out results, beside the products.

    Results are the same for every number.

    Parameters
    ----------
    count : int, optional
        The number of chunks, if the rows allow it: each rank's part of a chunk is a multiple of 16 rows. 1 is all at
        once.
        By default 1 on CPUs and with ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which keeps streams from running beside each
        other, otherwise up to 4, of 8 MiB or more and 256 rows or more of each rank. Inside of CUDA graphs
        nothing is cut.

    Returns
    -------
    int or None
        What was there before.

    Raises
    ------
    ArgumentError
        If `count` is no positive integer.

    See Also
    --------
    te_fast.pytorch.Linear : ``sequence_parallel`` gathers and shares out.

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
    """Return what numbers of chunks depend on beside a call; it must be the same on all ranks."""
    return _forced or 0, _config.ONE_QUEUE


def count_of(rows: int, row_bytes: int, device: torch.device, ranks: int) -> int:
    """Return in how many chunks a rank's rows travel.

    Parameters
    ----------
    rows, row_bytes : int
        Those of this rank, and the bytes of one.
    device : torch.device
        Where they are.
    ranks : int
        Ranks, each of which has the same number.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return 1
    wanted = _forced
    if wanted is None:
        # In one queue, products would wait behind what waits for a chunk.
        if device.type != "cuda" or _config.ONE_QUEUE:
            return 1
        wanted = min(_MOST, rows * row_bytes * ranks // _BYTES, rows // _ROWS)
    for count in range(min(wanted, rows // _GRANULE), 1, -1):
        if rows % (count * _GRANULE) == 0:
            return count
    return 1


class _Lane:
    """A stream of a device, and events that the native call records and waits for.

    Of one thread: an event that is recorded anew would be another call's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        # Rows that come and rows that leave may be of one call.
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
    """One tensor's way in chunks.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    count : int
        Chunks, two or more.
    device : torch.device
        Where the tensor is.
    arrives : bool
        Whether rows come; otherwise they leave.
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
        """Start to gather the rows of all ranks; each chunk's event says that it has come.

        Parameters
        ----------
        x : torch.Tensor
            Contiguous, this rank's.
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
        """Sum over ranks what each has of `y`, chunk by chunk as its event comes, and keep this rank's rows.

        Parameters
        ----------
        y : torch.Tensor
            Contiguous, with the rows of all ranks.
        out : torch.Tensor
            This rank's rows. It was there before the events were recorded: memory that is taken from others later may
            be read until then.
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
            # On the stream whose memory is sent: it is that stream's again behind this.
            for _, handle in started:
                self._ranks.wait(handle)
        if self._lane is not None:
            torch.cuda.current_stream(y.device).wait_stream(self._lane.stream)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Let this stream wait for the other one where something raises: memory of both may be freed then."""
        try:
            yield
        except BaseException:
            if self._lane is not None:
                current = torch.cuda.current_stream(self._lane.device)
                current.wait_stream(self._lane.stream)
            raise
