"""Attention within packed sequences: those of a batch follow each other in ``(tokens, heads, d)``."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch

from te_fast.attention.rules import Kept, kept_of_lengths
from te_fast.attention.scores import Scores, attend


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

    def closed(self) -> Packing:
        """Return the same sequences without padding between them."""
        ends = self.ends - self.ends[:1]
        return Packing(ends, ends, self.longest)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the packed row of each position, and whether the position is real: ``(batch, longest)`` each."""
        kept = kept_of_lengths(self.ends, self.longest)
        rows = self.starts[:-1, None] + torch.arange(self.longest, device=self.ends.device)
        return rows, kept


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


@cache
def _varlen() -> tuple[Any, frozenset[str]]:
    """Return torch's attention on packed sequences and its parameters; None before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, frozenset()
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def varlen_problem(q: torch.Tensor, v: torch.Tensor, scores: Scores, *, is_self: bool) -> str:
    """Return why torch's kernel for packed sequences cannot be used; None if it can."""
    rule = scores.rule
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return "it is for 16 bits on the GPU"
    is_extended = scores.sink is not None or scores.bias.kind != "no_bias" or scores.softcap != 0.0
    if scores.dropout > 0.0 or is_extended:
        return "it has no dropout, sinks, biases and caps"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8 != 0:
        return "it has no such head sizes"
    if rule.is_banded and not rule.bottom_right and not is_self:
        return "its diagonal ends in the last query and key"
    kernel, takes = _varlen()
    has_window = rule.left >= 0 or rule.right > 0
    if kernel is None or (has_window and "window_size" not in takes):
        return "this torch has none, or none with windows"
    if "scale" not in takes and abs(scores.scale * q.shape[-1] ** 0.5 - 1) > 1e-6:
        return "this torch has none with another scale"
    return ""


def _attend_by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packings: tuple[Packing, Packing],
    scores: Scores,
) -> torch.Tensor:
    rule, (of_q, of_k) = scores.rule, packings
    repeats = q.shape[1] // k.shape[1]
    kernel, takes = _varlen()
    options: dict[str, Any] = {"scale": scores.scale} if "scale" in takes else {}
    if "window_size" in takes:
        options["window_size"] = (rule.left, rule.right)
    else:
        options["is_causal"] = rule.right == 0
    if repeats != 1 and "enable_gqa" in takes:
        options["enable_gqa"] = True
    elif repeats != 1:
        k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
    return kernel(q, k, v, of_q.ends, of_k.ends, of_q.longest, of_k.longest, **options)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packings: tuple[Packing, Packing],
    scores: Scores,
    *,
    may_use_kernel: bool = True,
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
    may_use_kernel : bool, default = True
        Whether torch's kernel for packed sequences may be used.

    Returns
    -------
    torch.Tensor
        ``(tokens, heads, d_v)``; zero in rows of no sequence, and where a query attends to nothing.
    """
    of_q, of_k = packings
    is_self = of_q.ends is of_k.ends
    may_use_kernel = may_use_kernel and of_q.ends.numel() > 1
    if may_use_kernel and not varlen_problem(q, v, scores, is_self=is_self):
        if not (of_q.has_gaps or of_k.has_gaps):
            return _attend_by_kernel(q, k, v, packings, scores)
        return _attend_around_gaps(q, k, v, packings, scores)
    (dense_q, kept_q), (dense_k, kept_k) = unpack(q, of_q), unpack(k, of_k)
    dense_v, _ = unpack(v, of_k)
    y = attend(dense_q, dense_k, dense_v, scores.of(kept=Kept(kept_q, kept_k)))
    return pack(y, of_q, q.shape[0])


def _attend_around_gaps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packings: tuple[Packing, Packing],
    scores: Scores,
) -> torch.Tensor:
    """Move real rows to the front for the kernel, which takes no padding between sequences, and back."""
    of_q, of_k = packings
    order_q, real_q = _real_rows_first(of_q, q.shape[0])
    order_k, real_k = _real_rows_first(of_k, k.shape[0])
    # The kernel reads and writes no rows behind the real ones: neither results nor gradients mean anything there.
    q, k, v = (
        tensor.index_select(0, order).masked_fill(~real[:, None, None], 0.0)
        for tensor, order, real in (
            (q, order_q, real_q),
            (k, order_k, real_k),
            (v, order_k, real_k),
        )
    )
    closed = of_q.closed(), of_k.closed()
    y = _attend_by_kernel(q, k, v, closed, scores).masked_fill(~real_q[:, None, None], 0.0)
    return torch.empty_like(y).index_copy(0, order_q, y)


def _real_rows_first(packing: Packing, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all rows, those of sequences in front and in order; and of the new places, which hold a real row."""
    places = torch.arange(tokens, device=packing.ends.device)
    sequence = torch.searchsorted(packing.starts[1:-1], places, right=True)
    within = places - packing.starts[sequence]
    is_real = (within >= 0) & (within < packing.ends.diff()[sequence])
    return torch.argsort(~is_real, stable=True), places < packing.ends[-1] - packing.ends[0]
