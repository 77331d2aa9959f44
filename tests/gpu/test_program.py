"""Native op programs on a GPU: against torch, against the host backend, and against themselves as graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from chains import CHAINS, Chain, case, results
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

pytestmark = pytest.mark.gpu
RECIPES = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling]
LINEAR = [name for name in CHAINS if "linear" in str(CHAINS[name])]
# Rounding of one result in the type, with room for a few roundings in a row.
BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_gpu(name: str, dtype: torch.dtype, rows: int = 48) -> tuple[Chain, Any, Any, Any]:
    chain, x, extras, grads = case(CHAINS[name], rows)
    chain = chain.to("cuda", dtype)
    to = {"device": "cuda", "dtype": dtype}
    return chain, x.to(**to), [t.to(**to) for t in extras], [t.to(**to) for t in grads]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CHAINS)
def test_high_precision_is_torch(name: str, dtype: torch.dtype) -> None:
    chain, x, extras, grads = on_gpu(name, dtype)
    ours = results(chain, chain, x, extras, grads)
    wide = chain.double()
    doubles = [[t.double() for t in extras], [t.double() for t in grads]]
    theirs = results(wide, wide.reference, x.double(), *doubles)
    for got, expected in zip(ours, theirs, strict=True):
        assert got.dtype == dtype
        assert (got.double() - expected).norm() <= BOUNDS[dtype] * expected.norm()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LINEAR)
def test_fp8_is_the_host_backend(name: str, recipe: Any) -> None:
    chain, x, extras, grads = on_gpu(name, torch.bfloat16)
    host, *_ = case(CHAINS[name], 48)
    host = host.to(torch.bfloat16)
    host.load_state_dict(chain.state_dict())
    cpu = [x.cpu(), [t.cpu() for t in extras], [t.cpu() for t in grads]]
    for _ in range(2):  # delayed scaling: the first step measures
        with te.autocast(recipe=recipe()):
            ours = results(chain, chain, x, extras, grads)
            theirs = results(host, host, *cpu)
    for got, expected in zip(ours, theirs, strict=True):
        # Sums run in another order, so that single values round to a neighbour of E4M3 or E5M2. If such a value is
        # a gradient's largest, the scale changes by one part in 256, and a tenth of the gradient moves to neighbours.
        difference = (got.cpu().float() - expected.float()).norm()
        assert difference <= 0.06 * expected.float().norm()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["three", "residual", "norm_swiglu", "block"])
@pytest.mark.parametrize("rows", [2, 34])
def test_any_number_of_rows_with_auto_pad(name: str, recipe: Any, rows: int) -> None:
    chain, x, extras, grads = on_gpu(name, torch.bfloat16, rows)
    host, *_ = case(CHAINS[name], rows)
    host = host.to(torch.bfloat16)
    host.load_state_dict(chain.state_dict())
    cpu = [x.cpu(), [t.cpu() for t in extras], [t.cpu() for t in grads]]
    former = te_fast.auto_pad(True)
    try:
        for _ in range(2):
            with te.autocast(recipe=recipe()):
                ours = results(chain, chain, x, extras, grads)
                theirs = results(host, host, *cpu)
    finally:
        te_fast.auto_pad(former)
    for got, expected in zip(ours, theirs, strict=True):
        assert got.shape == expected.shape
        difference = (got.cpu().float() - expected.float()).norm()
        assert difference <= 0.08 * expected.float().norm()


@pytest.mark.parametrize("name", ["mlp", "relu"])
@pytest.mark.parametrize("recipe", [None, DelayedScaling, Float8CurrentScaling])
def test_activation_epilogues_compute_what_the_kernels_do(name: str, recipe: Any) -> None:
    chain, x, extras, _ = on_gpu(name, torch.bfloat16)
    x[0, 0, 0] = float("nan")
    region = {"enabled": recipe is not None, "recipe": recipe() if recipe else None}
    with te.autocast(**region):
        with torch.no_grad():
            fused = chain(x, *extras)
        apart = chain(x, *extras)
    steps = [text for plan in chain.program.explain() for text, _ in plan["forward"]]
    assert any("gelu" in text or "relu" in text for text in steps)
    assert fused[0, 0].isnan().all()
    assert apart[0, 0].isnan().all()
    rest = [t.flatten(0, 1)[1:].float() for t in (fused, apart)]
    assert (rest[0] - rest[1]).norm() <= 0.05 * rest[1].norm()


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling, Float8BlockScaling])
@pytest.mark.parametrize("name", ["three", "mlp", "residual", "norm_swiglu", "block"])
def test_graphs_of_repeated_addresses_give_the_same_bits(name: str, recipe: Any) -> None:
    chain, x, extras, grads = on_gpu(name, torch.bfloat16, rows=64)
    inputs = [torch.randn_like(x) for _ in range(5)]
    buffer = x.clone().requires_grad_()
    region = {"enabled": recipe is not None, "recipe": recipe() if recipe else None}
    seen: dict[int, list[torch.Tensor]] = {}
    for step in range(20):
        index = step % len(inputs)
        with torch.no_grad():
            buffer.copy_(inputs[index])
        chain.zero_grad(set_to_none=True)
        buffer.grad = None
        with te.autocast(**region):
            out = chain(buffer, *[t.clone() for t in extras])
        outputs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outputs, [t.clone() for t in grads[: len(outputs)]])
        made = [*outputs, buffer.grad, *[p.grad for p in chain.parameters()]]
        copies = [t.detach().clone() for t in made]
        if index in seen:
            for got, expected in zip(copies, seen[index], strict=True):
                assert torch.equal(got, expected)
        seen[index] = copies
        del out, outputs, made


def test_a_replayed_chain_sees_a_changed_weight() -> None:
    chain, x, _, _ = on_gpu("three", torch.bfloat16)
    with te.autocast(recipe=Float8CurrentScaling()), torch.no_grad():
        for _ in range(4):
            before = chain(x).clone()
        chain.p0.mul_(2.0)
        after = [chain(x).clone() for _ in range(4)]
    assert all(torch.equal(after[0], other) for other in after)
    assert not torch.equal(before, after[0])


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("mlp", Float8CurrentScaling),
        ("norm_swiglu", Float8BlockScaling),
        ("norm_hand", DelayedScaling),
    ],
)
def test_capture_and_streams(name: str, recipe: Any) -> None:
    chain, x, _, _ = on_gpu(name, torch.bfloat16)
    with te.autocast(recipe=recipe()), torch.no_grad():
        expected = chain(x).clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(x)
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(6):
            outs = []
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    outs.append(chain(x))
            torch.cuda.synchronize()
            assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling, Float8BlockScaling])
@pytest.mark.parametrize("name", ["mlp", "norm_swiglu", "block"])
def test_capture_of_forward_and_backward(name: str, recipe: Any) -> None:
    chain, x, extras, grads = on_gpu(name, torch.bfloat16, rows=64)
    leaves = [t.requires_grad_() for t in (x, *extras)]
    inputs = {leaf.data_ptr() for leaf in leaves}
    tensors = [*leaves, *chain.parameters()]
    region = {"enabled": recipe is not None, "recipe": recipe() if recipe else None}

    def step() -> list[torch.Tensor]:
        with te.autocast(**region):
            out = chain(*leaves)
        outputs = out if isinstance(out, tuple) else (out,)
        clones = [t.clone() for t in grads[: len(outputs)]]  # some are added to in place
        return [*outputs, *torch.autograd.grad(outputs, tensors, clones)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = [t.detach().clone() for t in step()]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        for tensor in captured:
            if tensor.data_ptr() not in inputs:  # an extra output may be the input itself
                tensor.detach().zero_()
        graph.replay()
        assert all(map(torch.equal, captured, expected))


def test_memory_is_flat() -> None:
    chain, x, _, grads = on_gpu("mlp", torch.bfloat16, rows=512)
    recipe = DelayedScaling()

    def step() -> None:
        with te.autocast(recipe=recipe):
            y = chain(x.clone().requires_grad_())
        y.backward(grads[0])
        chain.zero_grad(set_to_none=True)

    for _ in range(10):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


HANDOVER = [("linear", 64), ("bias",), ("linear", 48), ("relu",), ("linear", 32), ("linear", 32)]


@pytest.mark.parametrize("rows", [64, 8, 2])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("ops", [HANDOVER, [("linear", 32)] * 40, [("linear", 4096)] * 3])
def test_fp8_handed_over_is_rounded_once_less(
    ops: list[Any], dtype: torch.dtype, rows: int
) -> None:
    former = te_fast.auto_pad(True)
    chain, x, _, grads = case(ops, rows)
    chain, x = chain.to("cuda", dtype), x.to("cuda", dtype)
    grads = [grad.to("cuda", dtype) for grad in grads]
    recipe, inputs = DelayedScaling(), slice(2, 2 * len(chain.handles), 2)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            results(chain, chain, x, [], grads)
    chain.fwd.amax_history[0].zero_()
    with te.autocast(recipe=recipe):
        apart = chain(x).detach()
        found = chain.fwd.amax_history[0].clone()
        chain.fwd.amax_history[0].zero_()
        chain.fwd.amax_history[0, 4] = 1000.0
        with torch.no_grad():
            handed = [chain(x) for _ in range(4)]  # the last ones as a graph
        live = chain.fwd.amax_history[0].clone()  # leaving the region rolls it
    te_fast.auto_pad(former)
    assert live[4] == 1000.0
    live[4] = found[4]
    # As tests/unit/test_program.py says: 0.02 a value, which the following ops pass on. A maximum may be a
    # value that rounded the other way.
    deep = len(chain.handles) > 4
    torch.testing.assert_close(live, found, rtol=0.5 if deep else 0.13, atol=0)
    assert live[inputs].all()
    bound = 0.3 if deep else 0.08
    for one in handed:
        assert (one - apart).float().norm() <= bound * apart.float().norm()
    assert all(torch.equal(one, handed[0]) for one in handed)
    steps = [text for text, _ in chain.program.explain()[-1]["forward"]]
    handed_over = sum("in FP8" in text and "gemm" in text for text in steps)
    # Some versions of cuBLASLt lack an epilogue, but all have plain products and products with a bias.
    notes = chain.program.explain()[-1]["notes"]
    refused = sum("cuBLASLt has no such product" in note for note in notes)
    assert handed_over + refused == len(chain.handles) - 1, chain.program.explain()[-1]
    assert refused <= sum(op[0] == "relu" for op in ops), notes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_handed_over_is_the_host_backend(dtype: torch.dtype) -> None:
    chain, x, _, _ = case([*HANDOVER, ("gelu",), ("linear", 48)], 64)
    host, hx = chain.to(dtype), x.to(dtype)
    device, *_ = case([*HANDOVER, ("gelu",), ("linear", 48)], 64)
    device.load_state_dict(host.state_dict())
    device = device.to("cuda", dtype)
    recipe = DelayedScaling()
    for _ in range(3):
        with te.autocast(recipe=recipe), torch.no_grad():
            theirs, ours = host(hx), device(hx.cuda())
    torch.testing.assert_close(device.fwd.scale.cpu(), host.fwd.scale, rtol=2e-2, atol=0)
    assert (ours.cpu() - theirs).float().norm() <= 0.05 * theirs.float().norm()


def test_nan_and_overflow_handed_over() -> None:
    chain, x, _, _ = case([("linear", 32)] * 3, 64)
    chain, x = chain.to("cuda", torch.bfloat16), x.to("cuda", torch.bfloat16)
    recipe = DelayedScaling()
    with torch.no_grad():
        for _ in range(2):
            with te.autocast(recipe=recipe):
                chain(x)
        with te.autocast(recipe=recipe):
            x[0, 0] = torch.nan
            x[1, 0] *= 1e4  # far beyond the scale of the steps before
            y = chain(x)
            live = chain.fwd.amax_history[0].clone()
    assert live.isfinite().all()
    assert y[0, 0].isnan().all()
    assert y[0, 1:].isfinite().all()
    assert y[1].isfinite().all()  # saturates


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran without"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_autocast(
    weights: torch.dtype,
    given: torch.dtype,
    dtype: torch.dtype,
    bias: bool,
    ran: bool,
    grads: bool,
) -> None:
    """The product has 16-bit operands, as in torch.nn.Linear; gradients have the parameters' type."""
    torch.manual_seed(0)
    reference = torch.nn.Linear(64, 48, bias=bias, device="cuda", dtype=weights)
    for layer in (
        te.ops.Linear(64, 48, bias=bias, device="cuda", dtype=weights),
        te.ops.Sequential(te.ops.Linear(64, 48, bias=bias, device="cuda", dtype=weights)),
    ):
        with torch.no_grad():
            for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
                ours.copy_(theirs)
        x = torch.randn(40, 64, device="cuda")
        if ran:
            layer(x.to(weights)).sum().backward()
        found = []
        for module in (layer, reference):
            module.zero_grad()
            leaf = x.to(given).requires_grad_(grads)
            with torch.autocast("cuda", dtype), torch.set_grad_enabled(grads):
                y = module(leaf)
            assert y.dtype == dtype
            tensors = [y]
            if grads:
                y.backward(torch.ones_like(y))
                tensors += [leaf.grad, *(parameter.grad for parameter in module.parameters())]
            found.append(tensors)
        for ours, theirs in zip(*found, strict=True):
            assert ours.dtype == theirs.dtype
            assert (ours.double() - theirs.double()).norm() <= BOUNDS[
                dtype
            ] * theirs.double().norm()
