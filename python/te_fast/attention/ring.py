"""Attention of ranks that share the tokens of sequences: each attends to all keys, by parts that are merged.

Keys and values travel around a ring of ranks, or are gathered at once. Queries attend to one part of the keys after the
other, and results are merged (:mod:`te_fast.attention.parts`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import torch

from te_fast.attention.packed import Packing
from te_fast.attention.packed_shares import PackedShare
from te_fast.attention.parts import (
    How,
    Left,
    Rows,
    attend_part,
    differentiate_part,
    merge_part,
)
from te_fast.attention.travel import KeysAndValues, Travel, gathered, scattered
from te_fast.runtime.collectives import get_distributed_rank, get_distributed_world_size
from te_fast.runtime.second_order import differentiable_once

ALL = slice(None)


class Ring(NamedTuple):
    """Ranks that share the tokens of sequences, and how they attend.

    Attributes
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    gathers : bool
        Whether keys and values are gathered at once; otherwise they travel from rank to rank.
    is_balanced : bool
        Whether rank r has the chunks r and 2 · ranks - 1 - r of a sequence; otherwise it has chunk r of as many chunks
        as there are ranks.
    is_causal : bool
        Whether a query attends to no later key.
    scale : float
        Factor of the products of queries and keys.
    name : str
        Name of the layer.
    packed : tuple of PackedShare, optional
        Where the tokens of packed sequences lie, of queries and of keys. Their tensors have a batch of one, in which
        these sequences follow each other.
    may_use_flash : bool
        Whether torch's kernel for packed sequences may be used.
    """

    group: Any
    gathers: bool
    is_balanced: bool
    is_causal: bool
    scale: float
    name: str
    packed: tuple[PackedShare, PackedShare] | None = None
    may_use_flash: bool = True


class _Piece(NamedTuple):
    """Keys of some ranks that queries of this one attend to.

    Attributes
    ----------
    sources : range
        These ranks.
    queries, keys : slice or torch.Tensor
        Which of this rank's queries, and which of the keys of each source.
    how : How
        How these queries attend to these keys.
    """

    sources: range
    queries: Rows
    keys: Rows
    how: How


def _pieces_of(ring: Ring, queries: int, keys: int) -> list[_Piece]:
    """Return the pieces of this rank; the first one has all queries."""
    rank, ranks = get_distributed_rank(ring.group), get_distributed_world_size(ring.group)
    if ring.packed is not None:
        return list(_packed_pieces(ring, *ring.packed))
    whole = How(False, ring.scale)
    if not ring.is_causal:
        return [_Piece(range(ranks), ALL, ALL, whole)]
    pieces = [_Piece(range(rank, rank + 1), ALL, ALL, How(True, ring.scale))]
    if rank > 0:
        # Of two chunks a rank, all later ranks see the first one only.
        seen = slice(keys // 2) if ring.is_balanced else ALL
        pieces.append(_Piece(range(rank), ALL, seen, whole))
    if ring.is_balanced and rank + 1 < ranks:
        pieces.append(_Piece(range(rank + 1, ranks), slice(queries // 2, None), ALL, whole))
    return pieces


def _packed_pieces(ring: Ring, of_q: PackedShare, of_k: PackedShare) -> Iterator[_Piece]:
    """Yield a piece for each rank whose keys this rank attends to, beginning with its own."""
    rank, ranks = get_distributed_rank(ring.group), get_distributed_world_size(ring.group)
    first, second = (0, 1) if ring.is_balanced else (None, None)
    parts: dict[Any, tuple[Rows, Packing]] = {}

    def part(share: PackedShare, rank: int, chunk: int | None) -> tuple[Rows, Packing]:
        # Without padding, all ranks' tokens lie alike.
        key = (share is of_q, None if share.lengths is None else rank, chunk)
        if key not in parts:
            parts[key] = share.part(rank, chunk)
        return parts[key]

    for step in range(ranks):
        source = (rank - step) % ranks
        is_later = ring.is_causal and source > rank
        if is_later and not ring.is_balanced:
            continue
        is_earlier = ring.is_causal and source < rank
        queries, of_queries = part(of_q, rank, second if is_later else None)
        keys, of_keys = part(of_k, source, first if is_earlier else None)
        is_causal = ring.is_causal and source == rank
        how = How(is_causal, ring.scale, (of_queries, of_keys), ring.may_use_flash)
        yield _Piece(range(source, source + 1), queries, keys, how)


# Autograd -------------------------------------------------------------------------------------------


def _keys_of(tensor: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Return a piece's keys, of the gathered ones of all ranks: ``(batch, heads, keys of the piece, channels)``."""
    chosen = tensor[piece.sources.start : piece.sources.stop, ..., piece.keys, :]
    return chosen.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Attention(torch.autograd.Function):
    """Forward leaves the parts' kernels in order; backward makes the same parts in the same order."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring) -> Any:
        ctx.ring, ctx.is_empty = ring, q.numel() == 0 or k.numel() == 0  # alike on all ranks
        if ctx.is_empty:
            ctx.save_for_backward(q, k, v)
            return q.new_zeros(*q.shape[:3], v.shape[3])
        total: list[torch.Tensor] = []
        left: list[Left] = []

        def attend(piece: _Piece, keys: torch.Tensor, values: torch.Tensor) -> None:
            own = q[:, :, piece.queries]
            out, sums, others = attend_part(own, keys, values, piece.how)
            left.append(others)
            if total:
                merge_part(total, piece.queries, (out, sums))
                return
            wide = torch.promote_types(out.dtype, torch.float32)
            total.extend([_placed(one, piece.queries, wide) for one in (out, sums)])

        ctx.pieces = _pieces_of(ring, q.shape[2], k.shape[2])
        _visit(ring, ctx.pieces, KeysAndValues.of(k, v), attend)
        ctx.padding = _padding_of(ring)
        out, sums = total[0].to(q.dtype), total[1]
        _set_to_zero(out, ctx.padding[0])
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.left = left
        return out

    @staticmethod
    @differentiable_once(lambda ctx: ctx.ring.name)
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.is_empty:
            return *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors), None
        q, k, v, out, sums = ctx.saved_tensors
        if grad.stride(-1) != 1:  # kernels read channels side by side
            grad = grad.contiguous()
        ring, left = ctx.ring, iter(ctx.left)
        wide = torch.promote_types(q.dtype, torch.float32)
        of_q = torch.zeros(q.shape, dtype=wide, device=q.device)

        def differentiate(piece: _Piece, keys: torch.Tensor, values: torch.Tensor) -> Any:
            g, own, y, total = (tensor[:, :, piece.queries] for tensor in (grad, q, out, sums))
            tensors = own, keys, values, y, total
            of_own, of_keys, of_values = differentiate_part(g, tensors, next(left), piece.how)
            _add(of_q, piece.queries, of_own)
            return of_keys, of_values

        of_k, of_v = _visit_back(ring, ctx.pieces, KeysAndValues.of(k, v), differentiate)
        padding_of_q, padding_of_k = ctx.padding
        found = []
        for grads, given in ((of_q, q), (of_k, k), (of_v, v)):
            narrow = grads.to(given.dtype)
            _set_to_zero(narrow, padding_of_q if given is q else padding_of_k)
            found.append(narrow)
        return *found, None


def _placed(part: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a part of all tokens, in the order of tokens."""
    part = part.to(dtype, copy=True)
    return part if isinstance(rows, slice) else torch.empty_like(part).index_copy_(2, rows, part)


