"""Attention of ranks that share the tokens of sequences to keys that each of them has gathered.

Each chunk of a rank's queries attends by itself, as on one rank, to the keys that it sees. So windows, sinks, caps and
dropout are those of one rank. Without them, :mod:`te_fast.attention.ring` is faster: its parts need no masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fast.attention.packed import Packing, attend_packed, inverse, max_logits_of_packed
from te_fast.attention.packed_shares import PackedShare
from te_fast.attention.rules import Rule
from te_fast.attention.scores import Scores, attend, max_logits
from te_fast.attention.shares import ContextShare
from te_fast.attention.travel import KeysAndValues, gathered, scattered
from te_fast.runtime.collectives import named
from te_fast.runtime.second_order import differentiable_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Gathering(NamedTuple):
    """Ranks that gather keys.

    Attributes
    ----------
    group : torch.distributed.ProcessGroup
        The ranks.
    name : str
        Name of the layer.
    share : ContextShare
        Which tokens of a sequence this rank has.
    may_use_flash : bool
        Whether flash attention may be called without torch's choice.
    """

    group: Any
    name: str
    share: ContextShare
    may_use_flash: bool


class _Gathered(torch.autograd.Function):
    """Keys and values of all ranks; each rank's gradients are summed in FP32 at least."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, how: Gathering) -> Any:
        ctx.how, ctx.sizes = how, (k.shape, v.shape)
        return gathered(how.group, how.name, KeysAndValues.of(k, v)).both()

    @staticmethod
    @differentiable_once(lambda ctx: ctx.how.name)
    def backward(ctx: Any, of_k: torch.Tensor, of_v: torch.Tensor) -> Any:
        wide = torch.promote_types(of_k.dtype, torch.float32)
        memory = torch.cat([one.flatten(1).to(wide) for one in (of_k, of_v)], 1)
        grads = KeysAndValues(memory, *ctx.sizes)
        mine = scattered(ctx.how.group, ctx.how.name, grads).both()
        return *(one.to(of_k.dtype) for one in mine), None


def attend_to_gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, how: Gathering
) -> torch.Tensor:
    """Attend to the keys of all ranks.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch, heads, queries of this rank, d_k)``.
    k, v : torch.Tensor
        ``(batch, groups, keys of this rank, d_k)`` and ``(batch, groups, keys of this rank, d_v)``.
    scores : Scores
        How scores are computed.
    how : Gathering
        The ranks.

    Returns
    -------
    torch.Tensor
        ``(batch, heads, queries of this rank, d_v)``.

    Raises
    ------
    RanksError
        If another rank is gone or late.
    """
    keys, values = (_in_order(one, how.share) for one in _Gathered.apply(k, v, how))
    found = [
        attend(
            own,
            keys[:, :, seen],
            values[:, :, seen],
            scores.of(rule=rule),
            may_use_flash=how.may_use_flash,
        )
        for own, seen, rule in _runs(q, keys.shape[2], scores.rule, how.share)
    ]
    return torch.cat(found, 2)


def _runs(
    q: torch.Tensor, keys: int, rule: Rule, share: ContextShare
) -> Iterator[tuple[torch.Tensor, slice, Rule]]:
    """Yield each run of this rank's queries, the keys that it sees, and the rule for these."""
    runs = share.ranges(q.shape[2])
    for own, (begin, end) in zip(q.chunk(len(runs), 2), runs, strict=True):
        of_run, seen = _seen_by(rule, begin, end, keys)
        yield own, seen, of_run


def _in_order(of_ranks: torch.Tensor, share: ContextShare) -> torch.Tensor:
    """Return the tokens of all ranks ``(ranks, batch, heads, tokens, d)`` in the order of sequences."""
    if share.is_balanced:
        first, second = of_ranks.chunk(2, 3)
        of_ranks = torch.cat([first, second.flip(0)])
    return of_ranks.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _seen_by(rule: Rule, begin: int, end: int, keys: int) -> tuple[Rule, slice]:
    """Return the keys that queries from `begin` to `end` of a sequence see, and the rule for these alone."""
    first = 0 if rule.left < 0 else max(0, begin - rule.left)
    last = keys if rule.right < 0 else min(keys, end + rule.right)
    # The diagonal ends in the last query and the last key, so many keys behind the last query's own.
    behind = last - end
    left, right = (
        size if size < 0 else size + move
        for size, move in ((rule.left, behind), (rule.right, -behind))
    )
    return Rule(rule.kind, left, right, bottom_right=True), slice(first, last)


