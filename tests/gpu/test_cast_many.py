"""Many tensors in one launch on the GPU: the bytes of independent torch code, and no writes beside the tensors."""

import contextlib
import copy

import pytest
import torch
from guarded import POISON, Guarded

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
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.pytorch.tensor.utils import quantize_master_weights
from te_fast.tensor.quantizer import update_many

pytestmark = pytest.mark.gpu
LARGE = [(1000, 1024), (4096, 520), (7, 8192), (129, 8), (2048, 2048)]
#: More tiles than the blocks of a launch keep, of several tensors.
MORE_THAN_KEPT = [(2048, 4096), (7, 33), (2048, 4096), (1000, 8192), (2048, 4096)]


def guarded_tensors(kind, shapes, fmt, dtype):
    """Quantised tensors whose bytes lie between canaries, full of poison."""
    tensors, guards = [], []
    for one, shape in zip(
        quantizers(kind, len(shapes), fmt, "cuda", (True, True)), shapes, strict=True
    ):
        tensor = one(torch.ones(shape, dtype=dtype, device="cuda"))
        if kind == "delayed":
            one.amax.zero_()
            tensor._quantizer.amax.zero_()
        value = tensor._value
        for name in ("row", "col"):
            guard = Guarded(getattr(value, name).shape, torch.uint8)
            setattr(value, name, guard.tensor)
            guards.append(guard)
        value.row_scale.view(torch.uint8).fill_(POISON)
        if kind == "2d":
            value.col_scale.view(torch.uint8).fill_(POISON)
        value.col_is_valid = True
        tensors.append(tensor)
    return tensors, guards


@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_scales_and_maxima(kind, dtype, fmt, shapes):
    tensors, guards = guarded_tensors(kind, shapes, fmt, dtype)
    for seed in range(2):  # counters are zero again after each launch
        for tensor in tensors:
            if kind == "delayed":
                tensor._quantizer.amax.zero_()
        values = values_of(shapes, dtype, "cuda", seed=seed)
        assert written(tensors, values) == LAUNCHES[kind]
        for tensor, x in zip(tensors, values, strict=True):
            check(tensor, x, kind, fmt)
    for guard in guards:
        guard.check()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_tensors_of_which_blocks_keep_a_part(fmt):
    tensors, guards = guarded_tensors("current", MORE_THAN_KEPT, fmt, torch.bfloat16)
    for seed in range(2):
        values = values_of(MORE_THAN_KEPT, torch.bfloat16, "cuda", seed=seed)
        assert written(tensors, values) == LAUNCHES["current"]
        for tensor, x in zip(tensors, values, strict=True):
            check(tensor, x, "current", fmt)
    for guard in guards:
        guard.check()


@pytest.mark.parametrize("shapes", [SHAPES, LARGE, SHAPES[:1]], ids=["small", "large", "one"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_are_rounded_by_their_cast(kind, dtype, offset, shapes):
    weights, guards = guarded_tensors(kind, shapes, "e4m3", dtype)
    masters = []
    for x in values_of(shapes, torch.float32, "cuda", seed=7):
        whole = torch.empty(x.numel() + offset, device="cuda")
        masters.append(whole[offset:].copy_(x.view(-1)))
    masters[0][:3] = torch.tensor([3.4e38, -65520.0, 1.00390625])
    with dispatch.record() as launches:
        quantize_master_weights(weights, masters, [0] * len(shapes), None)
    assert all("_many_rounded" in launch.name for launch in launches)
    assert names_of(launches) == LAUNCHES[kind]
    for weight, master, shape in zip(weights, masters, shapes, strict=True):
        check(weight, master.view(shape).to(dtype), kind, "e4m3")
    for guard in guards:
        guard.check()


@pytest.mark.parametrize("kind", KINDS)
def test_sources_off_alignment(kind):
    shapes = [(130, 272), (64, 64), (1, 8)]
    tensors, guards = guarded_tensors(kind, shapes, "e4m3", torch.bfloat16)
    values = []
    for x in values_of(shapes, torch.bfloat16, "cuda", seed=5):
        whole = torch.empty(x.numel() + 3, dtype=x.dtype, device="cuda")
        values.append(whole[3:].view(x.shape).copy_(x))
    update_many(tensors, values)
    for tensor, x in zip(tensors, values, strict=True):
        check(tensor, x, kind, "e4m3")
    for guard in guards:
        guard.check()


def test_as_many_as_a_launch_takes_and_more():
    shapes = [(16 * (1 + i % 3), 16 * (1 + i % 9)) for i in range(545)]
    tensors, guards = guarded_tensors("current", shapes, "e4m3", torch.bfloat16)
    values = values_of(shapes, torch.bfloat16, "cuda", seed=1)
    assert written(tensors, values) == LAUNCHES["current"] * 2
    for tensor, x in zip(tensors, values, strict=True):
        check(tensor, x, "current", "e4m3")
    for guard in guards:
        guard.check()


def model():
    torch.manual_seed(0)
    layers = [te.LayerNormMLP(256, 640, params_dtype=torch.bfloat16) for _ in range(4)]
    return torch.nn.Sequential(te.Linear(256, 256, params_dtype=torch.bfloat16), *layers)


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_training_has_the_bits_of_weights_one_by_one(kind):
    """Graphs are replayed between steps; each step is compared with other layers, whose weights are cast one by one."""
    layers, recipe = model(), kind()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3, fused=True)
    for step in range(8):
        x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
        twin = model()
        twin.load_state_dict(layers.state_dict())
        results = []
        for module in (layers, twin):
            before = dispatch.counters()["weight_casts"]
            # Nothing is replayed while launches are recorded.
            noted = dispatch.record() if step in (2, 6) else contextlib.nullcontext([])
            with noted as launches, te.autocast(recipe=recipe):
                y = module(x)
            assert dispatch.counters()["weight_casts"] - before == 9
            y.float().square().mean().backward()
            results.append((y, [parameter.grad for parameter in module.parameters()]))
            many = [launch.name for launch in launches if "_many_" in launch.name]
            assert bool(many) == (module is layers and step in (2, 6)), (step, many)
        (y, grads), (other, others) = results
        assert torch.equal(y, other)
        assert all(map(torch.equal, grads, others))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_a_weight_without_rows_among_others(kind):
    """Its blocks leave the counters as the next launch wants them: a wrong one would wait for ever."""
    sizes, recipe = (128, 0, 256), kind()
    layers = torch.nn.ModuleList(
        te.Linear(512, size, params_dtype=torch.bfloat16) for size in sizes
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-2)
    for _ in range(4):
        x = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda")
        results = []
        for each in (layers, copy.deepcopy(layers)):  # weights of the copy are cast one by one
            with te.autocast(recipe=recipe):
                results.append([layer(x) for layer in each])
        assert all(map(torch.equal, *results))
        torch.cat(results[0], 1).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_layers_on_streams_of_their_own():
    layers = model()
    streams = [torch.cuda.Stream() for _ in layers]
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    for _ in range(4):
        x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
        twin = model()
        twin.load_state_dict(layers.state_dict())
        with te.autocast(recipe=Float8CurrentScaling()):
            expected = twin(x)
            y = x
            for layer, stream in zip(layers, streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    y = layer(y)
                torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(y, expected)
        y.float().square().mean().backward()
        torch.cuda.synchronize()
        optimizer.step()
        optimizer.zero_grad()
