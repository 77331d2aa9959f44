"""One of several ranks whose products are cut: ``python overlap_rank.py RANK WORLD FOLDER KIND SCENE ...``.

Results and gradients equal those of whole products, on the CPU bit for bit; ``parallel_rank.py`` compares whole
products with plain torch. Run by ``unit/test_parallel_ranks.py``.
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
from te_fast.parallel import overlap
from te_fast.parallel.collectives import Ranks
from te_fast.parallel.quantized import Gather

#: Rows of one rank, and sizes of a weight.
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
    """This rank's rows wait for no other rank, and a block of columns for no other block: each has its own product."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = (rank > 0) + (rank < size - 1)
    for name, recipe in product(LAYERS, (None, "delayed", "current")):
        layer = seeded(LAYERS[name], torch.bfloat16)
        with in_chunks(1):
            one = products(name, layer, recipe, torch.bfloat16)
        with in_chunks(4):
            cut = products(name, layer, recipe, torch.bfloat16)
        arriving = {"row": 1, "mlp": 2}.get(name, 1) * others
        # The result of a row-parallel layer has one granule of columns, that of the MLP half of one.
        assert cut - one == arriving, (name, recipe, one, cut)


@scene
def results_leave_in_blocks():
    """Blocks of columns are summed where the whole result would have been, also block-scaled."""
    size = dist.get_world_size()
    for recipe, given in product((None, *RECIPES), ({"bias": True}, {"bias": False})):
        found = []
        for count in (1, 2, 3, 9):
            wide = {"params_dtype": torch.bfloat16, "device": device(), **given}
            layer = te.Linear(
                128 * size,
                512,
                parallel_mode="row",
                sequence_parallel=True,
                tp_group=dist.group.WORLD,
                **wide,
            )
            with torch.no_grad():
                for number, parameter in enumerate(layer.parameters()):
                    seed = 100 * number if number else dist.get_rank()
                    parameter.copy_(random(*parameter.shape, seed=seed) * 0.1)
            x = random(ROWS * size, 128, seed=dist.get_rank() + 7).bfloat16().requires_grad_()
            before = te_fast.dispatch.counters()["gemms"]
            with (
                in_chunks(count),
                te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()),
            ):
                y = layer(x)
            gemms = te_fast.dispatch.counters()["gemms"] - before
            assert gemms == min(count, 4), (recipe, count, gemms)
            y.backward(random(*y.shape, seed=3).bfloat16())
            found.append([y.detach(), x.grad, layer.weight.grad])
        for other in found[1:]:
            same(other, found[0], (recipe, given))


