"""MoE permutation in plain torch, written from the definitions; nothing here uses te_fast."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass
class Case:
    """Inputs of a permutation."""

    x: torch.Tensor
    probs: torch.Tensor
    mask: torch.Tensor

    @property
    def routed(self) -> int:
        """Number of routed (token, expert) pairs."""
        return int(self.mask.sum())

    def to(self, device: str) -> Case:
        """Copy to a device."""
        return Case(
            *(tensor.detach().to(device).clone() for tensor in (self.x, self.probs, self.mask))
        )


def make_case(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    *,
    kind: str = "random",
    dtype: torch.dtype = torch.float32,
    prob_dtype: torch.dtype = torch.float32,
    zeros: bool = False,
    density: float = 0.3,
    seed: int = 0,
) -> Case:
    """Draw a routing of one kind; `zeros` puts exact zeros among the probabilities."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    mask = torch.zeros(tokens, experts, dtype=torch.bool)
    if kind == "random":
        mask.scatter_(1, scores.topk(top_k, 1).indices, value=True)
    elif kind == "one":
        mask[:, experts // 2] = True
    elif kind == "all":
        mask[:] = True
    elif kind == "holes":  # the first, middle and last expert and every third token get nothing
        mask = scores < top_k / experts
        mask[:, [0, experts // 2, -1]] = False
        mask[::3] = False
    elif kind == "dense":
        mask = scores < density
    probs = torch.rand(tokens, experts, generator=generator)
    if zeros:
        probs[torch.rand(tokens, experts, generator=generator) < 0.2] = 0
    x = torch.randn(tokens, hidden, generator=generator)
    return Case(x.to(dtype), probs.to(prob_dtype), mask)


def rows_of(mask: torch.Tensor) -> torch.Tensor:
    """Destination of every (token, expert) without padding, -1 where not routed: by expert, then by token."""
    counts = mask.sum(0)
    starts = counts.cumsum(0) - counts
    return torch.where(mask, mask.long().cumsum(0) - 1 + starts, -1)


def padding_of(mask: torch.Tensor, align: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Exclusive sums of the experts' padding, and their padded counts."""
    counts = mask.sum(0)
    padded = (counts + align - 1) // align * align
    padding = padded - counts
    return padding.cumsum(0) - padding, padded


def permute_reference(
    case: Case, align: int, rows: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, probabilities, pad offsets and padded counts; `rows` is the capacity, None for the exact size."""
    offsets, padded = padding_of(case.mask, align)
    size = int(padded.sum()) if rows is None else rows
    out = case.x.new_zeros((size, case.x.size(1)))
    probs = case.probs.new_zeros(size)
    destination = torch.where(case.mask, rows_of(case.mask) + offsets, size)
    tokens, experts = (destination < size).nonzero(as_tuple=True)
    to = destination[tokens, experts]
    probs[to] = case.probs[tokens, experts]
    kept = case.probs[tokens, experts] != 0
    out[to[kept]] = case.x[tokens[kept]]
    return out, probs, offsets, padded


def merge_reference(
    case: Case, y: torch.Tensor, probs: torch.Tensor | None, offsets: torch.Tensor | None
) -> torch.Tensor:
    """Weighted sums in FP32, experts in descending order, a product and a sum per term."""
    destination = rows_of(case.mask)
    if offsets is not None:
        destination = torch.where(case.mask, destination + offsets, -1)
    total = torch.zeros((case.x.size(0), y.size(1)), device=y.device)
    for expert in reversed(range(case.mask.size(1))):
        rows = destination[:, expert]
        kept = (rows >= 0) & (rows < y.size(0))
        value = y[rows[kept]].float()
        total[kept] += value if probs is None else probs[kept, expert, None].float() * value
    return total.to(y.dtype)


def index_reference(
    x: torch.Tensor, indices: torch.Tensor, num_out: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and row_id_map of an index map: by expert, then by slot; negative ids are not routed."""
    tokens, top_k = indices.shape
    size = num_out if num_out > 0 else tokens * top_k
    flat = indices.flatten().long()
    order = torch.argsort(torch.where(flat < 0, 1 << 30, flat), stable=True)[
        : int((flat >= 0).sum())
    ]
    rows = torch.full((tokens * top_k,), -1, dtype=torch.int32)
    rows[order[:size]] = torch.arange(min(size, len(order)), dtype=torch.int32)
    out = x.new_zeros((size, x.size(1)))
    kept = order[:size]
    out[: len(kept)] = x[kept // top_k]
    return out, rows.view(tokens, top_k).t().reshape(-1)