def _padding_of(ring: Ring) -> tuple[torch.Tensor | None, ...]:
    """Return which queries and which keys of this rank belong to no sequence."""
    rank = get_distributed_rank(ring.group)
    return tuple([share.is_padding(rank) for share in ring.packed or ()]) or (None, None)


def _set_to_zero(rows: torch.Tensor, padding: torch.Tensor | None) -> None:
    if padding is not None:
        rows.masked_fill_(padding[:, None], 0.0)


def _add(total: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
    """Add to some tokens; an index has each of them once."""
    if isinstance(rows, slice):
        total[..., rows, :].add_(part)
    else:
        total.index_add_(-2, rows, part.to(total.dtype))


def _visit(ring: Ring, pieces: list[_Piece], own: KeysAndValues, attend: Any) -> None:
    """Call a function for each piece with its keys and values."""
    if ring.gathers:
        keys, values = gathered(ring.group, ring.name, own).both()
        for piece in pieces:
            attend(piece, _keys_of(keys, piece), _keys_of(values, piece))
        return
    with closing(_by_travel(ring, pieces, own)) as arrivals:
        for at, given in arrivals:
            if at is not None:
                attend(at, *given)


def _by_travel(
    ring: Ring, pieces: list[_Piece], own: KeysAndValues
) -> Generator[tuple[_Piece | None, list[torch.Tensor]], None, None]:
    """Yield each rank's piece with its keys and values, this rank's first, while the next ones travel."""
    rank, ranks = get_distributed_rank(ring.group), get_distributed_world_size(ring.group)
    for step in range(ranks):
        travel = Travel(ring.group, ring.name, own.memory) if step + 1 < ranks else None
        source = (rank - step) % ranks
        found = next((piece for piece in pieces if source in piece.sources), None)
        try:
            yield found, [tensor[:, :, found.keys] for tensor in own.both()] if found else []
        finally:  # what travels must arrive, also if attention fails: else the next call meets it
            arrived = None if travel is None else travel.wait()
        if arrived is not None:
            own = own.like(arrived)


def _visit_back(
    ring: Ring, pieces: list[_Piece], own: KeysAndValues, differentiate: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a function for each piece in the same order; return the gradients of this rank's keys and values."""
    visit = _back_from_gathered if ring.gathers else _back_by_travel
    return visit(ring, pieces, own, differentiate).both()


def _zeros_like(own: torch.Tensor) -> torch.Tensor:
    """Return where gradients are summed: FP32 at least."""
    return torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))