def attend_packed_to_gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: tuple[PackedShare, PackedShare],
    scores: Scores,
    how: Gathering,
) -> torch.Tensor:
    """Attend within packed sequences to the keys of all ranks.

    Parameters
    ----------
    q : torch.Tensor
        ``(1, heads, queries of this rank, d_k)``.
    k, v : torch.Tensor
        ``(1, groups, keys of this rank, d_k)`` and ``(1, groups, keys of this rank, d_v)``.
    packed : tuple of PackedShare
        Where the tokens of packed sequences lie, of queries and of keys.
    scores : Scores
        How scores are computed: without a window, or with one that is causal.
    how : Gathering
        The ranks.

    Returns
    -------
    torch.Tensor
        ``(1, heads, queries of this rank, d_v)``.

    Raises
    ------
    RanksError
        If another rank is gone or late.
    """
    order = inverse(packed[1].places(packed[1].ranks).flatten())
    own = q[0].transpose(0, 1)
    keys, values = (_packed_in_order(one, order) for one in _Gathered.apply(k, v, how))
    found = [
        attend_packed(
            own, keys, values, packings, scores.of(rule=rule), may_use_flash=how.may_use_flash
        )
        for packings, rule in _packed_runs(packed, scores.rule, how.share)
    ]
    # Each is zero in the rows of the other chunk.
    y = found[0] if len(found) == 1 else found[0] + found[1]
    return y.transpose(0, 1)[None]


def _packed_in_order(of_ranks: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the tokens of all ranks ``(ranks, 1, heads, tokens, d)`` as rows in the order of sequences."""
    return of_ranks[:, 0].transpose(1, 2).flatten(0, 1).index_select(0, order)


def _packed_runs(
    packed: tuple[PackedShare, PackedShare], rule: Rule, share: ContextShare
) -> Iterator[tuple[tuple[Packing, Packing], Rule]]:
    """Yield where the queries of this rank's chunks lie, and the keys that they see; and the rule for these."""
    of_q, of_k = packed
    is_causal = rule.right == 0
    for chunk in range(of_q.chunks):
        number = of_q.number_of(share.rank, chunk)
        packings = of_q.of_chunk(share.rank, chunk), of_k.until(number if is_causal else None)
        yield packings, Rule(rule.kind, rule.left, rule.right, is_causal)


@torch.no_grad()
def max_logits_with_gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    scores: Scores,
    ranks: tuple[Sequence[Any], str, ContextShare],
    packed: tuple[PackedShare, PackedShare] | None = None,
) -> torch.Tensor:
    """Return the largest score of each head that a query of any rank attends to, ``(heads,)``.

    Parameters
    ----------
    q, k : torch.Tensor
        ``(batch, heads, queries of this rank, d)`` and ``(batch, groups, keys of this rank, d)``.
    scores : Scores
        How scores are computed.
    ranks : tuple
        Groups of ranks, neighbours first; name of the layer; which tokens of a sequence this rank has.
    packed : tuple of PackedShare, optional
        Where the tokens of packed sequences lie, of queries and of keys.

    Raises
    ------
    RanksError
        If another rank is gone or late.
    """
    groups, name, share = ranks
    of_ranks = k[None]
    for group in groups:
        nothing = of_ranks.new_empty(0)
        whole = gathered(group, name, KeysAndValues.of(of_ranks, nothing))
        of_ranks = whole.both()[0].flatten(0, 1)
    if packed is None:
        keys = _in_order(of_ranks, share)
        found = [
            max_logits(own, keys[:, :, seen], scores.of(rule=rule))
            for own, seen, rule in _runs(q, keys.shape[2], scores.rule, share)
        ]
    else:
        order = inverse(packed[1].places(share.ranks).flatten())
        rows = q[0].transpose(0, 1), _packed_in_order(of_ranks, order)
        found = [
            max_logits_of_packed(*rows, packings, scores.of(rule=rule))
            for packings, rule in _packed_runs(packed, scores.rule, share)
        ]
    largest = torch.stack(found).amax(0)
    for group in groups:
        with named(name, "the maximum of scores over ranks"):
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    return largest
