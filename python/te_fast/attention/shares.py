"""Which tokens of a sequence each rank of context parallelism has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_fast.errors import ArgumentError
from te_fast.layers.parameters import check_sizes
from te_fast.runtime.arguments import check_numbers


class ContextShare(NamedTuple):
    """Which tokens of a sequence a rank has under context parallelism.

    A sequence has two chunks a rank. Rank r has chunk r and chunk 2 · ranks - 1 - r, so that all ranks have equal work
    under a causal mask; without balance it has two chunks that follow each other.

    Parameters
    ----------
    ranks, rank : int
        Ranks that share each sequence, and the number of this one.
    is_balanced : bool
        Whether their work is balanced.
    """

    ranks: int = 1
    rank: int = 0
    is_balanced: bool = True

    def begins(self, half: Any) -> tuple[Any, Any]:
        """Return the positions of both chunks' first tokens; `half` is the length of a chunk."""
        if not self.is_balanced:
            return 2 * self.rank * half, (2 * self.rank + 1) * half
        return self.rank * half, (2 * self.ranks - 1 - self.rank) * half

    def ranges(self, tokens: int) -> list[tuple[int, int]]:
        """Return the first position, and that behind the last, of each run of this rank's `tokens` tokens."""
        if not self.is_balanced:
            return [(self.rank * tokens, (self.rank + 1) * tokens)]
        return [(begin, begin + tokens // 2) for begin in self.begins(tokens // 2)]

    def positions(self, tokens: torch.Tensor, half: Any) -> torch.Tensor:
        """Return the positions of this rank's tokens in their sequence, from their numbers on the rank."""
        if self.ranks == 1:
            return tokens
        first, second = self.begins(half)
        return tokens + torch.where(tokens < half, first, second - half)


WHOLE = ContextShare()


def share_of(cp_size: int, cp_rank: int, op: str) -> ContextShare:
    """Return which tokens of each sequence a rank of context parallelism has."""
    if type(cp_size) is not int:
        check_sizes(op, cp_size=cp_size)
    if cp_size == 1:
        return WHOLE
    check_numbers(op, cp_rank=cp_rank)
    if not 0 <= cp_rank < cp_size:
        message = (
            f"{op}: cp_rank must be from 0 to cp_size - 1, got cp_rank={cp_rank}, cp_size={cp_size}"
        )
        raise ArgumentError(message)
    check_sizes(op, cp_rank=cp_rank)
    return ContextShare(cp_size, cp_rank)
