"""Many tensors that are quantised by one launch, against independent torch code, bit for bit."""

import pytest
import torch

import te_fast.pytorch as te
from many_tensors import (
    KINDS,
    LAUNCHES,
    SHAPES,
    check,
    names_of,
    quantizers,
    values_of,
    written,
)
from quantized_tensors import parts, quantizer
from selection import sampled
from te_fast import dispatch
from te_fast.pytorch.tensor.utils import quantize_master_weights
from te_fast.tensor.quantizer import update_many

USAGES = [(True, True), (True, False)]


def tensors_of(kind, shapes, dtype, fmt="e4m3", usage=(True, True)):
    made = quantizers(kind, len(shapes), fmt, "cpu", usage)
    tensors = [one(torch.ones(shape, dtype=dtype)) for one, shape in zip(made, shapes, strict=True)]
    for tensor in tensors:
        if kind == "delayed":
            tensor._quantizer.amax.zero_()
    return tensors


@pytest.mark.parametrize(
    ("kind", "dtype", "fmt", "usage"),
    sampled(KINDS, [torch.bfloat16, torch.float16, torch.float32], ["e4m3", "e5m2"], USAGES),
)
def test_bytes_scales_and_maxima(kind, dtype, fmt, usage):
    tensors, values = tensors_of(kind, SHAPES, dtype, fmt, usage), values_of(SHAPES, dtype, "cpu")
    pointers = [[part.data_ptr() for part in parts(t) if part is not None] for t in tensors]
    assert written(tensors, values) == LAUNCHES[kind]
    for tensor, x, before in zip(tensors, values, pointers, strict=True):
        check(tensor, x, kind, fmt)
        assert [part.data_ptr() for part in parts(tensor) if part is not None] == before


def test_columns_alone():
    tensors = tensors_of("2d", SHAPES, torch.bfloat16)
    for tensor in tensors:
        tensor._quantizer.set_usage(rowwise=False)
    values = values_of(SHAPES, torch.bfloat16, "cpu")
    written(tensors, values)
    for tensor, x in zip(tensors, values, strict=True):
        assert tensor._value.row is None
        check(tensor, x, "2d", "e4m3")


def test_what_differs_has_a_launch_of_its_own():
    shapes = [(16, 32)] * 2
    groups = [tensors_of(kind, shapes, torch.bfloat16) for kind in (*KINDS, "1d")]
    tensors = [tensor for group in groups for tensor in group]
    empty = tensors_of("current", [(0, 32)], torch.bfloat16)
    values = values_of([tensor.shape for tensor in tensors], torch.bfloat16, "cpu")
    names = written([*tensors, *empty], [*values, torch.ones(0, 32, dtype=torch.bfloat16)])
    assert sorted(name for name in names if name.endswith("_many")) == sorted(
        name for kind in KINDS for name in LAUNCHES[kind]
    )
    for kind, group in zip((*KINDS, "1d"), groups, strict=True):
        for tensor in group:
            index = next(i for i, other in enumerate(tensors) if other is tensor)
            check(tensor, values[index], kind, "e4m3")


def test_more_tensors_than_a_launch_takes():
    shapes = [(16, 16)] * 545
    tensors = tensors_of("current", shapes, torch.bfloat16)
    values = values_of(shapes, torch.bfloat16, "cpu")
    assert written(tensors, values) == LAUNCHES["current"] * 2
    for tensor, x in zip(tensors, values, strict=True):
        check(tensor, x, "current", "e4m3")


def test_the_last_value_of_a_tensor_that_is_written_twice_stays():
    (tensor,) = tensors_of("current", [(16, 32)], torch.bfloat16)
    values = values_of([(16, 32)] * 3, torch.bfloat16, "cpu")[:2]
    written([tensor, tensor], values)
    check(tensor, values[1], "current", "e4m3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_an_optimizer_quantises_all_weights_at_once(kind, options):
    shapes = [(32, 48), (16, 16), (130, 272)]
    start = values_of([*shapes, (1, 1)], torch.float32, "cpu")[:3]
    start = [x.clamp(-8, 8).nan_to_num() for x in start]
    weights = [torch.nn.Parameter(quantizer(kind)(x)) for x in start]
    plain = [torch.nn.Parameter(weight.detach().dequantize()) for weight in weights]
    for one, other in zip(weights, plain, strict=True):
        one.grad = torch.randn_like(other)
        other.grad = one.grad.clone()
    versions = [weight._version for weight in weights]
    torch.optim.SGD(plain, lr=0.1, **options).step()
    with dispatch.record() as launches:
        torch.optim.SGD(weights, lr=0.1, **options).step()
    assert sum("cast" in launch.name for launch in launches) == 1
    for weight, wanted, version in zip(weights, plain, versions, strict=True):
        assert weight._version > version
        weight._quantizer.amax = torch.zeros(1) if kind == "delayed" else None
        expected = weight._quantizer(wanted.detach())
        assert all(map(torch.equal, parts(weight), parts(expected)))


@pytest.mark.parametrize("count", [1, len(SHAPES)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_are_rounded_by_their_cast(kind, dtype, count):
    """The cast rounds to the weights' nominal type, which overflows; no other launch touches the weights."""
    weights = tensors_of(kind, SHAPES[:count], dtype)
    masters = values_of(SHAPES, torch.float32, "cpu", seed=3)[:count]
    masters[0].view(-1)[:3] = torch.tensor([3.4e38, -65520.0, 1.00390625])
    with dispatch.record() as launches:
        quantize_master_weights(weights, [m.view(-1) for m in masters], [0] * count, None)
    if dtype != torch.float32:
        assert all("_many_rounded" in launch.name for launch in launches)
    if dtype != torch.float32 or count > 1:
        assert names_of(launches) == LAUNCHES[kind]
    for weight, master in zip(weights, masters, strict=True):
        check(weight, master.to(dtype), kind, "e4m3")


@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_of_e5m2_are_rounded_by_a_copy(kind):
    weights = tensors_of(kind, SHAPES, torch.bfloat16, "e5m2")
    masters = values_of(SHAPES, torch.float32, "cpu", seed=4)
    quantize_master_weights(weights, [m.view(-1) for m in masters], [0] * len(masters), None)
    for weight, master in zip(weights, masters, strict=True):
        check(weight, master.bfloat16(), kind, "e5m2")


def test_a_tensor_that_does_not_fit_leaves_all_as_they_are():
    tensors = tensors_of("current", [(16, 32), (16, 16)], torch.bfloat16)
    before = [part.clone() for tensor in tensors for part in parts(tensor)]
    with pytest.raises(ValueError, match="shape"):
        update_many(tensors, [torch.full((16, 32), 3.0), torch.ones(16, 17)])
    after = [part for tensor in tensors for part in parts(tensor)]
    assert all(map(torch.equal, before, after))
    assert isinstance(tensors[0], te.Float8Tensor)
