"""Weights in parts in graphs: gradients go into each part's ``main_grad``, and nothing is copied or cast twice."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch._dynamo

import te_fast
import te_fast.pytorch as te
from graphs import compiled, needs_compile, region, states_of
from recipes import RECIPES
from selection import every_pair, quickly
from te_fast import dispatch
from te_fast.common.recipe import Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import ShapeError, StateError

pytestmark = [needs_compile, pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]

COUNTS = torch.tensor([5, 0, 11])
OPTIONS = {"device": "cpu", "params_dtype": torch.bfloat16}


class Experts(torch.nn.Module):
    """A layer or operation of experts, on fixed counts of rows."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, **options):
        return self.experts(x, COUNTS * x.shape[0] // 16, **options)

    def backward_dw(self):
        self.experts.backward_dw()


def grouped(**options):
    return Experts(te.GroupedLinear(3, 32, 48, **OPTIONS, **options))


def operation(fuse_wgrad_accumulation=False, **options):
    options |= {"accumulate_into_main_grad": fuse_wgrad_accumulation}
    made = te.ops.GroupedLinear(3, 32, 48, dtype=torch.bfloat16, device="cpu", **options)
    return Experts(made)


MAKERS = {
    "Linear": lambda **more: te.Linear(32, 48, parameters_split=("q", "k", "v"), **OPTIONS, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(
        32, 48, parameters_split={"q": 16, "k": 32}, **OPTIONS, **more
    ),
    "GroupedLinear": grouped,
    "operation": operation,
}


def weights_of(model):
    return [p for name, p in model.named_parameters() if "weight" in name and p.dim() == 2]


def inside(model, x, recipe, is_first):
    """Run a model so that the graph enters the region."""
    keywords = {} if is_first is None else {"is_first_microbatch": is_first}
    if recipe is None:
        return torch.relu(model(x, **keywords))
    with te.autocast(recipe=recipe):
        return torch.relu(model(x, **keywords))


def give_buffers(model, order, dtype=torch.float32):
    """One buffer per weight: in one memory in the weights' order or reversed, or apart."""
    weights = weights_of(model)
    memory = torch.ones(sum(weight.numel() for weight in weights), dtype=dtype)
    weights = weights[::-1] if order == "reversed" else weights
    for weight, buffer in zip(
        weights, memory.split([weight.numel() for weight in weights]), strict=True
    ):
        buffer = buffer.view(weight.shape)
        weight.main_grad = buffer.clone() if order == "apart" else buffer


def step(model, function, x, recipe, is_first=None):
    """Run a forward and a backward; return result and gradient of the input."""
    given = x.clone().requires_grad_()
    y = function(model, given, recipe, is_first)
    y.float().square().sum().backward()
    return y, given.grad


def assert_alike(eager, graphed):
    """Compare gradients, the buffers that they went into, scales and histories."""
    for (name, one), other in zip(
        eager.named_parameters(), graphed.named_parameters(), strict=True
    ):
        if hasattr(one, "main_grad"):
            assert torch.equal(one.main_grad, other[1].main_grad), name
            assert (one.grad is None) == (other[1].grad is None), name
        else:
            assert (one.grad is None) == (other[1].grad is None), name
            assert one.grad is None or torch.equal(one.grad, other[1].grad), name
    for one, other in zip(states_of(eager), states_of(graphed), strict=True):
        assert torch.equal(one, other)


QUICK = [
    ("LayerNormLinear", "apart", True, "block"),
    ("GroupedLinear", "reversed", False, "delayed"),
    ("GroupedLinear", "in_order", True, "current"),
]
CASES = every_pair(MAKERS, ["in_order", "reversed", "apart"], [False, True], RECIPES)


@pytest.mark.parametrize(
    ("name", "order", "delay", "kind"),
    quickly(
        [*QUICK, *(case for case in CASES if case not in QUICK)],
        *QUICK,
    ),
)
def test_gradients_go_into_main_grad(name, order, delay, kind):
    recipe = RECIPES[kind]()
    eager = MAKERS[name](fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    graphed = copy.deepcopy(eager)
    for model in (eager, graphed):
        give_buffers(model, order)
        for weight in weights_of(model)[:2]:
            weight.grad_added_to_main_grad = False
        weights_of(model)[0].zero_out_wgrad = True
    run = compiled(inside)
    takes_first = name != "operation"  # which only Sequential passes on
    for is_first in (True, False, False) if takes_first else (None, None, None):
        x = torch.randn(16, 32).bfloat16()
        pairs = [step(eager, inside, x, recipe, is_first), step(graphed, run, x, recipe, is_first)]
        for one, other in zip(*pairs, strict=True):
            assert torch.equal(one, other)
        for model in (eager, graphed) if delay else ():
            model.backward_dw()
        assert_alike(eager, graphed)
        first, second, *others = weights_of(graphed)
        assert first.grad_added_to_main_grad
        assert second.grad_added_to_main_grad
        # torch's hooks see a gradient whose values nothing reads, unless they ask for zeros.
        assert first.grad.dtype == torch.bfloat16
        assert first.grad.count_nonzero() == 0
        assert second.grad.shape == second.shape
        assert all(other.grad is None for other in others)
        for model in (eager, graphed):
            for weight in weights_of(model):
                weight.grad = None
            for weight in weights_of(model)[
                :2
            ]:  # as Megatron-LM does; torch 2.8 compiles again for another value
                weight.grad_added_to_main_grad = False
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if takes_first else 1)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("delay", [False, True])
def test_frozen_and_overwritten_parts(delay):
    eager = grouped(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, bias=False)
    graphed = copy.deepcopy(eager)
    for model in (eager, graphed):
        give_buffers(model, "in_order")
        weights_of(model)[0].requires_grad_(False)
        del weights_of(model)[0].main_grad
        weights_of(model)[2].overwrite_main_grad = True
    run, recipe = compiled(inside), Float8CurrentScaling()
    for _ in range(2):
        x = torch.randn(16, 32).bfloat16()
        for model, function in ((eager, inside), (graphed, run)):
            step(model, function, x, recipe)
            if delay:
                model.backward_dw()
        assert_alike(eager, graphed)


def test_only_the_marked_weight_is_overwritten():
    eager = te.LayerNormMLP(32, 32, fuse_wgrad_accumulation=True, **OPTIONS)
    graphed = copy.deepcopy(eager)
    for model in (eager, graphed):
        give_buffers(model, "apart")
        model.fc1_weight.overwrite_main_grad = True
    x = torch.randn(16, 32).bfloat16()
    step(eager, inside, x, Float8CurrentScaling())
    step(graphed, compiled(inside), x, Float8CurrentScaling())
    assert_alike(eager, graphed)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [False, True])
def test_no_rows_and_rows_that_gemms_lack(delay):
    # Of FP32, since eager code rounds the gradients of padded rows to the weight's type before it adds them.
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay}
    eager = te.Linear(32, 48, parameters_split=("q", "k", "v"), device="cpu", **options)
    graphed = copy.deepcopy(eager)
    for model in (eager, graphed):
        give_buffers(model, "in_order")
    run, recipe = compiled(inside), Float8BlockScaling()
    te_fast.auto_pad(True)
    try:
        for rows, is_first in ((16, None), (5, None), (0, None), (0, True), (16, False)):
            x = torch.randn(rows, 32)
            for model, function in ((eager, inside), (graphed, run)):
                step(model, function, x, recipe, is_first)
                if delay:
                    model.backward_dw()
            assert_alike(eager, graphed)
    finally:
        te_fast.auto_pad(False)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["in_order", "reversed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductors_code_around_a_layer(order, dtype):
    """Adjacent buffers take the product directly, which rounds once; a compiler makes no copies of them."""
    eager = grouped(fuse_wgrad_accumulation=True)
    graphed = copy.deepcopy(eager)
    for model in (eager, graphed):
        give_buffers(model, order, dtype)
    run, recipe = compiled(inside, backend="inductor"), Float8CurrentScaling()
    for rows in (16, 32):
        x = torch.randn(rows, 32).bfloat16()
        for model, function in ((eager, inside), (graphed, run)):
            step(model, function, x, recipe)
        assert_alike(eager, graphed)


def test_outside_of_fp8():
    """Gradients are rounded once, to the type of ``main_grad``."""
    layer = MAKERS["Linear"](fuse_wgrad_accumulation=True, bias=False)
    give_buffers(layer, "reversed")
    x = torch.randint(-7, 8, (512, 32)).bfloat16()
    dy = torch.randint(1, 4, (512, 48)).bfloat16()
    compiled(lambda x: layer(x))(x).backward(dy)
    expected = 1 + dy.double().T @ x.double()
    assert (expected != expected.bfloat16()).any()
    found = torch.cat([weight.main_grad for weight in weights_of(layer)])
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize(
    ("name", "kind"), quickly(list(product(MAKERS, RECIPES)), ("GroupedLinear", "current"))
)
def test_parts_are_quantised_once_while_they_do_not_change(name, kind):
    model, recipe = MAKERS[name](), RECIPES[kind]()
    run, x = compiled(inside), torch.randn(16, 32).bfloat16()
    with torch.no_grad():
        for change in (None, None, 0, None, -1):
            if change is not None:
                weights_of(model)[change].mul_(1.5)
            dispatch.reset_counters()
            y = run(model, x, recipe, None)
            casts = dispatch.counters()["weight_casts"]
            if kind != "delayed":  # whose weights are quantised anew with the scales of each step
                assert torch.equal(y, inside(model, x, recipe, None))
                first = change is None and not hasattr(model, "seen")
                assert casts == (1 if first or change is not None else 0)
            model.seen = True


@pytest.mark.parametrize("name", quickly(MAKERS, "GroupedLinear"))
def test_parts_that_were_moved_apart(name):
    model, recipe = MAKERS[name](), Float8CurrentScaling()
    run, x = compiled(inside), torch.randn(16, 32).bfloat16()
    for _ in range(2):
        results = []
        for function in (inside, run):
            results.append(step(model, function, x, recipe))
            results[-1] += tuple(p.grad for p in model.parameters())
            model.zero_grad(set_to_none=True)
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        for weight in weights_of(model):
            weight.data = weight.data * 2


@pytest.mark.parametrize("kind", quickly(RECIPES, "delayed"))
def test_a_region_around_the_graph(kind):
    eager = grouped(fuse_wgrad_accumulation=True)
    graphed = copy.deepcopy(eager)
    for model in (eager, graphed):
        give_buffers(model, "reversed")
    run = compiled(lambda x: torch.relu(graphed(x)))
    for _ in range(2):
        x = torch.randn(16, 32).bfloat16()
        results = []
        for function in (lambda x: torch.relu(eager(x)), run):
            with region(RECIPES[kind]()):
                results.append(function(x))
            results[-1].sum().backward()
        assert torch.equal(*results)
        assert_alike(eager, graphed)


def test_a_buffer_that_is_missing_or_does_not_fit_is_an_error_as_in_eager():
    layer = MAKERS["Linear"](fuse_wgrad_accumulation=True)
    give_buffers(layer, "apart")
    run, x = compiled(inside), torch.randn(16, 32).bfloat16()
    step(layer, run, x, Float8CurrentScaling())
    for buffer, error in ((None, StateError), (torch.ones(3, 3), ShapeError)):
        weights_of(layer)[1].main_grad = buffer
        messages = []
        for function in (inside, run):
            with pytest.raises(error, match="main_grad") as caught:
                step(layer, function, x, Float8CurrentScaling())
            messages.append(str(caught.value))
        assert messages[1].startswith(messages[0])  # old releases of torch append the node


def test_buffers_that_are_replaced_need_no_other_graph():
    eager = grouped(fuse_wgrad_accumulation=True)
    graphed = copy.deepcopy(eager)
    run, x = compiled(inside), torch.randn(16, 32).bfloat16()
    recipe = Float8CurrentScaling()
    for order, dtype in (
        ("in_order", torch.float32),
        ("apart", torch.bfloat16),
        ("in_order", torch.bfloat16),
    ):
        for model, function in ((eager, inside), (graphed, run)):
            give_buffers(model, order, dtype)
            step(model, function, x, recipe)
        assert_alike(eager, graphed)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
