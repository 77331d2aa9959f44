"""Permutation and padding of quantised rows: bytes and scales of the rows that torch's own indexing gives."""

import pytest
import torch

import te_fast.pytorch as te
from quantized_tensors import layout, parts, quantizer
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.runtime import native

TOKENS, HIDDEN, EXPERTS = 24, 256, 4
KINDS = ("delayed", "current", "1d")


def rows(kind, count=TOKENS, *, requires_grad=False):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16() * 3
    return x, quantizer(kind)(x).requires_grad_(requires_grad)


def routing(count=TOKENS):
    generator = torch.Generator().manual_seed(7)
    return torch.rand(count, EXPERTS, generator=generator) < 0.4


def order(mask):
    """Token of each permuted row: expert by expert, tokens in order."""
    return torch.cat([mask[:, expert].nonzero()[:, 0] for expert in range(mask.shape[1])])


def check(out, x, kind, tokens):
    """Rows of `out` have the bytes and scales of these tokens; -1 is a row of zeros."""
    data, scales, spread = layout(x, kind)
    found, found_scales, col, _ = parts(out)
    there = tokens >= 0
    assert col is None
    assert torch.equal(found[there], data[tokens[there]])
    assert found[~there].eq(0).all()
    if kind == "1d":
        assert found_scales.shape == (HIDDEN // 128, -(-len(tokens) // 4) * 4)
        assert torch.equal(found_scales[:, : len(tokens)][:, there], scales[:, tokens[there]])
        assert found_scales[:, : len(tokens)][:, ~there].eq(0).all()
        assert found_scales[:, len(tokens) :].eq(0).all()
    else:
        assert torch.equal(found_scales, scales)
    values = data.view(torch.float8_e4m3fn).float() * spread
    assert torch.equal(out.dequantize(dtype=torch.float32)[there], values[tokens[there]])
    assert out._quantizer is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [TOKENS, 23])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_rows_are_permuted_as_they_are(kind, count, requires_grad):
    mask = routing(count)
    tokens = order(mask)
    x, q = rows(kind, count, requires_grad=requires_grad)
    for number in (len(tokens), -1):
        out, row_id_map = te.moe_permute(q, mask, number)
        assert type(out) is type(q)
        assert (out.dtype, out.requires_grad) == (q.dtype, requires_grad)
        check(out, x, kind, tokens)
    assert torch.equal(row_id_map[:, -1], mask.sum(1).int())
    if requires_grad:
        gradient = torch.randn(len(tokens), HIDDEN).bfloat16()
        out.backward(gradient)
        expected = torch.zeros(count, HIDDEN).index_add_(0, tokens, gradient.float())
        assert torch.allclose(q.grad.float(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [-7, 6])
def test_rows_are_dropped_or_left_over(kind, missing):
    mask = routing()
    x, q = rows(kind)
    capacity = int(mask.sum()) - missing
    out, _ = te.moe_permute(q, mask, capacity)
    tokens = torch.full((capacity,), -1)
    there = order(mask)[:capacity]
    tokens[: len(there)] = there
    check(out, x, kind, tokens)


@pytest.mark.parametrize("tokens", [0, TOKENS])
@pytest.mark.parametrize("capacity", [0, 5])
@pytest.mark.parametrize("hidden", [2, 16640])
def test_rows_of_no_token_have_scales_of_zero(tokens, capacity, hidden):
    data, mask = torch.ones(tokens, hidden // 2).bfloat16(), torch.zeros(tokens, EXPERTS).bool()
    scales = torch.ones(-(-hidden // 128), tokens)
    for _ in range(2):  # the second time, scratch memory holds what the first call left
        out, *_, permuted = native.moe_permute(data, mask, None, capacity, 0, False, True, scales)
        assert permuted.shape == (len(scales), -(-capacity // 4) * 4)
        assert out.shape == (capacity, hidden // 2)
        assert out.eq(0).all()
        assert permuted.eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_map_permutes_them_too(kind):
    x, q = rows(kind)
    experts = torch.arange(TOKENS, dtype=torch.int32).remainder(3)[:, None]
    out, _ = te.moe_permute(q, experts, map_type="index")
    check(out, x, kind, experts[:, 0].sort(stable=True).indices)


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_and_padding_move_along(kind):
    mask = routing()
    x, q = rows(kind)
    probs = torch.rand(TOKENS, EXPERTS)
    tokens = order(mask)
    out, permuted, _ = te.moe_permute_with_probs(q, probs, mask, len(tokens))
    check(out, x, kind, tokens)
    assert torch.equal(permuted, probs.t()[mask.t()])
    counts = mask.sum(0)
    out, *_ = te.moe_permute_and_pad_with_probs(q, probs, mask, counts, 16)
    expected = []
    for expert in range(EXPERTS):
        own = mask[:, expert].nonzero()[:, 0]
        missing = -len(own) % 16
        expected += [own, torch.full((missing,), -1)]
    check(out, x, kind, torch.cat(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_padding_and_its_reverse(kind, requires_grad):
    x, q = rows(kind, requires_grad=requires_grad)
    splits = [5, 0, 19]
    padded, sizes = te.Fp8Padding(3, 16)(q, splits)
    assert sizes == [16, 0, 32]
    there = torch.full((48,), -1)
    there[:5], there[16:35] = torch.arange(5), torch.arange(5, 24)
    check(padded, x, kind, there)
    back = te.Fp8Unpadding(3, 16)(padded, splits)
    check(back, x, kind, torch.arange(TOKENS))
    same, _ = te.Fp8Padding(1, 8)(q, [24])
    assert same is q


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_sorted(kind):
    x, q = rows(kind)
    sizes, sorted_index = torch.tensor([4, 8, 12]), torch.tensor([2, 0, 1])
    expected = torch.cat([torch.arange(24).split([4, 8, 12])[i] for i in (2, 0, 1)])
    check(te.moe_sort_chunks_by_index(q, sizes, sorted_index), x, kind, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_reads_the_values(kind):
    mask = routing()
    x, q = rows(kind)
    tokens = order(mask)
    out, row_id_map = te.moe_permute(q, mask, len(tokens))
    merged = te.moe_unpermute(out, row_id_map, restore_shape=torch.Size((TOKENS, HIDDEN)))
    expected = te.moe_unpermute(
        out.dequantize(), row_id_map, restore_shape=torch.Size((TOKENS, HIDDEN))
    )
    assert torch.equal(merged, expected)


def test_a_quantised_gradient_stays_one_behind_a_merge():
    mask = routing()
    tokens = order(mask)
    permuted = torch.randn(len(tokens), HIDDEN).bfloat16().requires_grad_()
    _, row_id_map = te.moe_permute(torch.zeros(TOKENS, HIDDEN).bfloat16(), mask, len(tokens))
    merged = te.moe_unpermute(permuted, row_id_map, restore_shape=torch.Size((TOKENS, HIDDEN)))
    x, gradient = rows("1d")
    merged.backward(gradient)
    check(permuted.grad, x, "1d", tokens)


def test_blocks_that_rows_share_are_dequantised():
    mask = routing()
    x, _ = rows("current")
    given = quantizer("2d")(x)
    out, _ = te.moe_permute(given, mask, int(mask.sum()))
    assert type(out) is torch.Tensor
    assert torch.equal(out, given.dequantize()[order(mask)])


def test_permuted_rows_go_into_a_layer():
    mask = routing(32)
    x, q = rows("current", 32)
    layer = te.Linear(HIDDEN, 64, params_dtype=torch.bfloat16, device="cpu")
    out, _ = te.moe_permute(q, mask, 40)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = layer(out)
    y.sum().backward()
    weight = layer.weight.detach().double()
    expected = out.dequantize().double() @ weight.t() + layer.bias.double()
    assert (y.double() - expected).abs().max() <= 0.06 * expected.abs().max()
    assert layer.weight.grad.isfinite().all()