@scene
def collectives():
    """Rows arrive at and leave from the same places as those of one collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks("layer", dist.group.WORLD)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        parts = [(random(48, 16, seed=other) * 50).to(dtype) for other in range(size)]
        coming = overlap.Arriving(ranks, parts[rank])
        second = Gather(ranks, parts[rank], is_column=True)
        coming.before([second.start])
        own, begin, wait = coming.native
        assert torch.equal(own, parts[rank])
        assert begin == 48 * rank
        wait()
        second.wait()
        if device().type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(coming.whole, torch.cat(parts))
        assert torch.equal(second.whole, torch.cat(parts, 1))
    ends = [128, 512, 768]
    sums = [random(48 * size, 768, seed=other).round() for other in range(size)]
    leaving = overlap.Leaving(ranks, ends)
    of_columns, send = leaving.native
    assert of_columns == ends
    blocks = [sums[rank][:, begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    result = torch.cat([block.reshape(-1) for block in blocks]).view(48 * size, 768)
    for number in range(3):
        send(number, result)
    out = leaving.result(result)
    assert torch.equal(out, sum(sums).chunk(size)[rank])
    whole = overlap.Leaving(ranks, ends).result(sums[rank])
    assert torch.equal(whole, sum(sums).chunk(size)[rank])


@scene
def a_rank_in_the_middle():
    """Other ranks' rows before and behind a rank's own are two pieces."""
    for name, recipe in product(("column", "row", "mlp"), (None, "current")):
        found = []
        for count in (1, 2):
            layer = seeded(LAYERS[name], torch.bfloat16)
            with in_chunks(count):
                found.append(step(name, layer, recipe, torch.bfloat16))
        same(found[1], found[0], (name, recipe))


@scene
def a_gradient_that_no_product_reads():
    """Rows of an FP8 gradient that only a sum reads are awaited at once."""
    for recipe, name in product(("current", "delayed"), ("row", "mlp")):
        found = []
        for count in (1, 2):
            layer = seeded(LAYERS[name], torch.bfloat16)
            *frozen, trained = layer.parameters()
            for parameter in frozen:
                parameter.requires_grad_(False)
            rows = ROWS * dist.get_world_size() if name == "row" else ROWS
            x = random(rows, IN, seed=dist.get_rank()).bfloat16()
            with in_chunks(count), te.autocast(enabled=True, recipe=RECIPES[recipe]()):
                y = layer(x)
                y.backward(random(*y.shape, seed=9).bfloat16())
            found.append([y.detach(), trained.grad])
        same(found[1], found[0], (recipe, name))


@scene
def a_failed_call_waits():
    """A call that raises leaves no collective behind: the next one has the right result."""
    layer = seeded(column, torch.bfloat16)
    with in_chunks(1):
        expected = step("column", layer, None, torch.bfloat16)
    with in_chunks(2):
        original = overlap.Arriving._wait

        def fail(arriving):
            original(arriving)
            raise KeyError("between pieces")

        overlap.Arriving._wait = fail
        try:
            with pytest.raises(KeyError, match="between pieces"):
                step("column", layer, None, torch.bfloat16)
        finally:
            overlap.Arriving._wait = original
        same(step("column", layer, None, torch.bfloat16), expected, "after a failure")


@scene
def calls_in_a_pause():
    """Another call on the same stream may run in a pause: it shares no memory with the call that waits."""
    layer = seeded(mlp, torch.bfloat16)
    other = te.LayerNormMLP(IN, OUT, params_dtype=torch.bfloat16, device=device())
    x = random(ROWS, IN, seed=77).bfloat16()
    with in_chunks(1):
        expected = step("mlp", layer, "current", torch.bfloat16)
    original = overlap.Arriving._wait

    def busy(arriving):
        original(arriving)
        with torch.no_grad(), te.autocast(enabled=True, recipe=RECIPES["current"]()):
            other(x)

    with in_chunks(2):
        overlap.Arriving._wait = busy
        try:
            got = step("mlp", layer, "current", torch.bfloat16)
        finally:
            overlap.Arriving._wait = original
    same(got, expected, "a call in a pause")


@scene
def which_are_cut():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert not overlap.own_rows_first(4096, 8192, 4, cpu)
    assert overlap.ends_of_blocks(4096, 8192, 2, 4, cpu) == []
    with in_chunks(1):
        assert not overlap.own_rows_first(4096, 8192, 4, cpu)
    with in_chunks(3):
        found = [overlap.own_rows_first(rows, 8, 2, cpu) for rows in (0, 8, 16, 40, 48)]
        assert found == [False, False, True, False, True]
        assert not overlap.own_rows_first(16, 8, 1, cpu)
        found = [
            overlap.ends_of_blocks(16, columns, 2, 2, cpu) for columns in (64, 128, 200, 256, 512)
        ]
        assert found == [[], [], [], [128, 256], [128, 256, 512]], found
    for count in (22, 10**9):
        with in_chunks(count):
            ends = overlap.ends_of_blocks(16, 22 * 128, 2, 2, cpu)
            assert ends == [128 * end for end in range(1, 23)], ends
    if device().type == "cpu":
        torch.cuda.is_current_stream_capturing = lambda: False
        for one_queue in (False, True):
            _config.ONE_QUEUE = one_queue
            rows = [overlap.own_rows_first(rows, 8192, 4, gpu) for rows in (128, 256, 512, 4096)]
            assert rows == [False, False, one_queue, one_queue], rows
            ends = overlap.ends_of_blocks(2048, 8192, 2, 4, gpu)
            assert ends == ([5120, 7168, 8192] if one_queue else [])
        torch.cuda.is_current_stream_capturing = lambda: True
        assert not overlap.own_rows_first(4096, 8192, 4, gpu)
        with in_chunks(2):
            assert not overlap.own_rows_first(4096, 8192, 4, gpu)
        _config.ONE_QUEUE = False
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="communication_chunks: count must be"):
            te_fast.communication_chunks(wrong)


if __name__ == "__main__":
    scenes.main()
