"""Splits along a dimension and the way back, beside torch.split, torch.cat and torch.stack."""

import pytest
import torch

import te_fast.pytorch as te
from graphs import needs_compile
from te_fast.errors import ArgumentError, ShapeError
from te_fast.pytorch.utils import SplitAlongDim, combine_tensors, split_tensor_along_dim


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def like(whole, part):
    return te.Float8Tensor.make_like(whole, data=part, data_transpose=None, shape=part.shape)


def fp8(tensor):
    return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")(tensor)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("contiguous", [False, True])
def test_equal_parts(dim, contiguous):
    x = random(6, 12, 3)
    parts = split_tensor_along_dim(x, dim, 3, contiguous)
    assert isinstance(parts, tuple)
    for part, expected in zip(parts, x.tensor_split(3, dim), strict=True):
        assert torch.equal(part, expected)
        assert part.is_contiguous() or not contiguous
    with pytest.raises(ArgumentError, match="is not divisible by 5"):
        split_tensor_along_dim(x, dim, 5)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_views_are_combined_without_a_copy(dim):
    whole = random(4, 3, 5, 2)
    parts = list(whole.unbind(dim))
    made = combine_tensors(parts, dim)
    assert torch.equal(made, whole)
    assert made.data_ptr() == whole.data_ptr()
    assert made.stride() == whole.stride()


@pytest.mark.parametrize("case", ["apart", "reversed", "uneven", "one", "empty", "types"])
def test_what_does_not_lie_together_is_stacked(case):
    whole = random(4, 3, 5)
    parts = {
        "apart": [part.clone() for part in whole.unbind(1)],
        "reversed": list(whole.unbind(1))[::-1],
        "uneven": [whole[:, 0], whole[:, 2], whole[:, 1]],
        "one": [whole[0]],
        "empty": [whole[:0, 0], whole[:0, 1]],
        "types": [whole[:, 0], whole.view(torch.int32)[:, 1]],
    }[case]
    expected = torch.stack([part.clone() for part in parts], 1)
    made = combine_tensors(parts, 1)
    assert torch.equal(made, expected)
    assert not made.requires_grad


def test_combined_shapes_must_be_equal():
    for wrong in ([], [torch.ones(2), torch.ones(3)]):
        with pytest.raises(ShapeError, match="tensors of equal shape"):
            combine_tensors(wrong, 0)


def test_fp8_tensors_are_combined_as_bytes():
    whole = fp8(random(16, 3, 32))
    parts = [like(whole, part) for part in whole._data.unbind(1)]
    made = combine_tensors(parts, 1)
    assert isinstance(made, te.Float8Tensor)
    assert made._data.data_ptr() == whole._data.data_ptr()
    assert torch.equal(made.dequantize(), whole.dequantize())
    other = fp8(2 * random(16, 32))
    expected = torch.stack([parts[0].dequantize(), other.dequantize()])
    assert torch.equal(combine_tensors([parts[0], other], 0), expected)


SECTIONS = [(1, [2, 1, 3]), (-1, [4, 4]), (0, 2), (2, 3), (0, [0, 4])]


@pytest.mark.parametrize(("dim", "sections"), SECTIONS)
@pytest.mark.parametrize("strided", [False, True])
def test_a_split_and_its_gradient_are_torchs(dim, sections, strided):
    x = random(4, 6, 8)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if strided else x
    mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    parts = SplitAlongDim.apply(mine, dim, sections)
    expected = torch.split(reference, sections, dim)
    grads = [random(*part.shape, seed=at) for at, part in enumerate(parts)]
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    torch.autograd.backward(parts, grads)
    torch.autograd.backward(expected, grads)
    assert torch.equal(mine.grad, reference.grad)


@pytest.mark.parametrize("lonely", [True, False])
def test_a_part_without_a_gradient_counts_as_zeros(lonely):
    x = random(4, 6).requires_grad_()
    first, second = SplitAlongDim.apply(x, 1, [2, 4])
    (second if lonely else first).sum().backward()
    expected = torch.zeros(4, 6)
    (expected[:, 2:] if lonely else expected[:, :2]).fill_(1.0)
    assert torch.equal(x.grad, expected)


