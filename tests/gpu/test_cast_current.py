"""Current scaling by one launch on the GPU: independent bytes, no writes beside the tensors, no state left behind."""

import pytest
import torch
from guarded import POISON, Guarded

from many_tensors import check, quantizers, values_of
from te_fast import dispatch

pytestmark = pytest.mark.gpu
# Less than a tile, tiles that end early, a block for each tile, and blocks that keep several.
SHAPES = [(1, 1), (7, 33), (129, 136), (300, 520), (512, 2048), (2048, 2048), (2048, 6144)]
#: More tiles than blocks keep.
LARGE = (2040, 11272)
#: Larger tensors take a launch for the scale and a launch for the cast.
APART = (8192, 4352)


def guarded(shape, dtype, fmt="e4m3", usage=(True, True)):
    """Quantise ones; then fill the bytes, which lie between canaries, with poison."""
    (quantizer,) = quantizers("current", 1, fmt, "cuda", usage)
    tensor = quantizer(torch.ones(shape, dtype=dtype, device="cuda"))
    guards, value = [], tensor._value
    for name in ("row", "col"):
        if getattr(value, name) is not None:
            guards.append(Guarded(getattr(value, name).shape, torch.uint8))
            setattr(value, name, guards[-1].tensor)
    value.row_scale.view(torch.uint8).fill_(POISON)
    return tensor, guards


def quantize(tensor, x):
    with dispatch.record() as launches:
        tensor._quantizer.update_quantized(x, tensor)
    return [launch.name for launch in launches]


def check_bytes_and_scale(dtype, fmt, shape, count=1):
    tensor, guards = guarded(shape, dtype, fmt)
    for seed in range(3):  # counters are zero again after each launch
        (_, x, _) = values_of([(1, 1), shape, (1, 1)], dtype, "cuda", seed=seed)
        names = quantize(tensor, x)
        assert len(names) == count, names
        check(tensor, x, "current", fmt)
    for guard in guards:
        guard.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_and_scale(dtype, fmt, shape):
    check_bytes_and_scale(dtype, fmt, shape)


@pytest.mark.parametrize(("shape", "count"), [(LARGE, 1), (APART, 2)], ids=["large", "apart"])
def test_large_tensors(shape, count):
    check_bytes_and_scale(torch.bfloat16, "e4m3", shape, count)


@pytest.mark.parametrize("usage", [(True, False), (False, True)], ids=["row", "column"])
@pytest.mark.parametrize("offset", [0, 1])
def test_one_layout_and_any_alignment(offset, usage):
    shape = (260, 392)
    tensor, guards = guarded(shape, torch.bfloat16, usage=usage)
    (_, x, _) = values_of([(1, 1), shape, (1, 1)], torch.bfloat16, "cuda")
    whole = torch.empty(x.numel() + offset, dtype=x.dtype, device="cuda")
    assert len(quantize(tensor, whole[offset:].view(shape).copy_(x))) == 1
    check(tensor, x, "current", "e4m3")
    for guard in guards:
        guard.check()


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf"), 3e-39])
def test_values_without_a_usual_maximum(fill):
    tensor, _ = guarded((160, 144), torch.bfloat16)
    x = torch.full((160, 144), fill, dtype=torch.bfloat16, device="cuda")
    quantize(tensor, x)
    check(tensor, x, "current", "e4m3")


def test_beside_other_work():
    """Another stream's blocks come and go: those of a launch start at any time, and in any number."""
    shape, other = (2048, 2048), torch.cuda.Stream()
    tensor, guards = guarded(shape, torch.bfloat16)
    values = [values_of([shape, (1, 1)], torch.bfloat16, "cuda", seed=seed)[0] for seed in range(4)]
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    found = []
    with torch.cuda.stream(other):
        for _ in range(120):
            a @ a
    for number in range(200):
        tensor._quantizer.update_quantized(values[number % 4], tensor)
        if number >= 196:
            found.append((tensor._value.row.clone(), tensor._value.row_scale.clone()))
    for (data, scale), x in zip(found, values, strict=True):
        tensor._value.row.copy_(data)
        tensor._value.row_scale.copy_(scale)
        tensor._value.col.copy_(data.view(shape).t())
        check(tensor, x, "current", "e4m3")
    for guard in guards:
        guard.check()


def test_a_graph_of_it():
    shape = (640, 1032)
    tensor, guards = guarded(shape, torch.bfloat16)
    x = values_of([shape, (1, 1)], torch.bfloat16, "cuda")[0]
    quantize(tensor, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor._quantizer.update_quantized(x, tensor)
    for seed in range(1, 5):
        x.copy_(values_of([shape, (1, 1)], torch.bfloat16, "cuda", seed=seed)[0])
        graph.replay()
        check(tensor, x, "current", "e4m3")
    for guard in guards:
        guard.check()
