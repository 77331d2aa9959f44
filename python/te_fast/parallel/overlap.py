"""Collectives beside the product that reads their result, or computes their operand.

Rows that are gathered: the product of this rank's own rows needs no other rank, and runs while the others' rows come.
Results that are reduced and scattered: the product computes blocks of columns, and a block leaves while the next one is
computed. The native call pauses (`program/pieces.rs`): launches and collectives get into the GPU's queue in the order
in which they can run beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from te_fast import _config
from te_fast.errors import ArgumentError

if TYPE_CHECKING:
    from te_fast.parallel.collectives import Ranks

#: A transfer in the native call: this rank's rows, the first one's number among all, and a function that waits for the
#: others; or the ends of the blocks of columns, and a function that takes a block's number and the result.
NativeArriving = tuple[torch.Tensor, int, Callable[[], None]]
NativeLeaving = tuple[list[int], Callable[[int, torch.Tensor], None]]

#: Tensors that are gathered, or reduced, have so many bytes at least; shorter collectives cost less than cuts.
_BYTES = 16 << 20
#: Products of fewer rows do not fill a GPU.
_ROWS = 256
#: Pieces begin at multiples of so many rows or columns, as products in FP8 and blocks of scales need.
_ROW_GRANULE, _COLUMN_GRANULE = 16, 128
#: Parts of the result's columns that have been computed when a block leaves. The last block's collective has no product
#: beside it, and the first block's product no collective; each block costs launches.
_LEAVES_AT = (5 / 8, 7 / 8, 1)

_forced: int | None = None


def communication_chunks(count: int | None = None) -> int | None:
    """Set whether tensor parallelism cuts products, so that collectives run beside their parts.

    A product of gathered rows is cut in two: the rows of this rank, and then those of the other ranks, which arrive
    meanwhile. A product whose result is reduced and scattered is cut into blocks of columns. Results are the same, but
    for the order in which a GPU's library sums: it may choose another algorithm for a part.

    Parameters
    ----------
    count : int, optional
        1 cuts nothing. A larger number cuts all products that can be cut, and is the number of blocks of columns, if
        there are as many times 128 columns. By default, large products are cut on GPUs with
        ``CUDA_DEVICE_MAX_CONNECTIONS=1``, if 16 MiB travel, and a rank has 256 rows: only with one queue does a GPU
        start a collective before the product that was launched after it. Large is a product of 10¹¹ multiplications
        in 16 bit, and of 2·10¹¹ in FP8. Inside of CUDA graphs nothing is cut.

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
    """Return the settings that blocks depend on; they must be equal on all ranks."""
    return _forced or 0, _config.ONE_QUEUE


def may_cut() -> bool:
    """Tell whether the settings let any product be cut."""
    return _config.ONE_QUEUE if _forced is None else _forced != 1


def _pays(rows: int, all_bytes: int, device: torch.device) -> bool:
    """Tell whether to cut a product of which each rank has `rows` rows; the whole operand has `all_bytes`."""
    if rows == 0 or rows % _ROW_GRANULE != 0 or not may_cut():
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    if _forced is not None:
        return True
    return device.type == "cuda" and rows >= _ROWS and all_bytes >= _BYTES


def own_rows_first(rows: int, row_bytes: int, ranks: int, device: torch.device) -> bool:
    """Tell whether the product of a rank's own rows runs while the other ranks' rows are gathered.

    Parameters
    ----------
    rows, row_bytes : int
        Rows of this rank, and the bytes of a row.
    ranks : int
        Number of ranks, which have equal numbers of rows.
    device : torch.device
        Device of the rows.
    """
    return ranks > 1 and _pays(rows, rows * row_bytes * ranks, device)


