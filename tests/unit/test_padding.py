"""Fp8Padding, Fp8Unpadding and chunk sorting on the host kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_fast.pytorch as te
from te_fast.common import recipe
from te_fast.errors import DtypeError, ShapeError, UnsupportedError
from te_fast.moe.kernels import PAD, UNPAD, _padded_splits


def padded_reference(x, splits, align, rows=None):
    parts = []
    for part in x[: sum(splits)].split(splits):
        parts += [part, x.new_zeros((-len(part) % align, x.size(1)))]
    out = torch.cat(parts)
    return out if rows is None else torch.cat([out, x.new_zeros((rows - len(out), x.size(1)))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [[3, 0, 17, 16], [0, 5], [1]])
def test_padding_of_lists(dtype, splits):
    x = torch.randn(sum(splits), 6, dtype=torch.float32).to(dtype).requires_grad_()
    padding, unpadding = te.Fp8Padding(len(splits), 16), te.Fp8Unpadding(len(splits), 16)
    out, padded = padding(x, splits)
    assert padded == [-(-rows // 16) * 16 for rows in splits]
    assert torch.equal(out, padded_reference(x, splits, 16))
    assert torch.equal(unpadding(out, splits), x)
    dout = torch.randn_like(out)
    out.backward(dout)
    start, expected = 0, []
    for rows, to in zip(splits, padded, strict=True):
        expected.append(dout[start : start + rows])
        start += to
    assert torch.equal(x.grad, torch.cat(expected))


def test_aligned_input_is_returned_itself():
    x = torch.randn(32, 4)
    out, padded = te.Fp8Padding(2, 16)(x, [16, 16])
    assert out is x
    assert padded == [16, 16]
    assert te.Fp8Unpadding(2, 16)(x, [16, 16]) is x


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_splits_as_a_tensor(dtype):
    splits = [5, 0, 8, 3]
    x = torch.randn(16, 4)
    out, padded = te.Fp8Padding(4, 8)(x, torch.tensor(splits, dtype=dtype))
    assert padded.tolist() == [8, 0, 8, 8]
    assert out.shape == ((16 + 4 * 7) // 8 * 8, 4)
    assert torch.equal(out, padded_reference(x, splits, 8, len(out)))
    back = te.Fp8Unpadding(4, 8)(out, torch.tensor(splits, dtype=dtype), num_out_tokens=16)
    assert torch.equal(back, x)
    exact, _ = te.Fp8Padding(4, 8)(x, torch.tensor(splits), num_out_tokens=24)
    assert torch.equal(exact, padded_reference(x, splits, 8))


@pytest.mark.parametrize("rows", [None, 0])
def test_padded_splits_of_no_rows(rows):
    # Memory that the allocator hands out again is not zero.
    splits = [torch.full((1,), 77) for _ in range(64)]
    del splits
    splits = torch.tensor([0 if rows is None else 3])
    x = torch.randn(int(splits), 4)
    out, padded = te.Fp8Padding(1, 16)(x, splits, num_out_tokens=rows)
    assert out.shape == (0, 4)
    assert padded.tolist() == [0 if rows is None else 16]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_capacity_for_lists(needs_grad):
    x = torch.randn(9, 4, requires_grad=needs_grad)
    out, padded = te.Fp8Padding(2, 8)(x, [4, 5], num_out_tokens=21)
    assert padded == [8, 8]
    assert torch.equal(out, padded_reference(x, [4, 5], 8, 21))
    back = te.Fp8Unpadding(2, 8)(out, [4, 5], num_out_tokens=11)
    assert torch.equal(back, torch.cat([x, torch.zeros(2, 4)]))
    aligned = torch.randn(16, 4)
    longer, padded = te.Fp8Padding(2, 8)(aligned, [8, 8], num_out_tokens=17)
    assert padded == [8, 8]
    assert torch.equal(longer, padded_reference(aligned, [8, 8], 8, 17))
    assert torch.equal(te.Fp8Unpadding(2, 8)(longer, [8, 8], num_out_tokens=16), aligned)


def test_leading_dimensions_in_any_layout():
    x = torch.randn(3, 2, 4).transpose(0, 1)
    out, _ = te.Fp8Padding(1, 4)(x, [6])
    assert torch.equal(out, padded_reference(x.reshape(6, 4), [6], 4))
    padded = out.view(4, 2, 4).transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(te.Fp8Unpadding(1, 4)(padded, [6]), x.reshape(6, 4))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_lists_that_do_not_fit_the_rows(needs_grad):
    x = torch.randn(6, 4, requires_grad=needs_grad)
    for module, splits in [
        (te.Fp8Padding(2, 4), [3, 4]),
        (te.Fp8Padding(2, 4), [-1, 7]),
        (te.Fp8Unpadding(2, 4), [3, 4]),
        (te.Fp8Unpadding(2, 4), [-1, 3]),
    ]:
        name = type(module).__name__
        with pytest.raises(ShapeError, match=f"^{name}: m_splits must be"):
            module(x, splits)


@pytest.mark.parametrize(("mode", "name"), [(PAD, "Fp8Padding"), (UNPAD, "Fp8Unpadding")])
def test_errors_under_compile_name_the_module(mode, name):
    with pytest.raises(ShapeError, match=f"^{name}: m_splits must take at most the 6 rows"):
        _padded_splits([3, 4], mode, 4, 6)


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (lambda x: te.Fp8Padding(1, 4)(x, [3])[0], "Fp8Padding"),
        (lambda x: te.Fp8Unpadding(1, 4)(x, [3]), "Fp8Unpadding"),
        (
            lambda x: te.moe_sort_chunks_by_index(x, torch.tensor([4]), torch.tensor([0])),
            "moe_sort_chunks_by_index",
        ),
    ],
)
def test_second_derivatives_are_refused_by_name(move, name):
    x = torch.randn(4, 4, requires_grad=True)
    rows = 3 if name == "Fp8Padding" else 4
    with pytest.raises(UnsupportedError, match=f"^{name}: its gradient"):
        torch.autograd.grad(move(x[:rows]).square().sum(), x, create_graph=True)


def test_splits_of_a_backward_are_those_of_its_forward():
    x, splits, order = torch.randn(16, 4, requires_grad=True), [3, 5, 8], torch.tensor([2, 0, 1])
    out, _ = te.Fp8Padding(3, 8)(x, splits)
    dout = torch.randn_like(out)
    splits[:] = [8, 8, 0]
    out.backward(dout)
    assert torch.equal(x.grad, dout[[*range(3), *range(8, 13), *range(16, 24)]])
    sizes = torch.tensor([3, 5, 8])
    out = te.moe_sort_chunks_by_index(x, sizes, order)
    sizes.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_alignment_follows_the_recipe_of_the_first_forward():
    padding = te.Fp8Padding(1)
    with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
        out, padded = padding(torch.randn(3, 4), [3])
    assert padded == [16]
    assert out.shape == (16, 4)
    assert padding.align_size == 16


@pytest.mark.parametrize("align", [2**31, 2**62, 3 * 2**61, 2**63 - 1, 2**63])
def test_alignments_without_end_are_refused(align):
    # With an alignment of 2**62, the padded rows add up to 2**64, which wraps to 0.
    x, splits = torch.randn(16, 4), [4, 4, 4, 4]
    with pytest.raises(ShapeError, match=r"below 2\*\*31"):
        te.Fp8Padding(4, align)(x, splits)
    with pytest.raises(ShapeError, match="at most the 16 rows"):
        te.Fp8Unpadding(4, align)(x, splits)


def test_padding_errors():
    for error in (ShapeError, AssertionError):  # TE asserts
        with pytest.raises(error, match="one per GEMM"):
            te.Fp8Padding(2, 16)(torch.randn(3, 4), [3])
    with pytest.raises(ShapeError, match="align_size must be a positive integer"):
        te.Fp8Unpadding(2, 0)
    with pytest.raises(DtypeError, match="torch.float32"):
        te.Fp8Padding(1, 16)(torch.randn(3, 4).double(), [3])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sort_chunks(dtype):
    splits, order = [3, 0, 4, 2], [2, 0, 3, 1]
    x, probs = torch.randn(11, 5).requires_grad_(), torch.rand(11).requires_grad_()
    sizes, index = torch.tensor(splits, dtype=dtype), torch.tensor(order, dtype=dtype)
    chunks = list(torch.arange(9).split(splits))
    rows = torch.cat([chunks[i] for i in order] + [torch.tensor([9, 10])])
    out, moved = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, index)
    assert torch.equal(out, x[rows])
    assert torch.equal(moved, probs[rows])
    assert torch.equal(te.moe_sort_chunks_by_index(x, sizes, index), x[rows])
    dout, dmoved = torch.randn_like(out), torch.randn_like(moved)
    torch.autograd.backward([out, moved], [dout, dmoved])
    expected, expected_probs = torch.empty_like(x), torch.empty_like(probs)
    expected[rows], expected_probs[rows] = dout, dmoved
    assert torch.equal(x.grad, expected)
    assert torch.equal(probs.grad, expected_probs)


def test_sort_chunks_moves_fp64_probabilities():
    probs = torch.rand(7, dtype=torch.float64)
    # Both tensors are strided.
    sizes, index = torch.tensor([[3, 0], [4, 0]]).t()[0], torch.tensor([1, 9, 0])[::2]
    _, moved = te.moe_sort_chunks_by_index_with_probs(torch.randn(7, 2), probs, sizes, index)
    assert torch.equal(moved, probs[[3, 4, 5, 6, 0, 1, 2]])


def test_sort_chunks_edges():
    empty = torch.empty(0, 4)
    assert te.moe_sort_chunks_by_index(empty, torch.tensor([0]), torch.tensor([0])) is empty
    with pytest.raises(ShapeError, match="one per chunk"):
        te.moe_sort_chunks_by_index(torch.randn(2, 4), torch.tensor([1, 1]), torch.tensor([0]))
    with pytest.raises(ShapeError, match="at most 4096"):
        te.moe_sort_chunks_by_index(
            torch.randn(2, 4), torch.ones(5000, dtype=torch.int64), torch.arange(5000)
        )


@pytest.mark.parametrize("wants_grad", [False, True])
def test_tensors_of_other_ranks_are_named(wants_grad):
    """Where a gradient is wanted, the autograd node checks the shapes first."""
    for shape in ((), (4,), (2, 2, 4)):
        x = torch.ones(shape, requires_grad=wants_grad)
        with pytest.raises(ShapeError, match="inp must be of two dimensions"):
            te.moe_sort_chunks_by_index_with_probs(
                x, torch.ones(4), torch.tensor([4]), torch.tensor([0])
            )
    for module, splits in ((te.Fp8Padding(1, 4), [1]), (te.Fp8Unpadding(1, 4), [1])):
        name = type(module).__name__
        with pytest.raises(ShapeError, match=f"^{name}: inp must be .*without dimensions"):
            module(torch.ones((), requires_grad=wants_grad), splits)
        for form in (splits, torch.tensor(splits)):
            with pytest.raises(ShapeError, match=f"^{name}: num_out_tokens must not be negative"):
                module(torch.ones(4, 4, requires_grad=wants_grad), form, num_out_tokens=-1)
    row, _ = te.Fp8Padding(1, 4)(torch.ones(3, requires_grad=wants_grad), [1])
    assert torch.equal(row, torch.tensor([[1.0], [0.0], [0.0], [0.0]]).expand(4, 3))
    with pytest.raises(ShapeError, match="routing_map must be of two dimensions"):
        te.moe_permute(torch.ones(0, 4), torch.ones(4, dtype=torch.bool))


@settings(max_examples=50, deadline=None)
@given(
    splits=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    align=st.integers(1, 40),
    tail=st.integers(0, 5),
    seed=st.integers(0, 100),
)
def test_any_splits(splits, align, tail, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(splits), 3, generator=generator)
    out, _ = te.Fp8Padding(len(splits), align)(x, splits)
    assert torch.equal(out, padded_reference(x, splits, align))
    assert torch.equal(te.Fp8Unpadding(len(splits), align)(out, splits), x)
    longer = torch.cat([x, torch.randn(tail, 3, generator=generator)])
    order = torch.randperm(len(splits), generator=generator)
    rows = list(torch.arange(sum(splits)).split(splits))
    expected = torch.cat(
        [rows[i] for i in order.tolist()] + [torch.arange(sum(splits), len(longer))]
    )
    assert torch.equal(
        te.moe_sort_chunks_by_index(longer, torch.tensor(splits), order), longer[expected]
    )


@pytest.mark.parametrize("number", ["a", 0, -1, 2.0])
def test_number_of_gemms_is_a_positive_integer(number):
    for cls in (te.Fp8Padding, te.Fp8Unpadding):
        with pytest.raises(ShapeError, match=f"^{cls.__name__}: num_gemms must be"):
            cls(number, 16)