def _back_from_gathered(
    ring: Ring, pieces: list[_Piece], own: KeysAndValues, differentiate: Any
) -> KeysAndValues:
    whole = gathered(ring.group, ring.name, own)
    grads = own.like(_zeros_like(whole.memory))
    for piece in pieces:
        given = [_keys_of(tensor, piece) for tensor in whole.both()]
        for grad, found in zip(grads.both(), differentiate(piece, *given), strict=True):
            of_sources = found.unflatten(2, (len(piece.sources), -1)).permute(2, 0, 1, 3, 4)
            _add(grad[piece.sources.start : piece.sources.stop], piece.keys, of_sources)
    return scattered(ring.group, ring.name, grads)


def _back_by_travel(
    ring: Ring, pieces: list[_Piece], own: KeysAndValues, differentiate: Any
) -> KeysAndValues:
    mine = own.like(_zeros_like(own.memory))
    back: Travel | None = None
    try:
        with closing(_by_travel(ring, pieces, own)) as arrivals:
            for step, (piece, given) in enumerate(arrivals):
                found = () if piece is None else differentiate(piece, *given)
                # Gradients of others' keys follow the keys, a step behind them, and end where these began.
                grads = mine
                if step > 0:
                    grads = own.like(torch.zeros_like(mine.memory) if back is None else back.wait())
                for grad, one in zip(grads.both(), found, strict=False):
                    assert piece is not None
                    _add(grad, piece.keys, one)
                if step > 0:
                    back = Travel(ring.group, ring.name, grads.memory)
    finally:
        arrived = None if back is None else back.wait()
    assert arrived is not None
    mine.memory.add_(arrived)
    return mine


def attend_in_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Attend to the keys of all ranks.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch, heads, queries of this rank, d_k)``, with any strides.
    k, v : torch.Tensor
        ``(batch, groups, keys of this rank, d_k)`` and ``(batch, groups, keys of this rank, d_v)``.
    ring : Ring
        The ranks, and how they attend.

    Returns
    -------
    torch.Tensor
        ``(batch, heads, queries of this rank, d_v)``.

    Raises
    ------
    RanksError
        If another rank is gone or late.
    """
    with torch.autocast(
        q.device.type, enabled=False
    ):  # it would round the scores of plain products
        out: torch.Tensor = _Attention.apply(q, k, v, ring)
    return out
