"""Packed sequences under context parallelism, against loops over sequences."""

import itertools

import pytest
import torch

from selection import every_pair, sampled
from te_fast import tex

#: Beginnings of sequences whose lengths are multiples of 8: of several, one, some empty.
BOUNDS = [[0, 8, 24, 32], [0, 16], [0, 0, 16, 16, 24, 24]]
#: The same, and tokens behind the last sequence.
CASES = [(bounds, bounds[-1] + extra) for bounds in BOUNDS for extra in (0, 8)]


def cu(bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def spans(bounds, half=None):
    """First and last token of each sequence, or of one of its halves."""
    for begin, end in itertools.pairwise(bounds):
        middle = (begin + end) // 2
        yield {None: (begin, end), 0: (begin, middle), 1: (middle, end)}[half]


def tokens_of_rank(bounds, world_size, rank):
    tokens = []
    for begin, end in spans(bounds):
        size = (end - begin) // (2 * world_size)
        for chunk in (rank, 2 * world_size - 1 - rank):
            tokens += range(begin + chunk * size, begin + (chunk + 1) * size)
    return tokens


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tokens_of_ranks(bounds, world_size):
    for rank in range(world_size):
        got = tex.thd_get_partitioned_indices(cu(bounds), bounds[-1], world_size, rank)
        assert got.dtype is torch.int32
        assert got.tolist() == tokens_of_rank(bounds, world_size, rank)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_order_of_ranks_and_back(bounds, shape):
    x = random(bounds[-1], *shape)
    order = [token for rank in range(2) for token in tokens_of_rank(bounds, 2, rank)]
    there = tex.thd_sequence_order_to_cp_rank_order(x, cu(bounds), 2, bounds[-1])
    assert torch.equal(there, x[torch.tensor(order)])
    assert torch.equal(tex.thd_cp_rank_order_to_sequence_order(there, cu(bounds), 2, bounds[-1]), x)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("bounds", "total"), CASES)
@pytest.mark.parametrize("kv", [False, True])
def test_halves(bounds, total, half, kv):
    x = random(*((2,) if kv else ()), total, 3, 8, dtype=torch.bfloat16)
    got = tex.thd_read_half_tensor(x, cu(bounds), half)
    want = torch.cat([x[..., begin:end, :, :] for begin, end in spans(bounds, half)], -3)
    assert got.shape[-3] == total // 2
    assert torch.equal(got[..., : want.shape[-3], :, :], want)


def lse_of(bounds, total, *, packed, seed, longest=None):
    if packed:
        return random(3, total, seed=seed)
    return random(len(bounds) - 1, 3, longest, seed=seed)


def second_halves(bounds, *, packed):
    """For each sequence its index, the place of its second half, and the place in tensors of second halves."""
    at = 0
    for number, (begin, end) in enumerate(spans(bounds, 1)):
        size = end - begin
        whole, half = (begin, at) if packed else (size, 0)
        yield number, slice(whole, whole + size), slice(half, half + size)
        at += size


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("bounds", "total"), CASES)
def test_log_sum_exps(bounds, total, packed):
    longest = total
    lse = lse_of(bounds, total, packed=packed, seed=1, longest=longest)
    size = (total if packed else longest) // 2
    step = lse_of(bounds, size, packed=packed, seed=2, longest=size)
    lse[..., 4], step[..., 1] = -torch.inf, torch.nan if packed else 80.0
    read, corrected = torch.zeros_like(step), lse.clone()
    for number, whole, half in second_halves(bounds, packed=packed):
        at = (slice(None),) if packed else (number,)
        read[(*at, ..., half)] = lse[(*at, ..., whole)]
        pair = lse[(*at, ..., whole)].double(), step[(*at, ..., half)].double()
        larger, smaller = torch.fmax(*pair), torch.fmin(*pair)
        corrected[(*at, ..., whole)] = (larger + torch.log1p((smaller - larger).exp())).float()
    assert torch.equal(tex.thd_read_second_half_lse(lse, cu(bounds), packed, size), read)
    assert tex.thd_second_half_lse_correction(lse, step, cu(bounds), packed) is None
    torch.testing.assert_close(lse, corrected, equal_nan=True)


