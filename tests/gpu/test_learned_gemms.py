"""Matrix products that are launched as learned from cuBLASLt: the same bits as cuBLASLt's own, wherever tensors lie.

A plan's first calls go to cuBLASLt, later calls do not. The first calls are compared with torch in FP64, the later
calls with the first, bit for bit. All tensors of a call are fresh, and outputs lie between canaries.
"""

import os
import subprocess
import sys

import pytest
import torch
from guarded import Guarded

import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

pytestmark = pytest.mark.gpu

RECIPES = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
#: More calls than a plan makes through cuBLASLt.
CALLS = 14
SHAPES = [(256, 1024, 1024), (2048, 6144, 2048), (64, 64, 8192), (16, 48, 16), (4096, 2048, 128)]
#: The type of the result, and the product's other options.
KINDS = {
    "plain": (torch.bfloat16, ()),
    "bias": (torch.bfloat16, ("bias",)),
    "accumulate": (torch.float32, ("accumulate",)),
    "float16": (torch.float16, ()),
    "fast": (torch.bfloat16, ("fast_accumulation",)),
}


class Product:
    """One product, computed at new addresses each time."""

    def __init__(self, shape, recipe, kind):
        self.m, self.n, self.k = shape
        self.recipe, (self.dtype, self.flags) = recipe, KINDS[kind]
        generator = torch.Generator("cuda").manual_seed(sum(shape))
        high = torch.float16 if self.dtype is torch.float16 and recipe is None else torch.bfloat16

        def random(*size):
            return torch.randn(size, generator=generator, device="cuda").to(high)

        self.x, self.w, self.bias = random(self.m, self.k), random(self.n, self.k), random(self.n)
        self.before = random(self.m, self.n).to(self.dtype)
        self.gaps = []

    def moved(self, values):
        gap = 512 * int(torch.randint(1, 64, ()))
        self.gaps.append(torch.empty(gap, dtype=torch.uint8, device="cuda"))
        return values.clone()

    def operand(self, values, role):
        if self.recipe is None:
            return self.moved(values)
        scale = torch.full((1,), 3.0, device="cuda") if self.recipe == "delayed" else None
        return dispatch.quantize(self.moved(values), RECIPES[self.recipe](), role=role, scale=scale)

    def exact(self):
        def plain(values, role):
            operand = self.operand(values, role)
            return (values if self.recipe is None else dispatch.dequantize(operand)).double()

        result = plain(self.x, "input") @ plain(self.w, "weight").T
        if "bias" in self.flags:
            result += self.bias
        return result + self.before if "accumulate" in self.flags else result

    def compute(self):
        given = dict.fromkeys(self.flags, True)
        if "bias" in self.flags:
            given["bias"] = self.moved(self.bias)
        self.gaps.append(torch.empty(512 * len(self.gaps), dtype=torch.uint8, device="cuda"))
        guard = Guarded((self.m, self.n), self.dtype)
        if "accumulate" in self.flags:
            guard.tensor.copy_(self.before)
        x, w = self.operand(self.x, "input"), self.operand(self.w, "weight")
        dispatch.gemm(x, w, guard.tensor, **given)
        guard.check()
        return guard.tensor


def learned():
    return dispatch.counters()["learned_gemms"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_learned_launches_have_the_bits_of_the_library(shape, recipe, kind):
    if kind == "fast" and recipe in (None, "block"):
        pytest.skip("fast accumulation is for scales of whole tensors")
    product = Product(shape, recipe, kind)
    first = product.compute()
    exact = product.exact()
    bound = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 1e-2}[product.dtype]
    assert (first.double() - exact).norm() <= bound * exact.norm()
    before = learned()
    for _ in range(CALLS):
        assert torch.equal(product.compute(), first)
    assert CALLS - 8 <= learned() - before <= CALLS


def test_operands_that_are_less_aligned_have_plans_of_their_own():
    x, w = (torch.randn(size, 1024 + 8, device="cuda").bfloat16() for size in (256, 512))
    for shift in (
        0,
        8,
        1,
        4,
    ):  # 256 bytes, 16, 2, 8; below 16, kernels are of another kind and not learned
        a = x.flatten()[shift : shift + 256 * 1024].view(256, 1024)
        b = w.flatten()[shift : shift + 512 * 1024].view(512, 1024)
        exact, before = a.double() @ b.double().T, learned()
        results = [
            dispatch.gemm(a, b, torch.full((256, 512), torch.nan, device="cuda").bfloat16())
            for _ in range(CALLS)
        ]
        assert (results[0].double() - exact).norm() <= 1e-2 * exact.norm()
        assert all(torch.equal(result, results[0]) for result in results)
        assert (learned() > before) == (shift % 8 == 0)