def test_parts_of_size_one_lose_the_dimension():
    x = random(4, 3, 5).requires_grad_()
    parts = SplitAlongDim.apply(x, 1, [1, 2], True)
    assert [part.shape for part in parts] == [(4, 5), (4, 2, 5)]
    grads = [random(*part.shape, seed=7) for part in parts]
    torch.autograd.backward(parts, grads)
    assert torch.equal(x.grad, torch.cat([grads[0][:, None], grads[1]], 1))


class Kept(torch.autograd.Function):
    """The identity, which notes what memory its gradient has."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.found.append(grad)
        return grad, None


@pytest.mark.parametrize(("dim", "sections"), [(1, [2, 1, 3]), (0, [1, 3]), (2, [4, 4])])
@pytest.mark.parametrize("behind", [0, 5])
def test_gradients_in_one_buffer_are_not_copied(dim, sections, behind):
    x, found = random(4, 6, 8).requires_grad_(), []
    buffer = random(4 * 6 * 8 + behind)[behind:].view(4, 6, 8)
    parts = SplitAlongDim.apply(Kept.apply(x, found), dim, sections)
    torch.autograd.backward(parts, list(torch.split(buffer, sections, dim)))
    assert torch.equal(x.grad, buffer)
    assert found[0].data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("order", [[1, 0], [0, 0]])
def test_gradients_in_one_buffer_at_other_places_are_copied(order):
    x, found = random(4, 6).requires_grad_(), []
    halves = random(4, 6, seed=3).chunk(2, 1)
    grads = [halves[at] for at in order]
    torch.autograd.backward(SplitAlongDim.apply(Kept.apply(x, found), 1, 3), grads)
    assert torch.equal(x.grad, torch.cat(grads, 1))


def test_expanded_gradients():
    x = random(4, 6).requires_grad_()
    first, second = SplitAlongDim.apply(x, 1, 3)
    (first.sum() + second.sum()).backward()
    assert torch.equal(x.grad, torch.ones(4, 6))


@pytest.mark.parametrize("squeeze", [False, True])
def test_fp8_parts_stay_fp8(squeeze):
    whole = fp8(random(16, 3, 32))
    expected = torch.split(whole.dequantize(), [1, 2], 1)
    parts = SplitAlongDim.apply(whole, 1, [1, 2], squeeze)
    assert all(isinstance(part, te.Float8Tensor) for part in parts)
    first = expected[0].squeeze(1) if squeeze else expected[0]
    assert torch.equal(parts[0].dequantize(), first)
    assert torch.equal(parts[1].dequantize(), expected[1])
    storage = te.Float8TensorStorage(**whole.get_metadata())
    parts = SplitAlongDim.apply(storage, 1, [1, 2], squeeze)
    assert all(type(part) is te.Float8TensorStorage for part in parts)
    assert torch.equal(parts[0].dequantize(), first)
    assert torch.equal(parts[1].dequantize(), expected[1])


def test_fp8_gradients_are_joined_as_bytes():
    whole = fp8(random(16, 6))
    parts = [like(whole, part) for part in whole._data.split([2, 4], 1)]

    class Context:
        split_dim, squeezed = 1, (False, False)

    made, *others = SplitAlongDim.backward(Context(), *parts)
    assert others == [None] * 3
    assert isinstance(made, te.Float8Tensor)
    assert made._data.data_ptr() == whole._data.data_ptr()
    assert torch.equal(made.dequantize(), whole.dequantize())
    other = fp8(4 * random(16, 4))
    made, *_ = SplitAlongDim.backward(Context(), parts[0], other)
    assert torch.equal(made, torch.cat([parts[0].dequantize(), other.dequantize()], 1))


@needs_compile
def test_a_compiled_split():
    def f(x):
        first, second = SplitAlongDim.apply(x, 1, [2, 4])
        return (first.sum(1) * second.sum(1)).sum()

    x = random(4, 6).requires_grad_()
    torch.compile(f, backend="aot_eager", fullgraph=True)(x).backward()
    expected = torch.cat(
        [
            x[:, 2:].sum(1, keepdim=True).expand(4, 2),
            x[:, :2].sum(1, keepdim=True).expand(4, 4),
        ],
        1,
    )
    assert torch.allclose(x.grad, expected)
