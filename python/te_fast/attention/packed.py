"""Attention within packed sequences: those of a batch follow each other in ``(tokens, heads, d)``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_fast.attention.arguments import Lengths, check_packing
from te_fast.attention.rules import Kept, Rule, kept_of_lengths
from te_fast.attention.scores import Scores, attend, max_logits
from te_fast.attention.varlen import attend_varlen, varlen_problem
from te_fast.errors import ShapeError


class Packing(NamedTuple):
    """Where sequences lie in packed rows.

    Attributes
    ----------
    ends, starts : torch.Tensor
        int32 ``(sequences + 1,)``: cumulative lengths, and where sequences begin; the same tensor if sequences follow
        each other without padding.
    longest : int
        The longest sequence's length.
    """

    ends: torch.Tensor
    starts: torch.Tensor
    longest: int

    @property
    def has_gaps(self) -> bool:
        """Whether there may be padding between sequences."""
        return self.ends is not self.starts

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the packed row of each position, and whether the position is real: ``(batch, longest)`` each."""
        kept = kept_of_lengths(self.ends, self.longest)
        rows = self.starts[:-1, None] + torch.arange(self.longest, device=self.ends.device)
        return rows, kept


def packings_of(
    attention: Any,
    tensors: tuple[torch.Tensor, torch.Tensor],
    rule: Rule,
    lengths: Lengths,
    ranks: int = 1,
) -> tuple[Packing, Packing]:
    """Return where packed sequences lie.

    Parameters
    ----------
    attention : DotProductAttention
        The layer.
    tensors : tuple of torch.Tensor
        Queries and keys, ``(tokens, heads, d)``.
    rule : Rule
        The mask type.
    lengths : Lengths
        Lengths of sequences.
    ranks : int, default = 1
        Number of ranks that share the tokens of sequences.

    Raises
    ------
    ShapeError, DtypeError
        If the mask type has no lengths, or these do not fit.
    """
    if not rule.is_padded:
        message = (
            f"{attention.name}: qkv_format='thd' needs a mask type with padding, got {rule.kind!r}"
        )
        raise ShapeError(message)
    found = []
    for side, tensor, ends, starts, longest in (
        ("q", tensors[0], lengths.q, lengths.q_starts, lengths.longest_q),
        ("kv", tensors[1], lengths.kv, lengths.kv_starts, lengths.longest_kv),
    ):
        check_packing(attention, side, tensor, (ends, starts, longest), ranks)
        assert ends is not None
        if longest is None:
            longest = int(ends.diff().max()) if ends.numel() > 1 else 0
        found.append(Packing(ends, ends if starts is None else starts, int(longest)))
    if found[0].ends.shape != found[1].ends.shape:
        message = (
            f"{attention.name}: cu_seqlens_q and cu_seqlens_kv must be of the same number of sequences, got "
            f"{found[0].ends.numel() - 1} and {found[1].ends.numel() - 1}"
        )
        raise ShapeError(message)
    return found[0], found[1]


