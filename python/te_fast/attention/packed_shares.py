"""Which tokens of packed sequences each rank of context parallelism has.

A rank has its chunks of the first sequence, of the second one, and so on. Chunks divide a sequence together with the
padding behind it, so that all ranks have equally many tokens of each sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_fast.attention.packed import Packing
from te_fast.attention.parts import Rows


class PackedShare(NamedTuple):
    """The tokens of packed sequences on ranks that share them.

    Attributes
    ----------
    begins : torch.Tensor
        int32 ``(sequences + 1,)``: where sequences begin among the tokens of a rank, and where the last one ends.
    lengths : torch.Tensor, optional
        int32 ``(sequences,)``: lengths of whole sequences; None if there is no padding.
    longest : int
        No rank has more tokens of a sequence, not counting padding.
    tokens : int
        Tokens of a rank.
    chunks : int
        Chunks that a rank has of a sequence: 2 if work is balanced, else 1.
    ranks : int
        The ranks.
    """

    begins: torch.Tensor
    lengths: torch.Tensor | None
    longest: int
    tokens: int
    chunks: int
    ranks: int

    @classmethod
    def of_both(
        cls,
        packings: tuple[Packing, Packing],
        tokens: tuple[int, int],
        ranks: int,
        is_balanced: bool,
    ) -> tuple[PackedShare, PackedShare]:
        """Return the tokens of queries and of keys; one object if they are the same sequences."""
        of_q, of_k = packings
        found = cls.of(of_q, tokens[0], ranks, is_balanced=is_balanced)
        if of_q.ends is of_k.ends and of_q.starts is of_k.starts and of_q.longest == of_k.longest:
            return found, found
        return found, cls.of(of_k, tokens[1], ranks, is_balanced=is_balanced)

    @classmethod
    def of(cls, packing: Packing, tokens: int, ranks: int, *, is_balanced: bool) -> PackedShare:
        """Return the tokens of sequences that lie as `packing` says, if a rank has `tokens` of them."""
        chunks = 1 + is_balanced
        begins = torch.div(packing.starts, ranks, rounding_mode="floor")
        if packing.has_gaps:  # without knowing the padding: one chunk may have all of a sequence
            lengths, longest = packing.ends.diff(), packing.longest
        else:
            lengths, longest = None, -(-packing.longest // (ranks * chunks)) * chunks
        return cls(begins, lengths, min(longest, tokens), tokens, chunks, ranks)

    def part(self, rank: int, chunk: int | None = None) -> tuple[Rows, Packing]:
        """Return the rows of a rank's tokens, or of those of one of its chunks, and how sequences lie in these rows.

        Rows of padding are behind those of all sequences.
        """
        if self.lengths is None and chunk is None:
            return slice(None), Packing(self.begins, self.begins, self.longest)
        size = self._chunk_sizes()
        taken = range(self.chunks) if chunk is None else (chunk,)
        bounds = self.begins if len(taken) == self.chunks else self.begins // self.chunks
        places = torch.arange(self.tokens * len(taken) // self.chunks, device=size.device)
        sequence = torch.searchsorted(bounds[1:-1], places, right=True)
        within = places - bounds[sequence]
        rows = self.begins[sequence] + taken[0] * size[sequence] + within
        longest = -(-self.longest * len(taken) // self.chunks)
        if self.lengths is None:
            return rows, Packing(bounds, bounds, longest)
        real = sum(self._real_tokens(self.lengths, size, rank, one) for one in taken)
        assert isinstance(real, torch.Tensor)
        ends = _cumulative(real)
        order = torch.argsort(within >= real[sequence], stable=True)
        return rows[order], Packing(ends, ends, self.longest)

    def is_padding(self, rank: int) -> torch.Tensor | None:
        """Return which of a rank's tokens are padding, ``(tokens,)``; None if there is none."""
        if self.lengths is None:
            return None
        rows, packing = self.part(rank)
        places = torch.arange(self.tokens, device=self.begins.device)
        assert isinstance(rows, torch.Tensor)
        found = torch.empty_like(places, dtype=torch.bool)
        return found.index_copy_(0, rows, places >= packing.ends[-1])

    def of_chunk(self, rank: int, chunk: int) -> Packing:
        """Return where one chunk of each sequence lies among a rank's tokens."""
        size = self._chunk_sizes()
        real = size if self.lengths is None else self._real_tokens(self.lengths, size, rank, chunk)
        starts = self.begins + torch.nn.functional.pad(chunk * size, (0, 1))
        return Packing(_cumulative(real), starts, self.longest)

    def until(self, number: int | None) -> Packing:
        """Return where whole sequences lie among all ranks' tokens, without what is behind one of their chunks."""
        size, starts = self._chunk_sizes(), self.begins * self.ranks
        real = starts.diff() if number is None else size * (number + 1)
        longest = self.longest
        if self.lengths is None:
            longest *= self.ranks
        else:
            real = real.minimum(self.lengths)
        return Packing(_cumulative(real), starts, longest)

    def number_of(self, rank: int, chunk: int) -> int:
        """Return the number of a rank's chunk among all chunks of a sequence."""
        return rank if chunk == 0 else 2 * self.ranks - 1 - rank

    def _chunk_sizes(self) -> torch.Tensor:
        return self.begins.diff() // self.chunks

    def _real_tokens(
        self, lengths: torch.Tensor, size: torch.Tensor, rank: int, chunk: int
    ) -> torch.Tensor:
        """Return how many tokens of each sequence one chunk of a rank has."""
        return (lengths - self.number_of(rank, chunk) * size).clamp(min=0).minimum(size)

    def places(self, ranks: int) -> torch.Tensor:
        """Return the places of tokens in the order of sequences, of those that neighbouring ranks have in turn.

        Parameters
        ----------
        ranks : int
            Number of these ranks, whose first chunks, and second ones, follow each other in a sequence.

        Returns
        -------
        torch.Tensor
            int64 ``(ranks, tokens)``.
        """
        return places_of_ranks(self.begins, self.tokens, ranks, self.chunks)


def places_of_ranks(begins: torch.Tensor, tokens: int, ranks: int, chunks: int = 2) -> torch.Tensor:
    """Return the places in packed sequences of the tokens that each rank has.

    Parameters
    ----------
    begins : torch.Tensor
        Integers ``(sequences + 1,)``: where sequences begin among the tokens of a rank, and where the last one ends.
    tokens : int
        Tokens of a rank.
    ranks : int
        The ranks.
    chunks : int, default = 2
        Chunks that a rank has of a sequence: rank r has chunk r, and the second one is as far from the sequence's end.

    Returns
    -------
    torch.Tensor
        int64 ``(ranks, tokens)``.
    """
    rows = torch.arange(tokens, device=begins.device)
    sequence = torch.searchsorted(begins[1:-1].contiguous(), rows, right=True)
    begin, size = begins[sequence], (begins.diff() // chunks)[sequence]
    rank = torch.arange(ranks, device=begins.device)[:, None]
    within = rows - begin
    return begin * ranks + within + torch.where(within < size, rank, 2 * (ranks - 1) - rank) * size


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
