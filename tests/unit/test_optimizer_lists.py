"""Functions over lists of tensors beside loops."""

import math

import pytest
import torch

import te_fast.pytorch as te
from te_fast.errors import MissingError, ShapeError
from te_fast.pytorch.optimizers import (
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)

SHAPES = [(16, 32), (7,), (3, 5, 2), (1,)]


def gradients(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def flag():
    return torch.zeros(1, dtype=torch.int)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_lists(dtype):
    tensors = [*gradients(0, dtype), torch.empty(0, dtype=dtype)]
    each = [tensor.double().norm() for tensor in tensors if tensor.numel()]
    total, norms = multi_tensor_applier(multi_tensor_l2norm, flag(), [tensors], True)
    assert total.shape == (1,)
    assert total.dtype is torch.float32
    assert torch.allclose(norms.double(), torch.stack(each), rtol=1e-5)
    assert torch.allclose(total.double(), torch.stack(each).norm(), rtol=1e-5)
    total, norms = multi_tensor_applier(multi_tensor_l2norm, flag(), [tensors])
    assert norms.shape == (0,)
    half, _ = multi_tensor_applier(
        multi_tensor_unscale_l2norm, flag(), [tensors], torch.tensor([-0.5])
    )
    assert torch.equal(half, total * 0.5)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("by_tensor", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
)
def test_copies_of_lists(source, target, by_tensor, scale):
    tensors = gradients(0, source)
    made = [torch.empty_like(tensor, dtype=target) for tensor in tensors]
    function = multi_tensor_scale_tensor if by_tensor else multi_tensor_scale
    found = flag()
    factor = torch.tensor([scale])
    multi_tensor_applier(function, found, [tensors, made], factor if by_tensor else scale)
    assert int(found) == 0
    for tensor, got in zip(tensors, made, strict=True):
        assert torch.equal(got, (tensor.float() * factor).to(target))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_factors_are_not_rounded_to_the_tensors_type(dtype, in_place, by_tensor):
    function = multi_tensor_scale_tensor if by_tensor else multi_tensor_scale
    sources = [torch.linspace(2.0**-14, 2.0**-10, 64).to(dtype), torch.tensor(3.0, dtype=dtype)]
    for factor in (0.3, 1e5):
        given = [source.clone() for source in sources]
        targets = given if in_place else [torch.empty_like(source) for source in sources]
        number = torch.tensor([factor])
        function(1, flag(), [given, targets], number if by_tensor else factor)
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(target, (source.float() * number).to(dtype).reshape(source.shape))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("function", [multi_tensor_scale, multi_tensor_scale_tensor])
def test_copies_in_place_note_what_is_not_finite(function, value):
    tensors = gradients(1)
    wanted = [tensor * 0.25 for tensor in tensors]
    found = flag()
    factor = torch.tensor([0.25]) if function is multi_tensor_scale_tensor else 0.25
    multi_tensor_applier(function, found, [tensors, tensors], factor)
    assert int(found) == 0
    assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
    tensors[2].view(-1)[3] = value
    multi_tensor_applier(function, found, [tensors, tensors], factor)
    assert int(found) == 1


def test_lists_that_do_not_fit():
    with pytest.raises(ShapeError, match="equally long") as raised:
        multi_tensor_applier(multi_tensor_scale, flag(), [[torch.ones(1)], []], 1.0)
    assert isinstance(raised.value, RuntimeError)  # Transformer Engine's
    for factor in (1.0, 2.0):
        with pytest.raises(ShapeError, match=r"\[\[1, 2\]\] and \[\[2, 2\]\]"):
            multi_tensor_scale(0, flag(), [[torch.ones(1, 2)], [torch.ones(2, 2)]], factor)
        multi_tensor_scale(0, flag(), [[], []], factor)
        target = torch.zeros(2, dtype=torch.int)
        for lists in ([[torch.full((2,), 1.7)], [target]], [[target], [torch.ones(2)]]):
            with pytest.raises(RuntimeError, match=r"must be FP32.*got torch\.int32"):
                multi_tensor_scale(0, flag(), lists, factor)
        assert target.tolist() == [0, 0]
    norm, norms = multi_tensor_l2norm(0, flag(), [[]], True)
    assert norm.tolist() == [0.0]
    assert norms.tolist() == []
    assert multi_tensor_applier(multi_tensor_l2norm, flag(), [[]]) is None
    with pytest.raises(ShapeError, match="multi_tensor_l2norm: expected a list of one list"):
        multi_tensor_l2norm(0, flag(), None)
    with pytest.raises(ShapeError, match="two lists"):
        multi_tensor_scale(1, flag(), [[torch.ones(1)]], 1.0)
    with pytest.raises(MissingError, match="multi_tensor_adam_fp8"):
        te.optimizers.multi_tensor_adam_fp8  # noqa: B018


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_copies_of_lists_with_empty_tensors(scale):
    sources, made = [torch.empty(0), torch.ones(3)], [torch.empty(0), torch.zeros(3)]
    found = flag()
    multi_tensor_scale(0, found, [sources, made], scale)
    multi_tensor_scale(0, found, [sources[:1], made[:1]], scale)
    multi_tensor_scale_tensor(0, found, [sources, made], torch.tensor([scale]))
    assert made[1].tolist() == [scale] * 3
    assert int(found) == 0


def test_arguments_of_lists_are_named():
    lists, one = [[torch.ones(1)]], torch.ones(1)
    with pytest.raises(TypeError, match="multi_tensor_l2norm: noop_flag must be a torch.Tensor"):
        multi_tensor_l2norm(0, None, lists)
    with pytest.raises(TypeError, match="inv_scale must be a torch.Tensor, got float"):
        multi_tensor_unscale_l2norm(0, flag(), lists, 0.5)
    with pytest.raises(TypeError, match="multi_tensor_scale: noop_flag must be a torch.Tensor"):
        multi_tensor_scale(0, None, lists * 2, 0.5)
    with pytest.raises(TypeError, match="multi_tensor_scale: scale must be a number"):
        multi_tensor_scale(0, flag(), lists * 2, "half")
    with pytest.raises(TypeError, match="is_infinite must be a torch.Tensor"):
        multi_tensor_scale_tensor(0, None, lists * 2, one)
    with pytest.raises(TypeError, match="scale must be a torch.Tensor, got float"):
        multi_tensor_scale_tensor(0, flag(), lists * 2, 0.5)
    for dtype in (torch.int32, torch.float64):
        with pytest.raises(ShapeError, match=f"FP32, FP16 or BF16, got {dtype}"):
            multi_tensor_l2norm(0, flag(), [[one.to(dtype)]])