def test_a_graph_and_another_stream_take_learned_launches():
    product = Product((256, 1024, 1024), "current", "plain")
    first = product.compute()
    for _ in range(CALLS):
        product.compute()
    stream, before = torch.cuda.Stream(), learned()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = product.compute()
    stream.synchronize()
    assert torch.equal(result, first)
    x, w = product.operand(product.x, "input"), product.operand(product.w, "weight")
    out = torch.full_like(first, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dispatch.gemm(x, w, out)
    assert learned() == before + 2
    graph.replay()
    assert torch.equal(out, first)
    x.rowwise_data.zero_()
    graph.replay()
    assert not out.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_at_fresh_addresses(recipe):
    torch.manual_seed(0)
    layer = te.Linear(512, 768, device="cuda", params_dtype=torch.bfloat16)
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(64, 768, device="cuda", dtype=torch.bfloat16)
    alive, seen, before = [], [], learned()
    for _ in range(2 * CALLS):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        # Scales of delayed scaling settle at once: the maxima are the same in each step.
        with te.autocast(recipe=RECIPES[recipe]()):
            y = layer(leaf)
        y.backward(grad.clone())
        alive += [leaf, y, leaf.grad, layer.weight.grad, layer.bias.grad]
        seen.append([t.clone() for t in (y, leaf.grad, layer.weight.grad, layer.bias.grad)])
    assert learned() > before
    settled = seen[3]
    for step in seen[4:]:
        for ours, wanted in zip(step, settled, strict=True):
            assert torch.equal(ours, wanted)


def fills(call, count):
    """Return the fills that calls launch."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return sum(event.name.startswith("Memset") for event in trace.events())


def test_counters_of_learned_launches_are_zeroed_together():
    """cuBLASLt zeroes the counter of some kernels before each launch; which ones is its secret."""
    found = 0
    for m, n, k in [(2048, 6144, 2048), (2048, 2048, 5632), (6144, 2048, 2048), (512, 2048, 2048)]:
        x, w = (torch.randn(size, k, device="cuda").bfloat16() for size in (m, n))
        recipe = Float8CurrentScaling()
        operands = dispatch.quantize(x, recipe), dispatch.quantize(w, recipe, role="weight")
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        by_library = fills(lambda o=operands, d=out: dispatch.gemm(*o, d), 7)
        for _ in range(CALLS):
            dispatch.gemm(*operands, out)
        learned_ones = fills(lambda o=operands, d=out: dispatch.gemm(*o, d), 200)
        assert learned_ones <= 1, (m, n, k, by_library)
        found += by_library
    if found == 0:
        pytest.skip("this cuBLASLt zeroes nothing")


@pytest.mark.parametrize("is_graph", [False, True])
def test_counters_are_taken_by_graphs_and_launches_in_turns(is_graph):
    """A layer replays its graphs, or a user's graph runs; products between them use up all counters many times."""
    torch.manual_seed(1)
    layer = te.Linear(2048, 6144, device="cuda", params_dtype=torch.bfloat16, bias=False)
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    product = Product((2048, 2048, 5632), "current", "plain")
    recipe = Float8CurrentScaling()
    operands = product.operand(product.x, "input"), product.operand(product.w, "weight")
    out = torch.empty(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def forward():
        with torch.no_grad(), te.autocast(recipe=recipe):
            return layer(x)

    first, wanted = forward(), product.compute()

    def run():
        y = forward()
        # The next result lies in its memory: a product that wrote nothing would leave the right numbers.
        return y.clone(), y.fill_(torch.nan)

    for _ in range(CALLS):
        assert torch.equal(run()[0], first)
        assert torch.equal(dispatch.gemm(*operands, out), wanted)
    if is_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = forward()

        def run():
            captured.fill_(torch.nan)
            graph.replay()
            return captured.clone(), captured

    for number in range(300):
        if number == 200:
            dispatch.release_memory()
        y, _ = run()
        out.fill_(torch.nan)
        for _ in range(1 + number % 3):
            dispatch.gemm(*operands, out)
        assert torch.equal(y, first), number
        assert torch.equal(out, wanted), number


def test_graphs_zero_their_counters_together():
    """Every layer replays its graph once a step: one launch a step zeroes the counters of all."""
    torch.manual_seed(2)
    layers = [
        te.Linear(2048, 6144, device="cuda", params_dtype=torch.bfloat16, bias=False)
        for _ in range(6)
    ]
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    recipe = Float8CurrentScaling()

    def step():
        with torch.no_grad(), te.autocast(recipe=recipe):
            return [layer(x) for layer in layers]

    # The next step's results lie in this step's memory: a product that wrote nothing would leave the right numbers.
    def spoiled():
        for y in step():
            y.fill_(torch.nan)

    def checked(wanted):
        for y, first in zip(step(), wanted, strict=True):
            assert torch.equal(y, first)
            y.fill_(torch.nan)

    wanted = [y.clone() for y in step()]
    for _ in range(CALLS):
        checked(wanted)
    before = dispatch.counters()["learned_gemms"]
    found = fills(spoiled, 20)
    assert dispatch.counters()["learned_gemms"] == before + 20 * len(layers)
    assert found <= 20
    for _ in range(50):
        checked(wanted)


CHILD = """
import torch
from te_fast import dispatch
x, w = (torch.randn(64, 128, device="cuda").bfloat16() for _ in range(2))
for _ in range(20):
    dispatch.gemm(x, w, torch.empty(64, 64, device="cuda", dtype=torch.bfloat16))
print(dispatch.counters()["learned_gemms"])
"""


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_the_environment_turns_learning_off(wanted):
    environment = os.environ | {"TE_FAST_LEARN": wanted}
    run = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(run.stdout) > 0) == (wanted == "1")
