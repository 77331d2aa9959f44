"""One of several ranks whose collectives travel in chunks: ``python chunks_rank.py RANK WORLD FOLDER SCENE ...``.

Results and gradients equal those of one chunk, on the CPU bit for bit; ``parallel_rank.py`` compares one chunk with
plain torch. Run by ``unit/test_parallel_ranks.py``.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist

import te_fast
import te_fast.dispatch
import te_fast.pytorch as te
from ranks import Scenes, device
from recipes import RECIPES
from te_fast import _config
from te_fast.parallel import chunks
from te_fast.parallel.collectives import Ranks

#: Rows of one rank: 8 pieces of 16 at most, and 4 chunks where 5 are asked for.
ROWS, IN, OUT = 128, 64, 128
scenes = Scenes()
scene = scenes.scene


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(device())


@contextmanager
def in_chunks(count):
    former = te_fast.communication_chunks(count)
    try:
        yield
    finally:
        assert te_fast.communication_chunks(former) == count


def options(dtype):
    return {
        "tp_group": dist.group.WORLD,
        "sequence_parallel": True,
        "params_dtype": dtype,
        "device": device(),
    }


def column(dtype, **given):
    return te.Linear(IN, OUT, parallel_mode="column", **options(dtype), **given)


def row(dtype, **given):
    return te.Linear(
        IN * dist.get_world_size(), OUT, parallel_mode="row", **options(dtype), **given
    )


def norm(dtype, **given):
    return te.LayerNormLinear(IN, OUT, parallel_mode="column", **options(dtype), **given)


def mlp(dtype, **given):
    return te.LayerNormMLP(IN, OUT, set_parallel_mode=True, **options(dtype), **given)


LAYERS = {"column": column, "row": row, "norm": norm, "mlp": mlp}


def seeded(make, dtype, **given):
    layer = make(dtype, **given)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            seed = 1000 * dist.get_rank() + number
            parameter.copy_(random(*parameter.shape, seed=seed) * 0.1)
    return layer


def step(name, layer, recipe, dtype, number=0):
    """One forward and backward; returns all their results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer.zero_grad()
    rows = ROWS * size if name == "row" else ROWS
    rows_of_dy = ROWS if name in ("row", "mlp") else ROWS * size
    x = random(rows, IN, seed=10 * number + rank).to(dtype).requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
        y = layer(x)
    columns = {"mlp": IN, "row": OUT}.get(name, OUT // size)
    assert y.shape == (rows_of_dy, columns)
    y.backward(random(*y.shape, seed=5 + rank).to(dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def same(got, expected, what):
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one is not None, (what, number)
        if one.is_cuda:  # cuBLAS may choose another algorithm for a piece than for the whole
            error = (one.double() - other.double()).norm() / (other.double().norm() + 1e-30)
            assert error < 1e-2, (what, number, float(error))
        else:
            assert torch.equal(one, other), (what, number)


@scene
def every_number_of_chunks():
    for name, recipe, dtype in product(LAYERS, (None, *RECIPES), (torch.float32, torch.bfloat16)):
        if recipe is not None and dtype == torch.float32:
            continue
        whole = seeded(LAYERS[name], dtype)
        # The second step's scales come from the first step's maxima.
        steps = range(2 if recipe == "delayed" else 1)
        expected = [step(name, whole, recipe, dtype, number) for number in steps]
        for count in (2, 5):
            layer = seeded(LAYERS[name], dtype)
            with in_chunks(count):
                for number in steps:
                    got = step(name, layer, recipe, dtype, number)
                    same(got, expected[number], (name, recipe, dtype, count, number))


@scene
def options_of_layers():
    for given in (
        {"bias": False},
        {"return_bias": True},
        {"delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True},
    ):
        for name, recipe in product(("column", "row"), (None, "current")):
            found = []
            for count in (1, 4):
                layer = seeded(LAYERS[name], torch.bfloat16, **given)
                layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
                rows = ROWS * dist.get_world_size() if name == "row" else ROWS
                x = random(rows, IN, seed=dist.get_rank()).bfloat16().requires_grad_()
                with (
                    in_chunks(count),
                    te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()),
                ):
                    y = layer(x)
                    y = y[0] if given.get("return_bias") else y
                    y.square().sum().backward()
                    if given.get("delay_wgrad_compute"):
                        layer.backward_dw()
                dw = layer.weight.grad
                dw = layer.weight.main_grad if given.get("fuse_wgrad_accumulation") else dw
                found.append([y.detach(), x.grad, dw])
            same(found[1], found[0], (given, name, recipe))


def products(*call):
    """Matrix products that a call makes, after a first call that makes the choices."""
    step(*call)
    before = te_fast.dispatch.counters()["gemms"]
    step(*call)
    return te_fast.dispatch.counters()["gemms"] - before


@scene
def products_are_cut():
    """A chunk's product waits for no other chunk: each piece has a product of its own."""
    size = dist.get_world_size()
    for name, recipe in product(("column", "row"), (None, "delayed", "current")):
        layer = seeded(LAYERS[name], torch.bfloat16)
        with in_chunks(1):
            one = products(name, layer, recipe, torch.bfloat16)
        with in_chunks(4):
            cut = products(name, layer, recipe, torch.bfloat16)
        # Of a column-parallel layer forward is cut, of a row-parallel one the gradient of its input, too.
        assert cut - one == (4 * size - 1) * (1 if name == "column" else 2), (
            name,
            recipe,
            one,
            cut,
        )


@scene
def collectives():
    """Rows arrive at and leave from the same places as those of one collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks("layer", dist.group.WORLD)
    for count, dtype in product((2, 3, 8), (torch.float32, torch.bfloat16, torch.uint8)):
        parts = [(random(48, 16, seed=other) * 50).to(dtype) for other in range(size)]
        coming = chunks.Chunks(ranks, count, parts[0].device, arrives=True)
        if 48 % count == 0:
            whole = coming.gather(parts[rank])
            if device().type == "cuda":
                torch.cuda.synchronize()
            assert torch.equal(whole, torch.cat(parts))
    for count in (2, 3, 8):
        sums = [random(48 * size, 16, seed=other).round() for other in range(size)]
        out = torch.empty(48, 16, device=device())
        leaving = chunks.Chunks(ranks, count, out.device, arrives=False)
        for event in leaving._events:
            event.record()
        leaving.scatter(sums[rank], out)
        assert torch.equal(out, sum(sums).chunk(size)[rank])


@scene
def how_many():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert chunks.count_of(4096, 8192, cpu, 4) == 1
    with in_chunks(5):
        assert [chunks.count_of(rows, 8, cpu, 2) for rows in (0, 8, 16, 48, 80, 128)] == [
            1,
            1,
            1,
            3,
            5,
            4,
        ]
    if device().type == "cpu":
        torch.cuda.is_current_stream_capturing = lambda: False
        found = [chunks.count_of(rows, 8192, gpu, 4) for rows in (128, 256, 512, 1024, 4096)]
        assert found == [1, 1, 2, 4, 4], found
        _config.ONE_QUEUE = True
        assert chunks.count_of(4096, 8192, gpu, 4) == 1
        with in_chunks(2):
            assert chunks.count_of(4096, 8192, gpu, 4) == 2
        _config.ONE_QUEUE = False
        torch.cuda.is_current_stream_capturing = lambda: True
        assert chunks.count_of(4096, 8192, gpu, 4) == 1
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="communication_chunks: count must be"):
            te_fast.communication_chunks(wrong)


if __name__ == "__main__":
    scenes.main()