def ends_of_blocks(
    rows: int, columns: int, element_size: int, ranks: int, device: torch.device
) -> list[int]:
    """Return the ends of the blocks of columns in which a result leaves; none if it leaves at once.

    Parameters
    ----------
    rows : int
        Rows of the result that this rank keeps.
    columns, element_size : int
        Columns of the result, and the bytes of an element.
    ranks : int
        Number of ranks, which have equal numbers of rows.
    device : torch.device
        Device of the result.
    """
    granules = columns // _COLUMN_GRANULE
    is_cut = _pays(rows, rows * columns * element_size * ranks, device)
    if ranks == 1 or granules < 2 or columns % _COLUMN_GRANULE != 0 or not is_cut:
        return []
    if _forced is None:
        ends = [max(1, int(granules * share)) for share in _LEAVES_AT]
    else:
        count = min(_forced, granules)
        ends = [granules * block // count for block in range(1, count + 1)]
    return [end * _COLUMN_GRANULE for end in sorted(set(ends))] if len(set(ends)) > 1 else []


class Arriving:
    """The gather of a tensor while the product of this rank's rows runs.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    own : torch.Tensor
        This rank's rows.

    Attributes
    ----------
    whole : torch.Tensor
        The rows of all ranks, when the wait is over.
    """

    def __init__(self, ranks: Ranks, own: torch.Tensor) -> None:
        self._ranks, self._own = ranks, own.contiguous()
        self.whole, self._handle = ranks.gather(self._own, later=True)
        self._next: Sequence[Callable[[], None]] = ()

    def before(self, starts: Sequence[Callable[[], None]]) -> None:
        """Start other collectives behind this one, when the product of this rank's rows is in the stream.

        Earlier, they would keep it from running: in a GPU's only queue, it would stand behind collectives that wait for
        each other.
        """
        self._next = starts

    @property
    def native(self) -> NativeArriving:
        """The transfer in the native call."""
        rows = self._own.numel() // self._own.shape[-1]
        return self._own, rows * self._ranks.rank, self._wait

    def _wait(self) -> None:
        starts, self._next = self._next, ()
        for start in starts:
            start()
        self.join()

    def join(self) -> None:
        """Let later work on this stream see the rows of all ranks."""
        handle, self._handle = self._handle, None
        self._ranks.wait(handle)


class Leaving:
    """The sum of a result over ranks, of which each keeps its rows, block by block.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    ends : list of int
        Ends of the blocks of columns.
    """

    def __init__(self, ranks: Ranks, ends: list[int]) -> None:
        self._ranks, self._ends = ranks, ends
        #: The blocks that are under way: their columns, this rank's rows, and the handle.
        self._sent: list[tuple[slice, torch.Tensor, Any]] = []

    @property
    def native(self) -> NativeLeaving:
        """The transfer in the native call."""
        return self._ends, self._send

    def _send(self, number: int, result: torch.Tensor) -> None:
        """Start to sum a block; the native call has computed the block of this number into the result's memory."""
        begin, end = self._ends[number - 1] if number else 0, self._ends[number]
        rows = result.numel() // result.shape[-1]
        block = result.view(-1)[rows * begin : rows * end].view(rows, end - begin)
        part, handle = self._ranks.scatter(block, later=True)
        self._sent.append((slice(begin, end), part, handle))

    def join(self) -> None:
        """Wait for what is under way, before its memory is freed."""
        for _, _, handle in self._sent:
            self._ranks.wait(handle)

    def result(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum of `whole`, whose product may not have been cut."""
        if not self._sent:
            return self._ranks.scatter(whole)[0]
        out = whole.new_empty((whole.shape[0] // self._ranks.size, *whole.shape[1:]))
        # The last block may still be under way beside the first copies.
        for columns, part, handle in self._sent:
            self._ranks.wait(handle)
            out.view(-1, out.shape[-1])[:, columns].copy_(part)
        return out


def native_of(
    *transfers: Arriving | Leaving | None,
) -> tuple[list[NativeArriving | NativeLeaving], bool] | None:
    """Return the transfers in the native call, and whether to cut products of any size; None without transfers."""
    given = [transfer.native for transfer in transfers if transfer is not None]
    return (given, _forced is not None) if given else None


class joined:
    """Let this stream wait for collectives if something raises, since their memory may be freed then."""

    __slots__ = ("_transfers",)

    def __init__(self, *transfers: Arriving | Leaving | None) -> None:
        self._transfers = transfers

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait after an error."""
        if error is None:
            return
        for transfer in self._transfers:
            if transfer is not None:
                transfer.join()
