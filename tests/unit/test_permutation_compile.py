"""MoE permutation under torch.compile(fullgraph=True), and its operators under torch.library.opcheck."""

from __future__ import annotations

import pytest
import torch

import te_fast.pytorch as te
from permutation_reference import make_case, permute_reference
from selection import quickly
from te_fast.moe import operators

ROWS = 96
# torch.library.opcheck of torch 2.15 itself reads the gradient of a tensor that is no leaf.
pytestmark = [
    pytest.mark.every_torch,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def grads_of(function, *tensors):
    """Results and gradients of a function of tensors that need one."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    outs = [
        value for value in (out if isinstance(out, tuple) else (out,)) if value.is_floating_point()
    ]
    generator = torch.Generator().manual_seed(5)
    torch.autograd.backward(outs, [torch.rand(value.shape, generator=generator) for value in outs])
    return [*outs, *(leaf.grad for leaf in leaves)]


def check(function, *tensors):
    for got, expected in zip(
        grads_of(compiled(function), *tensors), grads_of(function, *tensors), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.fixture
def case():
    return make_case(24, 4, 2, 8, zeros=True)


def test_permute_and_unpermute(case):
    def layer(x, probs):
        out, permuted, row_id_map = te.moe_permute_with_probs(x, probs, case.mask, ROWS)
        return te.moe_unpermute(out * permuted[:, None], row_id_map, probs, x.shape), permuted

    check(layer, case.x, case.probs)


def test_permute_and_pad(case):
    def layer(x, probs):
        out, permuted, row_id_map, offsets, _ = te.moe_permute_and_pad_with_probs(
            x, probs, case.mask, None, 16, num_out_tokens=ROWS
        )
        return te.moe_unpermute(out, row_id_map, None, x.shape, pad_offsets=offsets), permuted

    check(layer, case.x, case.probs)


def test_permute_and_pad_with_counts_on_the_cpu(case):
    counts = case.mask.sum(0).tolist()

    def layer(x, probs):
        return te.moe_permute_and_pad_with_probs(x, probs, case.mask, counts, 16)[:2]

    check(layer, case.x, case.probs)


def test_permute_and_pad_with_a_tensor_of_counts(case):
    counts = case.mask.sum(0)

    def layer(x, probs):
        return te.moe_permute_and_pad_with_probs(x, probs, case.mask, counts, 16)[:2]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(layer, case.x, case.probs)


def test_permute_by_index():
    indices = torch.randint(0, 4, (24, 2), dtype=torch.int32)

    def layer(x, probs):
        out, row_id_map = te.moe_permute(x, indices, 30, map_type="index")
        return te.moe_unpermute(out, row_id_map, probs, map_type="index")

    check(layer, torch.randn(24, 8), torch.rand(24, 2))


def test_mask_without_probs(case):
    def layer(x):
        out, row_id_map = te.moe_permute(x, case.mask, ROWS)
        return te.moe_unpermute(out, row_id_map, restore_shape=x.shape)

    check(layer, case.x)


def test_rows_counted_in_the_graph(case):
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        out, _, _ = compiled(te.moe_permute_with_probs)(case.x, case.probs, case.mask)
    assert torch.equal(out, permute_reference(case, 1, None)[0])


def test_sort_and_pad():
    splits, order = torch.tensor([3, 5, 8]), torch.tensor([2, 0, 1])
    padding, unpadding = te.Fp8Padding(3, 8), te.Fp8Unpadding(3, 8)

    def sort(x, probs):
        return te.moe_sort_chunks_by_index_with_probs(x, probs, splits, order)

    def pad(x):
        out, _ = padding(x, [3, 5, 8])
        return unpadding(out * 2, [3, 5, 8])

    check(sort, torch.randn(16, 4), torch.rand(16))
    check(pad, torch.randn(16, 4))


def test_alignment_by_recipe():
    def pad(x):
        return te.Fp8Padding(3)(x, [3, 5, 8])[0]

    check(pad, torch.randn(16, 4))


def test_quantize():
    case = make_case(24, 4, 2, 32)
    case.x.requires_grad_()
    case.probs.requires_grad_()
    eager = te.moe_permute_and_quantize(case.x, case.probs, case.mask, ROWS, align_size=16)
    traced = compiled(te.moe_permute_and_quantize)(
        case.x, case.probs, case.mask, ROWS, align_size=16
    )
    for got, expected in zip(traced[:3], eager[:3], strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_eager_calls_do_not_pass_through_operators(case, monkeypatch):
    def fail(*_):
        pytest.fail("an eager call went through torch.library")

    for name in ("permute", "unpermute", "move", "permute_cast"):
        monkeypatch.setattr(operators, name, fail)
    out, _, row_id_map = te.moe_permute_with_probs(case.x, case.probs, case.mask, ROWS)
    te.moe_unpermute(out, row_id_map, restore_shape=case.x.shape)


@pytest.mark.parametrize("align", quickly([0, 16], 16))
def test_opcheck(align):
    # Every token goes to every expert: Transformer Engine defines all entries of such a map, and opcheck compares all.
    case = make_case(24, 4, 4, 8, kind="all")
    x, probs = case.x.requires_grad_(), case.probs.requires_grad_()
    torch.library.opcheck(operators._permute, (x, probs, case.mask, ROWS, align, False))
    torch.library.opcheck(operators._permute, (x, None, case.mask, ROWS, align, False))
    with torch.no_grad():
        out, permuted, row_id_map, pads, _ = operators._permute(
            x, probs, case.mask, ROWS, align, False
        )
    pads = pads if align else None
    out.requires_grad_()
    torch.library.opcheck(operators._unpermute, (out, row_id_map, probs, pads, None, 24, 0))
    torch.library.opcheck(operators._unpermute, (out, row_id_map, None, pads, None, 24, 0))
    detached = [value.detach() for value in (x, out, probs)]
    torch.library.opcheck(
        operators._unpermute, (detached[1], row_id_map, None, pads, permuted, 24, 0)
    )
    torch.library.opcheck(
        operators._unpermute_bwd, (detached[0], detached[1], row_id_map, detached[2], pads, 0)
    )
    torch.library.opcheck(operators._apply, (detached[0], row_id_map, pads, ROWS, 0))


def test_opcheck_of_moves_and_casts():
    x, probs = torch.randn(16, 4, requires_grad=True), torch.rand(16, requires_grad=True)
    splits, order = torch.tensor([3, 5, 8]), torch.tensor([2, 0, 1])
    torch.library.opcheck(operators._move, (x, probs, splits, [], order, 2, 1, 16))
    torch.library.opcheck(operators._move, (x, None, None, [3, 5, 8], None, 0, 8, 24))
    case = make_case(24, 4, 4, 32, kind="all")
    rest = (ROWS, 16, False)
    torch.library.opcheck(
        operators._permute_cast, (case.x, case.probs, case.mask, *rest, None, None, 0.0, True)
    )
    torch.library.opcheck(
        operators._permute_cast,
        (case.x, None, case.mask, *rest, torch.ones(1), torch.zeros(1), 0.0, True),
    )
