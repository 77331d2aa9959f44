"""MoE permutation on the host kernels against torch code written from the definitions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_fast.pytorch as te
from permutation_reference import (
    Case,
    index_reference,
    make_case,
    merge_reference,
    permute_reference,
    rows_of,
)
from selection import every_pair, sampled
from te_fast.errors import DtypeError, ShapeError, UnsupportedError
from te_fast.pytorch import permutation

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def bits(tensor):
    """View a tensor as bytes, so that a comparison covers NaN and signed zeros too."""
    return tensor.contiguous().view(torch.uint8)


def check_map(case: Case, row_id_map, kept=None):
    """Check dtype, shape and all entries that Transformer Engine defines; `kept` is the mask without dropped rows."""
    tokens, experts = case.mask.shape
    assert row_id_map.dtype == torch.int32
    assert row_id_map.shape == (tokens, 2 * experts + 1)
    rows = rows_of(case.mask)
    kept = case.mask if kept is None else kept
    for token in range(tokens):
        chosen = kept[token].nonzero().flatten().flip(0)
        count = len(chosen)
        assert row_id_map[token, 2 * experts] == count
        assert row_id_map[token, experts : experts + count].tolist() == chosen.tolist()
        assert row_id_map[token, :count].tolist() == rows[token, chosen].tolist()
        assert row_id_map[token, :count].tolist() == sorted(
            rows[token, chosen].tolist(), reverse=True
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_permute_with_probs(dtype, mask_dtype):
    case = make_case(37, 9, 3, 10, dtype=dtype, zeros=True)
    out, probs, row_id_map = te.moe_permute_with_probs(
        case.x, case.probs, case.mask.to(mask_dtype), case.routed
    )
    expected, expected_probs, _, _ = permute_reference(case, 1, case.routed)
    assert torch.equal(bits(out), bits(expected))
    assert torch.equal(bits(probs), bits(expected_probs))
    check_map(case, row_id_map)
    plain, same_map = te.moe_permute(case.x, case.mask.to(mask_dtype), case.routed)
    assert torch.equal(plain, case.x[(rows_of(case.mask).t() >= 0).nonzero()[:, 1]])
    check_map(case, same_map)


@pytest.mark.parametrize(
    ("kind", "align", "extra"),
    sampled(["random", "one", "none", "all", "holes"], [1, 4, 16], [-7, 0, 11], quick=every_pair),
)
def test_permute_and_pad_capacity(kind, align, extra):
    case = make_case(29, 8, 2, 6, kind=kind, zeros=True)
    total = permute_reference(case, align, None)[0].size(0)
    capacity = max(0, total + extra)
    permutation.moe_dropped_rows("cpu", reset=True)
    out, probs, row_id_map, pad_offsets, padded = te.moe_permute_and_pad_with_probs(
        case.x, case.probs, case.mask, None, align, num_out_tokens=capacity
    )
    expected, expected_probs, expected_offsets, expected_padded = permute_reference(
        case, align, capacity
    )
    assert out.shape == (capacity, 6)
    assert torch.equal(bits(out), bits(expected))
    assert torch.equal(bits(probs), bits(expected_probs))
    assert pad_offsets.dtype == torch.int64
    assert torch.equal(pad_offsets, expected_offsets)
    assert torch.equal(padded, expected_padded)
    kept = case.mask & (rows_of(case.mask) + expected_offsets < capacity)
    check_map(case, row_id_map, kept)
    assert permutation.moe_dropped_rows("cpu") == case.routed - int(kept.sum())


@pytest.mark.parametrize("form", ["tensor", "list"])
def test_permute_and_pad_exact_is_transformer_engines_tuple(form):
    case = make_case(40, 6, 2, 8)
    counts = case.mask.sum(0)
    given_counts = counts if form == "tensor" else counts.tolist()
    result = te.moe_permute_and_pad_with_probs(case.x, case.probs, case.mask, given_counts, 8)
    assert len(result) == 5
    out, _, _, pad_offsets, padded = result
    expected, _, expected_offsets, expected_padded = permute_reference(case, 8, None)
    assert torch.equal(out, expected)
    assert torch.equal(pad_offsets, expected_offsets)
    assert torch.equal(padded, expected_padded)
    assert (
        te.moe_permute_and_pad_with_probs(case.x, case.probs, case.mask, given_counts, 1)[3] is None
    )


def test_permute_counts_rows_when_none_are_given():
    case = make_case(20, 5, 2, 4)
    out, probs, _ = te.moe_permute_with_probs(case.x, case.probs, case.mask)
    expected, expected_probs, _, _ = permute_reference(case, 1, None)
    assert torch.equal(out, expected)
    assert torch.equal(probs, expected_probs)

    plain, _ = te.moe_permute(case.x, case.mask, None)
    assert torch.equal(plain, case.x[(rows_of(case.mask).t() >= 0).nonzero()[:, 1]])


@pytest.mark.parametrize("num_out", [-1, 0, 17, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_index_map(num_out, dtype):
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(0, 7, (23, 3), generator=generator, dtype=torch.int32)
    indices[::5, 1] = -1
    x = torch.randn(23, 5, generator=generator).to(dtype)
    out, row_id_map = te.moe_permute(x, indices, num_out, map_type="index")
    expected, expected_map = index_reference(x, indices, num_out)
    assert torch.equal(bits(out), bits(expected))
    assert torch.equal(row_id_map, expected_map)
    probs = torch.rand(23, 3, generator=generator)
    merged = te.moe_unpermute(out, row_id_map, probs, map_type="index")
    reference = torch.zeros(23, 5)
    for k in range(3):
        row = expected_map.view(3, 23)[k].long()
        kept = row >= 0
        reference[kept] += probs[kept, k, None] * out[row[kept]].float()
    assert torch.equal(bits(merged), bits(reference.to(dtype)))


@pytest.mark.parametrize("rows", [0, 1, 11])
def test_dropped_rows_are_not_in_the_map(rows):
    case = make_case(13, 5, 2, 16)
    kept = case.mask & (rows_of(case.mask) < rows)
    for row_id_map in (
        te.moe_permute_with_probs(case.x, case.probs, case.mask, rows)[2],
        te.moe_permute(case.x, case.mask, rows)[1],
        te.moe_permute_and_quantize(case.x, case.probs, case.mask, rows)[3],
        te.moe_permute_and_quantize(case.x, None, case.mask, rows, scale=torch.ones(1))[3],
    ):
        check_map(case, row_id_map, kept)
        assert row_id_map[:, -1].sum() == rows


def test_maps_that_are_given_stay_as_they_are():
    case = make_case(13, 5, 2, 8)
    _, row_id_map = te.moe_permute(case.x, case.mask, case.routed)
    before = row_id_map.clone()
    y = torch.randn(7, 8, requires_grad=True)  # fewer rows than the map has
    te.moe_unpermute(y, row_id_map, restore_shape=case.x.shape).sum().backward()
    assert torch.equal(row_id_map[:, -1], before[:, -1])
    check_map(case, row_id_map)


def test_fp64_probabilities():
    """Routers may compute in FP64: probabilities are moved unchanged, and rounded to FP32 where they weigh rows."""
    case = make_case(21, 6, 2, 8, zeros=True)
    case.probs = case.probs.double() / 3
    case.probs[case.mask] += 1e-12 * (case.probs[case.mask] != 0)
    token, expert = case.mask.nonzero()[0].tolist()
    case.probs[token, expert] = 1e-300  # not zero in FP64, but zero in FP32
    x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
    out, permuted, row_id_map, offsets, _ = te.moe_permute_and_pad_with_probs(
        x, probs, case.mask, case.mask.sum(0), 4
    )
    expected, expected_probs, _, _ = permute_reference(case, 4, None)
    assert torch.equal(out, expected)
    assert permuted.dtype == torch.float64
    assert torch.equal(bits(permuted), bits(expected_probs))
    weight = torch.rand(len(permuted), dtype=torch.float64)
    (permuted * weight).sum().backward(retain_graph=True)
    destination = rows_of(case.mask) + offsets
    expected_grad = torch.where(case.mask, weight[destination.clamp(min=0)], 0)
    assert torch.equal(probs.grad, expected_grad)

    y, weights = out.detach().requires_grad_(), case.probs.clone().requires_grad_()
    merged = te.moe_unpermute(y, row_id_map, weights, x.shape, pad_offsets=offsets)
    assert torch.equal(merged, merge_reference(case, y.detach(), case.probs.float(), offsets))
    dout = torch.randn_like(merged)
    merged.backward(dout)
    dots = (dout[:, None].double() * y.detach()[destination.clamp(min=0)]).sum(2)
    torch.testing.assert_close(weights.grad, torch.where(case.mask, dots, 0.0))
    quantized = te.moe_permute_and_quantize(
        torch.randn(21, 16), case.probs, case.mask, case.routed, scale=torch.ones(1)
    )
    assert torch.equal(bits(quantized[2]), bits(permute_reference(case, 1, None)[1]))


@pytest.mark.parametrize("kind", ["permute", "index", "unpermute", "pad", "sort", "Fp8Padding"])
def test_quantised_tensors_are_refused_with_the_way_out(kind):
    class Float8Tensor(torch.Tensor):  # has no memory of its own, as in Transformer Engine
        @staticmethod
        def __new__(cls, data):
            return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)

        __torch_dispatch__ = classmethod(lambda *_: pytest.fail("the tensor was dispatched"))

    case = make_case(6, 3, 1, 16)
    x, counts = Float8Tensor(case.x), case.mask.sum(0)
    _, row_id_map = te.moe_permute(case.x, case.mask, case.routed)
    calls = {
        "permute": lambda: te.moe_permute(x, case.mask, case.routed),
        "index": lambda: te.moe_permute(x, case.mask.int(), map_type="index"),
        "unpermute": lambda: te.moe_unpermute(x, row_id_map),
        "pad": lambda: te.moe_permute_and_pad_with_probs(x, case.probs, case.mask, counts, 4),
        "sort": lambda: te.moe_sort_chunks_by_index(x, counts, torch.tensor([2, 0, 1])),
        "Fp8Padding": lambda: te.Fp8Padding(3, 16)(x, counts.tolist()),
    }
    with pytest.raises(UnsupportedError, match=r"inp is a Float8Tensor.*\.dequantize\(\)"):
        calls[kind]()


def test_index_map_of_another_type_warns_and_casts():
    indices = torch.tensor([[1, 0], [0, 2]])
    x = torch.randn(2, 4)
    with pytest.warns(
        UserWarning, match=r"data type of the input `index` of Permute is torch.int64"
    ):
        out, row_id_map = te.moe_permute(x, indices, map_type="index")
    assert torch.equal(out, x[[0, 1, 0, 1]])
    with pytest.warns(UserWarning, match="recommended type is torch.float32"):
        te.moe_unpermute(out, row_id_map, torch.ones(2, 2, dtype=torch.bfloat16), map_type="index")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prob_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("align", [0, 8])
def test_unpermute(dtype, prob_dtype, align):
    case = make_case(31, 7, 3, 12, dtype=dtype)
    rows = permute_reference(case, max(align, 1), None)[0].size(0)
    _, _, row_id_map, pad_offsets, _ = te.moe_permute_and_pad_with_probs(
        case.x, case.probs, case.mask, None, max(align, 1), num_out_tokens=rows
    )
    y = torch.randn(rows, 12, generator=torch.Generator().manual_seed(9)).to(dtype)
    weights = case.probs.to(prob_dtype)
    for probs in (None, weights):
        out = te.moe_unpermute(
            y, row_id_map, probs, case.x.shape, pad_offsets=pad_offsets if align else None
        )
        reference = merge_reference(case, y, probs, pad_offsets if align else None)
        assert torch.equal(bits(out), bits(reference)), probs


def test_unpermute_deprecated_probs():
    case = make_case(6, 3, 1, 4)
    out, row_id_map = te.moe_permute(case.x, case.mask, case.routed)
    with pytest.warns(UserWarning, match="probs kwarg is deprecated"):
        merged = te.moe_unpermute(out, row_id_map, restore_shape=case.x.shape, probs=case.probs)
    assert torch.equal(merged, merge_reference(case, out, case.probs, None))
    with pytest.raises(ValueError, match="not both"):
        te.moe_unpermute(out, row_id_map, case.probs, case.x.shape, probs=case.probs)


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("extra", [-3, 0, 5])
def test_gradients_of_permute(align, extra):
    case = make_case(17, 5, 2, 8, zeros=True)
    rows = permute_reference(case, align, None)[0].size(0) + extra
    x, probs = case.x.clone().requires_grad_(), case.probs.clone().requires_grad_()
    out, permuted, _, offsets, _ = te.moe_permute_and_pad_with_probs(
        x, probs, case.mask, None, align, num_out_tokens=rows
    )
    dout, dprobs = torch.randn_like(out), torch.randn_like(permuted)
    torch.autograd.backward([out, permuted], [dout, dprobs])
    expected = merge_reference(case, dout, None, offsets)
    assert torch.equal(x.grad, expected)
    destination = torch.where(case.mask, rows_of(case.mask) + offsets, rows)
    reference = torch.zeros_like(case.probs)
    kept = destination < rows
    reference[kept] = dprobs[destination[kept]]
    assert torch.equal(probs.grad, reference)


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("fresh_map", [True, False], ids=["te_fast's map", "a foreign map"])
def test_gradients_of_unpermute(with_probs, align, fresh_map):
    case = make_case(19, 6, 2, 8)
    rows = permute_reference(case, align, None)[0].size(0) + 3
    _, _, row_id_map, offsets, _ = te.moe_permute_and_pad_with_probs(
        case.x.clone().requires_grad_(), case.probs, case.mask, None, align, num_out_tokens=rows
    )
    if not fresh_map:
        row_id_map = row_id_map.clone()
    y = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    probs = case.probs.clone().requires_grad_() if with_probs else None
    out = te.moe_unpermute(y, row_id_map, probs, case.x.shape, pad_offsets=offsets)
    dout = torch.randn_like(out)
    out.backward(dout)
    destination = (rows_of(case.mask) + offsets)[case.mask]
    tokens, experts = case.mask.nonzero(as_tuple=True)
    weights = case.probs[tokens, experts] if with_probs else torch.ones(len(tokens))
    expected = torch.zeros(rows, 8)
    expected[destination] = weights[:, None] * dout[tokens]
    assert torch.equal(y.grad, expected)
    if with_probs:
        reference = torch.zeros_like(case.probs)
        reference[tokens, experts] = (dout[tokens] * y.detach()[destination]).sum(1)
        torch.testing.assert_close(probs.grad, reference)


def test_index_gradients():
    x = torch.randn(9, 4).requires_grad_()
    indices = torch.randint(0, 3, (9, 2), dtype=torch.int32)
    out, row_id_map = te.moe_permute(x, indices, 13, map_type="index")
    probs = torch.rand(9, 2).requires_grad_()
    merged = te.moe_unpermute(out, row_id_map, probs, map_type="index")
    dout = torch.randn_like(merged)
    merged.backward(dout)
    kept = (row_id_map.view(2, 9).t() >= 0).float()
    torch.testing.assert_close(x.grad, (probs.detach() * kept).sum(1, keepdim=True) * dout)
    torch.testing.assert_close(probs.grad, kept * (x.detach() * dout).sum(1, keepdim=True))


def test_only_probs_need_a_gradient():
    case = make_case(8, 3, 1, 4)
    probs = case.probs.clone().requires_grad_()
    _, permuted, _ = te.moe_permute_with_probs(case.x, probs, case.mask, case.routed)
    permuted.sum().backward()
    assert torch.equal(probs.grad, case.mask.float())


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_no_tokens(map_type):
    x = torch.empty(0, 8, requires_grad=True)
    routing = torch.zeros(0, 4, dtype=torch.int32)
    out, row_id_map = te.moe_permute(x, routing, 0, map_type=map_type)
    assert out.shape == (0, 8)
    merged = te.moe_unpermute(out, row_id_map, restore_shape=torch.Size([5, 8]), map_type=map_type)
    assert torch.equal(merged, torch.zeros(5, 8))
    merged.sum().backward()
    assert x.grad.shape == (0, 8)


def test_no_rows_of_an_index_map():
    row_id_map = torch.full((6,), -1, dtype=torch.int32)
    probs = torch.rand(3, 2, requires_grad=True)
    merged = te.moe_unpermute(torch.empty(0, 4), row_id_map, probs, map_type="index")
    assert torch.equal(merged, torch.zeros(3, 4))
    merged.sum().backward()
    assert torch.equal(probs.grad, torch.zeros(3, 2))
    assert te.moe_unpermute(torch.empty(0, 4), row_id_map, map_type="index").shape == (6, 4)


def test_no_tokens_with_a_capacity():
    x, probs = torch.empty(0, 8), torch.empty(0, 4)
    out, permuted, row_id_map, offsets, padded = te.moe_permute_and_pad_with_probs(
        x, probs, torch.zeros(0, 4, dtype=torch.bool), None, 16, num_out_tokens=6
    )
    assert torch.equal(out, torch.zeros(6, 8))
    assert torch.equal(permuted, torch.zeros(6))
    assert row_id_map.shape == (0, 9)
    assert torch.equal(offsets, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(padded, torch.zeros(4, dtype=torch.int64))


def test_no_rows_for_this_rank():
    case = make_case(12, 4, 2, 8, kind="none")
    x = case.x.clone().requires_grad_()
    probs = case.probs.clone().requires_grad_()
    out, _, row_id_map = te.moe_permute_with_probs(x, probs, case.mask, 0)
    assert out.shape == (0, 8)
    merged = te.moe_unpermute(out, row_id_map, probs, x.shape)
    assert torch.equal(merged, torch.zeros(12, 8))
    merged.sum().backward()
    assert torch.equal(x.grad, torch.zeros(12, 8))
    assert torch.equal(probs.grad, torch.zeros(12, 4))


def test_nan_probabilities_are_not_zero():
    case = make_case(5, 2, 1, 4)
    case.probs.fill_(float("nan"))
    out, probs, _ = te.moe_permute_with_probs(case.x, case.probs, case.mask, case.routed)
    assert torch.equal(out, permute_reference(case, 1, None)[0])
    assert probs.isnan().all()


def test_foreign_maps_cannot_lead_outside():
    row_id_map = torch.full((4, 7), 2**30, dtype=torch.int32)
    row_id_map[0] = -5
    row_id_map[1, 3:] = 100
    row_id_map[:, 6] = 50
    y = torch.randn(6, 8)
    assert torch.equal(te.moe_unpermute(y, row_id_map, restore_shape=(4, 8)), torch.zeros(4, 8))


def test_a_changed_map_is_counted_again():
    case = make_case(10, 3, 1, 4)
    x = case.x.clone().requires_grad_()
    out, row_id_map = te.moe_permute(x, case.mask, case.routed)
    row_id_map.zero_()  # no token has a row now
    y = out.detach().requires_grad_()
    te.moe_unpermute(y, row_id_map, restore_shape=x.shape).sum().backward()
    assert torch.equal(y.grad, torch.zeros_like(y))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"inp": torch.randn(4)}, ValueError, "two dimensions"),
        ({"inp": torch.randn(5, 8)}, ValueError, "one per token"),
        (
            {"inp": torch.randn(6, 8).double()},
            TypeError,
            "torch.float32, torch.float16 or torch.bfloat16",
        ),
        ({"routing_map": torch.zeros(6, 3)}, TypeError, "bool or an integer type"),
        ({"probs": torch.rand(6, 4)}, ValueError, r"of shape \[6, 3\]"),
        ({"probs": torch.ones(6, 3).int()}, TypeError, "probs must be torch.float32"),
        ({"inp": torch.randn(5, 8)}, AssertionError, "one per token"),  # TE asserts
    ],
)
def test_errors_name_what_is_wrong(change, error, match):
    arguments = {
        "inp": torch.randn(6, 8),
        "probs": torch.rand(6, 3),
        "routing_map": torch.ones(6, 3).bool(),
    }
    with pytest.raises(error, match=match):
        te.moe_permute_with_probs(**(arguments | change), num_out_tokens=4)


def test_errors_of_arguments():
    x, probs, mask = torch.randn(4, 8), torch.rand(4, 2), torch.ones(4, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="^moe_permute: .*mask' or 'index"):
        te.moe_permute(x, mask, 8, map_type="bitmap")
    with pytest.raises(ValueError, match="^moe_unpermute: .*mask' or 'index"):
        te.moe_unpermute(x, torch.zeros(8).int(), map_type="bitmap")
    with pytest.raises(ShapeError, match="align_size must be positive"):
        te.moe_permute_and_pad_with_probs(x, probs, mask, [4, 4], 0)
    with pytest.raises(ShapeError, match=r"below 2\*\*31"):
        te.moe_permute_and_pad_with_probs(x, probs, mask, [4, 4], 2**62)
    with pytest.raises(ShapeError, match="tokens_per_expert must be given"):
        te.moe_permute_and_pad_with_probs(x, probs, mask, None, 16)
    with pytest.raises(ShapeError, match="must have 2 entries"):
        te.moe_permute_and_pad_with_probs(x, probs, mask, [8], 16)
    pad = te.moe_permute_and_pad_with_probs
    with pytest.raises(ShapeError, match="tokens_per_expert must be of one dimension"):
        pad(x, probs, mask, torch.tensor(8), 16)
    for counts in (torch.tensor([8, 8, 8]), torch.ones(3, device="meta").int()):
        with pytest.raises(ShapeError, match="tokens_per_expert must have 2 entries"):
            pad(x, probs, mask, counts, 16)
    with pytest.raises(DtypeError, match="tokens_per_expert must be integers"):
        pad(x, probs, mask, torch.tensor([4.0, 4.0]), 16)
    with pytest.raises(ShapeError, match="routing_map must be of two dimensions"):
        pad(x, probs, mask[:, 0], [4, 4], 16)
    with pytest.raises(DtypeError, match="^moe_permute: index must be of an integer type"):
        te.moe_permute(x, torch.rand(4, 2), map_type="index")
    with pytest.raises(DtypeError, match="^moe_unpermute: row_id_map must be of an integer type"):
        te.moe_unpermute(x, torch.rand(8), map_type="index")
    out, row_id_map = te.moe_permute(x, mask, 8)
    with pytest.raises(ShapeError, match="restore_shape"):
        te.moe_unpermute(out, row_id_map, restore_shape=(3, 8))
    for shape in [(4,), (1, 4, 8), (-4, 8), (4, 9)]:
        with pytest.raises(ShapeError, match="restore_shape must be"):
            te.moe_unpermute(out, row_id_map, restore_shape=shape)
    with pytest.raises(ShapeError, match="inp must be of two dimensions"):
        te.moe_unpermute(out[0], row_id_map, restore_shape=(4, 8))
    with pytest.raises(ShapeError, match="row_id_map"):
        te.moe_unpermute(out, row_id_map, map_type="index")
    out, index_map = te.moe_permute(x, mask.int(), map_type="index")
    with pytest.raises(ShapeError, match="merging_probs must be of two dimensions"):
        te.moe_unpermute(out, index_map, torch.rand(8), map_type="index")
    with pytest.raises(ShapeError, match="pad_offsets"):
        te.moe_unpermute(out, row_id_map, pad_offsets=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DtypeError, match="pad_offsets"):
        te.moe_unpermute(out, row_id_map, pad_offsets=torch.zeros(2))


def test_gradients_cannot_be_differentiated_twice():
    case = make_case(6, 2, 1, 4)
    x = case.x.clone().requires_grad_()
    out, _ = te.moe_permute(x, case.mask, case.routed)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad((out * out).sum(), x, create_graph=True)


def test_debug_mode_raises_on_dropped_rows(monkeypatch):
    case = make_case(9, 3, 2, 4)
    permutation.moe_dropped_rows("cpu", reset=True)
    monkeypatch.setattr("te_fast._config.DEBUG", True)
    te.moe_permute(case.x, case.mask, case.routed)
    with pytest.raises(RuntimeError, match=r"2 routed rows did not fit into num_out_tokens"):
        te.moe_permute(case.x, case.mask, case.routed - 2)


def test_debug_mode_takes_no_other_calls_drops_for_its_own(monkeypatch):
    case = make_case(9, 3, 2, 4)
    permutation.moe_dropped_rows("cpu", reset=True)
    monkeypatch.setattr("te_fast._config.DEBUG", True)
    indices = torch.zeros(9, 2, dtype=torch.int32)
    te.moe_permute(case.x, indices, 15, map_type="index")  # this call drops rows on purpose
    te.moe_permute(case.x, case.mask, case.routed)
    te.moe_permute_and_quantize(
        torch.randn(9, 16), None, case.mask, case.routed, scale=torch.ones(1)
    )
    assert permutation.moe_dropped_rows("cpu") == 3


def test_no_hidden_elements_move_no_probabilities():
    mask, probs = torch.ones(3, 2, dtype=torch.bool), torch.rand(3, 2)
    with pytest.raises(ShapeError, match="bytes of a row"):
        te.moe_permute_and_pad_with_probs(torch.empty(3, 0), probs, mask, [3, 3], 4)
    with pytest.raises(ShapeError, match="hidden size"):
        te.moe_permute_and_quantize(torch.empty(3, 0), probs, mask, 6)


def test_non_contiguous_inputs():
    case = make_case(14, 4, 2, 6)
    wide = torch.randn(14, 12)
    wide[:, ::2] = case.x
    transposed = case.mask.t().contiguous().t()
    out, probs, _ = te.moe_permute_with_probs(wide[:, ::2], case.probs, transposed, case.routed)
    expected, expected_probs, _, _ = permute_reference(case, 1, None)
    assert torch.equal(out, expected)
    assert torch.equal(probs, expected_probs)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    experts=st.integers(1, 40),
    density=st.floats(0, 1),
    align=st.sampled_from([1, 2, 16, 128]),
    slack=st.integers(-20, 20),
    seed=st.integers(0, 1000),
)
def test_any_routing(tokens, experts, density, align, slack, seed):
    case = make_case(tokens, experts, 1, 4, kind="dense", density=density, seed=seed)
    capacity = max(0, permute_reference(case, align, None)[0].size(0) + slack)
    out, probs, row_id_map, offsets, padded = te.moe_permute_and_pad_with_probs(
        case.x, case.probs, case.mask, None, align, num_out_tokens=capacity
    )
    expected, expected_probs, expected_offsets, expected_padded = permute_reference(
        case, align, capacity
    )
    assert torch.equal(out, expected)
    assert torch.equal(probs, expected_probs)
    assert torch.equal(offsets, expected_offsets)
    assert torch.equal(padded, expected_padded)
    if capacity:
        merged = te.moe_unpermute(out, row_id_map, case.probs, case.x.shape, pad_offsets=offsets)
        assert torch.equal(merged, merge_reference(case, out, case.probs, offsets))


def test_the_megatron_page_round_trips():
    page = (Path(__file__).parents[2] / "docs" / "megatron-moe.md").read_text()
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    case = make_case(30, 4, 2, 8)
    dispatch = names["PaddedDispatch"](4, 2, 16)
    rows, probs, counts = dispatch.get_permuted_hidden_states_by_experts(
        case.x, case.probs, case.mask
    )
    expected, expected_probs, _, padded = permute_reference(case, 16, len(rows))
    assert torch.equal(rows, expected)
    assert torch.equal(probs, expected_probs)
    assert torch.equal(counts, padded)
    restored = dispatch.get_restored_hidden_states_by_experts(rows * probs[:, None])
    torch.testing.assert_close(restored, case.x * (case.probs * case.mask).sum(1, keepdim=True))
    out, permuted, row_id_map, offsets, _ = names["permute"](
        case.x, case.mask, probs=case.probs, num_out_tokens=case.routed
    )
    assert offsets is None
    assert torch.equal(permuted, permute_reference(case, 1, None)[1])
    merged = names["unpermute"](out, row_id_map, case.x.shape, probs=case.probs)
    assert torch.equal(merged, merge_reference(case, out, case.probs, None))


def test_gradients_of_probabilities_sum_thousands_of_columns_exactly():
    x, grad = torch.rand(8, 4096, requires_grad=True), torch.rand(8, 4096)
    probs = torch.rand(8, 3, requires_grad=True)
    rows, row_id_map = te.moe_permute(x, torch.ones(8, 3, dtype=torch.bool), 24)
    te.moe_unpermute(rows, row_id_map, probs).backward(grad)
    exact = (x.detach().double() * grad.double()).sum(1, keepdim=True).expand(8, 3)
    assert ((probs.grad - exact).abs() < 2e-7 * exact).all()
