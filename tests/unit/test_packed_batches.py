"""Batches of packed sequences for ranks that share them, against loops over the sequences."""

import pytest
import torch

from te_fast.attention import packed_batches
from te_fast.errors import ArgumentError, DtypeError, ShapeError
from te_fast.pytorch.attention.dot_product_attention import context_parallel

LENGTHS = ([5], [0, 3, 8, 1], [4, 0, 12], [])


def ends_of(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def batch(lengths):
    tokens = torch.arange(1, sum(lengths) + 1)
    return tokens, tokens.to(torch.int32) * 10


def parts_of(values, lengths):
    return [part.tolist() for part in values.split(lengths)] if lengths else []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [1, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_padding_and_positions(lengths, factor, dtype):
    tokens, labels = batch(lengths)
    ends = ends_of(lengths, dtype)
    got = context_parallel.pad_thd_sequences_for_cp(tokens, labels[None], ends, factor, 7, -1)
    for values, result, pad in ((tokens, got[0], 7), (labels, got[1], -1)):
        padded = [part + [pad] * (-len(part) % factor) for part in parts_of(values, lengths)]
        assert result.tolist() == [value for part in padded for value in part]
        assert result.dtype == values.dtype
    counts = [length + -length % factor for length in lengths]
    assert torch.equal(got[2], ends_of(counts, torch.int64))
    positions = context_parallel.generate_positional_ids_for_cp(ends, factor, torch.int32)
    assert positions.tolist() == [number for count in counts for number in range(count)]
    assert positions.dtype == torch.int32


def on_rank(monkeypatch, ranks, rank):
    monkeypatch.setattr(packed_batches, "get_distributed_world_size", lambda _: ranks)
    monkeypatch.setattr(packed_batches, "get_distributed_rank", lambda _: rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_has_a_chunk_from_either_end_of_each_sequence(ranks, monkeypatch):
    lengths = [length * 2 * ranks for length in (2, 0, 1)]
    tokens, labels = batch(lengths)
    inputs = (tokens[:, None].expand(-1, 2), labels[None], None)
    for rank in range(ranks):
        on_rank(monkeypatch, ranks, rank)
        got = context_parallel.get_batch_on_this_cp_rank(ends_of(lengths), *inputs)
        wanted = []
        for part in parts_of(tokens, lengths):
            size = len(part) // (2 * ranks)
            chunks = [part[size * number : size * (number + 1)] for number in range(2 * ranks)]
            wanted += part if ranks == 1 else chunks[rank] + chunks[2 * ranks - 1 - rank]
        assert got[0].tolist() == [[token, token] for token in wanted]
        assert got[1].tolist() == [[10 * token for token in wanted]]
        assert got[2] is None


def test_wrong_arguments_are_named(monkeypatch):
    tokens, ends = torch.arange(8), torch.tensor([0, 4, 8])
    pad, positions = (
        packed_batches.pad_thd_sequences_for_cp,
        packed_batches.generate_positional_ids_for_cp,
    )
    share = packed_batches.get_batch_on_this_cp_rank
    on_rank(monkeypatch, 2, 0)
    cases = [
        (lambda: pad(tokens, tokens[:7], ends, 4), ShapeError, r"labels must be .* 8 tokens"),
        (lambda: pad(tokens, tokens, ends.flip(0), 4), ShapeError, "never decrease"),
        (lambda: pad(tokens, tokens, ends, 0), ShapeError, "divisibility_factor"),
        (lambda: positions(ends.float(), 4), DtypeError, "int32 or int64, got torch.float32"),
        (lambda: positions([0, 4], 4), DtypeError, "cu_seqlens must be a torch.Tensor"),
        (lambda: share(ends, tokens, tokens, tokens, qvk_format="bshd"), ArgumentError, "'thd'"),
        (lambda: share(ends, tokens[:6], tokens, None), ShapeError, "input_ids_padded must have"),
        (lambda: share(torch.tensor([0, 6]), tokens, None, None), ShapeError, "multiples of 4"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
