"""Attention of ranks that share the tokens of sequences: each attends to all keys, by parts that are merged.

Keys and values travel around a ring of ranks, or are gathered at once. Queries attend to one part of the keys after the
other. Each part's kernel also returns the logarithm of the sum of its exponentials, by which results are merged
(https://arxiv.org/abs/2310.01889). With the merged result and sum, the kernels' backward gives each part's gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from te_fast.attention.kernels import ON_GPUS, ON_THE_HOST, Kernel
from te_fast.ops.common import autocast_dtype
from te_fast.runtime.collectives import (
    gather_of,
    get_distributed_rank,
    get_distributed_world_size,
    named,
    reduce_scatter_of,
)
from te_fast.runtime.second_order import differentiable_once


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
    """

    group: Any
    gathers: bool
    is_balanced: bool
    is_causal: bool
    scale: float
    name: str


class _Piece(NamedTuple):
    """Keys of several ranks that queries of this one attend to: ranks, first query, number of a rank's keys."""

    begin: int
    end: int
    first_query: int
    keys: int
    is_causal: bool


def _pieces_of(ring: Ring, queries: int, keys: int) -> list[_Piece]:
    """Return the pieces of this rank; the first one has all queries."""
    rank, ranks = get_distributed_rank(ring.group), get_distributed_world_size(ring.group)
    if not ring.is_causal:
        return [_Piece(0, ranks, 0, keys, False)]
    half = keys // 2
    pieces = [_Piece(rank, rank + 1, 0, keys, True)]
    if rank > 0:
        # Of two chunks a rank, all later ranks see the first one only.
        pieces.append(_Piece(0, rank, 0, half if ring.is_balanced else keys, False))
    if ring.is_balanced and rank + 1 < ranks:
        pieces.append(_Piece(rank + 1, ranks, queries // 2, keys, False))
    return pieces


# Parts ----------------------------------------------------------------------------------------------


class _Left(NamedTuple):
    """What a part's backward takes beside merged tensors: kernel, shape of its sums, other tensors and sizes."""

    kernel: Kernel | None
    shape: tuple[int, ...]
    others: tuple[Any, ...]
    sizes: tuple[Any, ...]


def _chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> Kernel | None:
    """Return the kernel that torch chooses; None if that returns no sums, so that plain products do it."""
    if q.is_cuda and (q.shape[-1] % 8 or v.shape[-1] % 8):
        return None  # torch pads channels
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    number = torch._fused_sdp_choice(q, k, v, is_causal=is_causal, enable_gqa=grouped)
    kernel = (ON_GPUS if q.is_cuda else ON_THE_HOST).get(number)
    return None if kernel is None else kernel()


def _attend(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> tuple[Any, Any, _Left]:
    """Return result, logarithms of the sums ``(batch, heads, queries)``, and what backward takes."""
    kernel = _chosen(q, k, v, is_causal)
    if kernel is None:
        out, sums = _plain(q, k, v, is_causal, scale)
        return out, sums, _Left(None, sums.shape, (), ())
    out, (sums, *others), sizes = kernel.forward(q, k, v, 0.0, is_causal, scale, True)
    assert sums is not None
    return out, sums.reshape(q.shape[:3]), _Left(kernel, sums.shape, tuple(others), sizes)


def _differentiate(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, left: _Left, how: tuple[bool, float]
) -> Any:
    """Return the gradients of a part's queries, keys and values; `out` and `sums` are those of all parts."""
    if left.kernel is None:
        return _plain_backward(grad, q, k, v, out, sums, *how)
    others = (sums.contiguous().view(left.shape), *left.others)
    return left.kernel.backward(grad, q, k, v, out, others, left.sizes, 0.0, *how)


def _scores(q: Any, k: Any, is_causal: bool, scale: float) -> torch.Tensor:
    scores: torch.Tensor = q @ k.transpose(-1, -2) * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _widened(q: Any, *others: Any) -> list[torch.Tensor]:
    """Return tensors in FP32 at least; keys and values with as many heads as queries."""
    wide = torch.promote_types(q.dtype, torch.float32)
    repeated = [other.repeat_interleave(q.shape[1] // other.shape[1], 1) for other in others]
    return [tensor.to(wide) for tensor in (q, *repeated)]


def _plain(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> tuple[Any, Any]:
    wide_q, wide_k, wide_v = _widened(q, k, v)
    scores = _scores(wide_q, wide_k, is_causal, scale)
    return scores.softmax(-1) @ wide_v, scores.logsumexp(-1)


def _plain_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, is_causal: bool, scale: float
) -> Any:
    groups, (wide_q, wide_k, wide_v) = k.shape[1], _widened(q, k, v)
    grad, out = grad.to(wide_q.dtype), out.to(wide_q.dtype)
    weights = (_scores(wide_q, wide_k, is_causal, scale) - sums[..., None]).exp()
    of_weights = grad @ wide_v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    of_scores = weights * of_weights * scale
    of_kv = of_scores.transpose(-1, -2) @ wide_q, weights.transpose(-1, -2) @ grad
    of_k, of_v = (one.unflatten(1, (groups, -1)).sum(2) for one in of_kv)
    return of_scores @ wide_k, of_k, of_v


def _merge(out: torch.Tensor, sums: torch.Tensor, part: Any, of_part: Any) -> None:
    """Add a part to the result and the sums of former parts."""
    merged = torch.logaddexp(sums, of_part)
    out.mul_((sums - merged).exp_()[..., None])
    out.add_(part * (of_part - merged).exp_()[..., None])
    sums.copy_(merged)


# Travel ---------------------------------------------------------------------------------------------


class _Packed(NamedTuple):
    """Keys and values of one rank in one memory."""

    memory: torch.Tensor
    of_k: torch.Size
    of_v: torch.Size

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> _Packed:
        """Copy keys and values."""
        return cls(torch.cat([k.reshape(-1), v.reshape(-1)]), k.shape, v.shape)

    def like(self, memory: torch.Tensor) -> _Packed:
        """Return other values of the same shapes."""
        return _Packed(memory, self.of_k, self.of_v)

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of keys and values; memory of several ranks gives them one more dimension in front."""
        leading = self.memory.shape[:-1]
        k, v = self.memory.split([self.of_k.numel(), self.of_v.numel()], -1)
        return k.view(*leading, *self.of_k), v.view(*leading, *self.of_v)


class _Travel:
    """Memory on its way to the next rank; another's comes from the rank before."""

    def __init__(self, ring: Ring, memory: torch.Tensor) -> None:
        self._ring, self._sent, self._received = ring, memory, torch.empty_like(memory)
        known, group = torch.distributed, ring.group
        rank, ranks = get_distributed_rank(group), get_distributed_world_size(group)
        behind, before = (known.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        ops = [
            known.P2POp(known.isend, memory, behind, group),
            known.P2POp(known.irecv, self._received, before, group),
        ]
        with named(ring.name, "the travel of keys and values"):
            self._works = known.batch_isend_irecv(ops)

    def wait(self) -> torch.Tensor:
        """Return what has arrived."""
        with named(self._ring.name, "the travel of keys and values"):
            for work in self._works:
                work.wait()
        return self._received


def _gathered(ring: Ring, own: _Packed) -> _Packed:
    ranks = get_distributed_world_size(ring.group)
    with named(ring.name, "the gather of keys and values"):
        memory, _ = gather_of(ranks, own.memory, ring.group, async_op=False)
    return own.like(memory.view(ranks, -1))


def _keys_of(tensor: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Return a piece's keys, of the gathered ones of all ranks: ``(batch, heads, keys of the piece, channels)``."""
    chosen = tensor[piece.begin : piece.end, ..., : piece.keys, :]
    return chosen.permute(1, 2, 0, 3, 4).flatten(2, 3)


# Autograd -------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Forward leaves the parts' kernels in order; backward makes the same parts in the same order."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring) -> Any:
        ctx.ring, ctx.is_empty = ring, q.numel() == 0 or k.numel() == 0  # alike on all ranks
        if ctx.is_empty:
            ctx.save_for_backward(q, k, v)
            return q.new_zeros(*q.shape[:3], v.shape[3])
        total: list[torch.Tensor] = []
        left: list[_Left] = []

        def attend(piece: _Piece, keys: torch.Tensor, values: torch.Tensor) -> None:
            own = q[:, :, piece.first_query :]
            out, sums, others = _attend(own, keys, values, piece.is_causal, ring.scale)
            left.append(others)
            if not total:
                wide = torch.promote_types(out.dtype, torch.float32)
                total.extend((out.to(wide, copy=True), sums.to(wide, copy=True)))
                return
            former, sum_of_former = (tensor[:, :, piece.first_query :] for tensor in total)
            _merge(former, sum_of_former, out, sums)

        _visit(ring, q, k, v, attend)
        out, sums = total[0].to(q.dtype), total[1]
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
            first = piece.first_query
            g, own, y, total = (tensor[:, :, first:] for tensor in (grad, q, out, sums))
            how = piece.is_causal, ring.scale
            of_own, of_keys, of_values = _differentiate(
                g, own, keys, values, y, total, next(left), how
            )
            of_q[:, :, first:] += of_own
            return of_keys, of_values

        of_k, of_v = _visit_back(ring, q, k, v, differentiate)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None


def _visit(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Any) -> None:
    """Call a function for each piece with its keys and values."""
    pieces, own = _pieces_of(ring, q.shape[2], k.shape[2]), _Packed.of(k, v)
    if ring.gathers:
        keys, values = _gathered(ring, own).both()
        for piece in pieces:
            attend(piece, _keys_of(keys, piece), _keys_of(values, piece))
        return
    for at, given in _by_travel(ring, pieces, own):
        if at is not None:
            attend(at, *given)


def _by_travel(
    ring: Ring, pieces: list[_Piece], own: _Packed
) -> Iterator[tuple[_Piece | None, list[torch.Tensor]]]:
    """Yield each rank's piece with its keys and values, this rank's first, while the next ones travel."""
    rank, ranks = get_distributed_rank(ring.group), get_distributed_world_size(ring.group)
    for step in range(ranks):
        travel = _Travel(ring, own.memory) if step + 1 < ranks else None
        source = (rank - step) % ranks
        found = next((piece for piece in pieces if piece.begin <= source < piece.end), None)
        yield found, [tensor[:, :, : found.keys] for tensor in own.both()] if found else []
        if travel is not None:
            own = own.like(travel.wait())


def _visit_back(
    ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, differentiate: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a function for each piece in the same order; return the gradients of this rank's keys and values."""
    pieces, own = _pieces_of(ring, q.shape[2], k.shape[2]), _Packed.of(k, v)
    visit = _back_from_gathered if ring.gathers else _back_by_travel
    return visit(ring, pieces, own, differentiate).both()


def _zeros_like(own: torch.Tensor) -> torch.Tensor:
    """Return where gradients are summed: FP32 at least."""
    return torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))


def _back_from_gathered(
    ring: Ring, pieces: list[_Piece], own: _Packed, differentiate: Any
) -> _Packed:
    whole = _gathered(ring, own)
    grads = own.like(_zeros_like(whole.memory))
    for piece in pieces:
        given = [_keys_of(tensor, piece) for tensor in whole.both()]
        for grad, found in zip(grads.both(), differentiate(piece, *given), strict=True):
            place = grad[piece.begin : piece.end, ..., : piece.keys, :]
            place += found.unflatten(2, (-1, piece.keys)).permute(2, 0, 1, 3, 4)
    with named(ring.name, "the reduction of the gradients of keys and values"):
        flat = grads.memory.flatten()
        mine, _ = reduce_scatter_of(len(grads.memory), flat, ring.group, async_op=False)
    return own.like(mine)


def _back_by_travel(ring: Ring, pieces: list[_Piece], own: _Packed, differentiate: Any) -> _Packed:
    mine = own.like(_zeros_like(own.memory))
    back: _Travel | None = None
    for step, (piece, given) in enumerate(_by_travel(ring, pieces, own)):
        found = () if piece is None else differentiate(piece, *given)
        # Gradients of others' keys follow the keys, a step behind them, and end where these began.
        grads = mine
        if step > 0:
            grads = own.like(torch.zeros_like(mine.memory) if back is None else back.wait())
        for grad, one in zip(grads.both(), found, strict=False):
            grad[:, :, : one.shape[2]] += one
        if step > 0:
            back = _Travel(ring, grads.memory)
    assert back is not None
    mine.memory.add_(back.wait())
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
    dtype = autocast_dtype(q)
    if dtype is not None:  # as torch's own attention
        q, k, v = (one if one.dtype == torch.float64 else one.to(dtype) for one in (q, k, v))
    out: torch.Tensor = _Attention.apply(q, k, v, ring)
    return out