def unpack(t: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed rows ``(tokens, heads, d)`` as ``(batch, heads, longest, d)``, and which positions are real."""
    rows, kept = packing.rows()
    if t.shape[0] == 0:  # a row to read, through which the gradient of no tokens flows
        t = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 1))
    picked = t[torch.where(kept, rows, 0)]
    # Padding must be finite: its weight is zero, but zero times NaN is NaN.
    return picked.masked_fill(~kept[..., None, None], 0.0).transpose(1, 2), kept


def pack(y: torch.Tensor, packing: Packing, tokens: int) -> torch.Tensor:
    """Return ``(batch, heads, longest, d)`` as packed rows ``(tokens, heads, d)``; rows of no sequence are zero."""
    rows, kept = packing.rows()
    values = y.transpose(1, 2).flatten(0, 1)
    out = values.new_zeros(tokens + 1, *values.shape[1:])
    return out.index_copy(0, torch.where(kept, rows, tokens).flatten().long(), values)[:tokens]


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packings: tuple[Packing, Packing],
    scores: Scores,
    *,
    may_use_flash: bool = True,
) -> torch.Tensor:
    """Attend within packed sequences, by torch's kernel for them where it can be used.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(tokens, heads, d_k)``, ``(tokens of keys, groups, d_k)`` and ``(tokens of keys, groups, d_v)``.
    packings : tuple of Packing
        Where the sequences of queries and of keys lie.
    scores : Scores
        How scores are computed; real positions follow from `packings`.
    may_use_flash : bool, default = True
        Whether torch's kernel for packed sequences may be used.

    Returns
    -------
    torch.Tensor
        ``(tokens, heads, d_v)``; zero in rows of no sequence, and where a query attends to nothing.
    """
    of_q, of_k = packings
    is_self = of_q.ends is of_k.ends
    may_use_flash = may_use_flash and of_q.ends.numel() > 1
    if may_use_flash and not varlen_problem(q, v, scores, is_self=is_self):
        if not (of_q.has_gaps or of_k.has_gaps):
            ends, longest = (of_q.ends, of_k.ends), (of_q.longest, of_k.longest)
            return attend_varlen(q, k, v, ends, longest, scores)
        return _attend_around_gaps(q, k, v, packings, scores)
    (dense_q, kept_q), (dense_k, kept_k) = unpack(q, of_q), unpack(k, of_k)
    dense_v, _ = unpack(v, of_k)
    y = attend(dense_q, dense_k, dense_v, scores.of(kept=Kept(kept_q, kept_k)))
    return pack(y, of_q, q.shape[0])


def max_logits_of_packed(
    q: torch.Tensor, k: torch.Tensor, packings: tuple[Packing, Packing], scores: Scores
) -> torch.Tensor:
    """Return the largest score of each head that a query attends to, ``(heads,)``, as :func:`max_logits`."""
    (dense_q, kept_q), (dense_k, kept_k) = unpack(q, packings[0]), unpack(k, packings[1])
    return max_logits(dense_q, dense_k, scores.of(kept=Kept(kept_q, kept_k)))


def _attend_around_gaps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packings: tuple[Packing, Packing],
    scores: Scores,
) -> torch.Tensor:
    """Move real rows to the front for the kernel, which takes no padding between sequences, and back."""
    of_q, of_k = packings
    how_q, how_k = _Order.of(of_q, q.shape[0]), _Order.of(of_k, k.shape[0])
    q, k, v = (_Moved.apply(rows, how, True) for rows, how in ((q, how_q), (k, how_k), (v, how_k)))
    ends = (of_q.ends - of_q.ends[:1], of_k.ends - of_k.ends[:1])
    y = attend_varlen(q, k, v, ends, (of_q.longest, of_k.longest), scores)
    out: torch.Tensor = _Moved.apply(y, how_q, False)
    return out


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the order that undoes another one."""
    return torch.empty_like(order).index_copy_(
        0, order, torch.arange(len(order), device=order.device)
    )


class _Order(NamedTuple):
    """An order of rows in which those of sequences come first: the rows, their places, and which rows are padding."""

    rows: torch.Tensor
    places: torch.Tensor
    is_padding: torch.Tensor

    @classmethod
    def of(cls, packing: Packing, tokens: int) -> _Order:
        """Return the order of packed rows."""
        numbers = torch.arange(tokens, device=packing.ends.device)
        sequence = torch.searchsorted(packing.starts[1:-1], numbers, right=True)
        within = numbers - packing.starts[sequence]
        is_padding = (within < 0) | (within >= packing.ends.diff()[sequence])
        rows = torch.argsort(is_padding, stable=True)
        return cls(rows, inverse(rows), is_padding)

    def to_front(self, given: torch.Tensor) -> torch.Tensor:
        """Return rows in this order; those behind the sequences mean nothing."""
        return given.index_select(0, self.rows)

    def to_places(self, moved: torch.Tensor) -> torch.Tensor:
        """Return rows where they were, with zeros for padding."""
        return moved.index_select(0, self.places).masked_fill_(self.is_padding[:, None, None], 0.0)


class _Moved(torch.autograd.Function):
    """Rows that are moved to the front, or back to their places; their gradients are moved the other way.

    The kernel reads and writes no rows behind those of sequences, so nothing there must reach results or gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: _Order, is_to_front: bool) -> torch.Tensor:
        ctx.order, ctx.is_to_front = order, is_to_front
        return order.to_front(rows) if is_to_front else order.to_places(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Moved.apply(grad, ctx.order, not ctx.is_to_front), None, None