@pytest.mark.parametrize(
    ("bounds", "total", "only_second_half", "packed", "dtype"),
    sampled(
        [pytest.param(*case) for case in CASES],
        [False, True],
        [True, False],
        [torch.float32, torch.bfloat16],
        quick=every_pair,
    ),
)
def test_results_of_steps(bounds, total, only_second_half, packed, dtype):
    count = total // 2 if only_second_half else total
    out, step = random(total, 3, 8, dtype=dtype), random(count, 3, 8, dtype=dtype, seed=1)
    step[1] = 0
    lse = lse_of(bounds, total, packed=packed, seed=2, longest=total)
    lse_step = lse_of(bounds, count, packed=packed, seed=3, longest=count)
    lse_step[..., 1] = (
        torch.inf
    )  # its factor is infinite, and counts as 0 where the step's result is 0
    want, at = out.clone(), 0
    for number, (begin, end) in enumerate(spans(bounds, 1 if only_second_half else None)):
        size = end - begin
        if packed:
            difference = lse_step[:, at : at + size] - lse[:, begin:end]
        else:
            shift = size if only_second_half else 0
            difference = lse_step[number, :, :size] - lse[number, :, shift : shift + size]
        part = step[at : at + size]
        added = torch.where(part == 0, 0.0, part.float() * difference.t().exp()[:, :, None])
        want[begin:end] += added.to(dtype)
        at += size
    assert (
        tex.thd_out_correction(out, step, lse, lse_step, cu(bounds), only_second_half, packed)
        is None
    )
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    "kinds",
    [
        ("add", "none"),
        ("copy", "none"),
        ("none", "add"),
        ("none", "copy"),
        ("add", "copy"),
        ("copy", "add"),
    ],
)
@pytest.mark.parametrize(("bounds", "total"), CASES)
@pytest.mark.parametrize("kv", [False, True])
def test_gradients_of_steps(bounds, total, kinds, kv):
    lead = (2,) if kv else ()
    count = total // 2 if "none" in kinds else total
    grad, step = random(*lead, total, 3, 8), random(*lead, count, 3, 8, seed=1)
    want, at = grad.clone(), 0
    for begin, end in spans(bounds):
        middle = (begin + end) // 2
        for kind, (first, last) in zip(kinds, ((begin, middle), (middle, end)), strict=True):
            if kind == "none":
                continue
            part = step[..., at : at + last - first, :, :]
            at += last - first
            former = want[..., first:last, :, :] if kind == "add" else 0
            want[..., first:last, :, :] = former + part
    assert tex.thd_grad_correction(grad, step, cu(bounds), *kinds) is None
    assert torch.equal(grad, want)


def test_valid_tokens():
    padded, valid = [0, 8, 16, 16], [0, 5, 13, 13]
    x, out = random(20, 3), random(20, 3, seed=1)
    want = out.clone()
    want[0:5], want[8:16] = x[0:5], x[8:16]
    tex.thd_copy_valid_tokens_from_per_split_to_rank_local(out, x, cu(padded), cu(valid))
    assert torch.equal(out, want)


@pytest.mark.parametrize("bounds", [[0, 3, 3, 8], [0, 5]])
def test_batches(bounds):
    x = random(10, 2, 4)
    x[0] = torch.nan
    batch = tex.convert_thd_to_bshd(x, cu(bounds), len(bounds) - 1, 6)
    want = torch.zeros(len(bounds) - 1, 6, 2, 4)
    for number, (begin, end) in enumerate(spans(bounds)):
        want[number, : end - begin] = x[begin:end]
    torch.testing.assert_close(batch, want, rtol=0, atol=0, equal_nan=True)
    back = tex.convert_bshd_to_thd(batch, cu(bounds), 10)
    x[bounds[-1] :] = 0
    torch.testing.assert_close(back, x, rtol=0, atol=0, equal_nan=True)


def test_autograd_sees_nothing():
    x = random(16, 2, 8).requires_grad_()
    assert not tex.thd_read_half_tensor(x, cu([0, 16]), 0).requires_grad
    assert not tex.thd_cp_rank_order_to_sequence_order(x, cu([0, 16]), 2, 16).requires_grad


def test_errors():
    bounds = cu([0, 16])
    with pytest.raises(RuntimeError, match="int32"):
        tex.thd_get_partitioned_indices(bounds.long(), 16, 2, 0)
    with pytest.raises(RuntimeError, match="rank < world_size"):
        tex.thd_get_partitioned_indices(bounds, 16, 2, 2)
    with pytest.raises(RuntimeError, match="multiple of 6"):
        tex.thd_get_partitioned_indices(bounds, 16, 3, 0)
    with pytest.raises(RuntimeError, match="half_idx"):
        tex.thd_read_half_tensor(torch.ones(16, 1, 8), bounds, 2)
    with pytest.raises(RuntimeError, match=r"\(t, h, d\)"):
        tex.thd_read_half_tensor(torch.ones(16, 8), bounds, 0)
    with pytest.raises(RuntimeError, match="float32"):
        tex.thd_read_second_half_lse(torch.ones(1, 16).half(), bounds, True, 8)
    with pytest.raises(RuntimeError, match="8 tokens"):
        tex.thd_read_second_half_lse(torch.ones(1, 1, 16), bounds, False, 9)
    with pytest.raises(RuntimeError, match="two different"):
        tex.thd_grad_correction(torch.ones(16, 1, 8), torch.ones(16, 1, 8), bounds, "add", "add")
    with pytest.raises(RuntimeError, match="16 tokens"):
        tex.thd_sequence_order_to_cp_rank_order(torch.ones(15), bounds, 2, 16)
