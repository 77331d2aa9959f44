"""FP8 weights of experts in graphs: a compiled model has the bits of an eager one."""

from __future__ import annotations

import copy
import warnings
from itertools import product

import pytest
import torch
import torch._dynamo

import te_fast
import te_fast.pytorch as te
from graphs import assert_trains_alike, compiled, needs_compile
from grouped_layers import with_biases
from recipes import RECIPES
from selection import every_pair, every_value, quickly
from te_fast import dispatch
from te_fast.common.recipe import Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import ShapeError, StateError
from te_fast.tensor.primary import is_quantized

pytestmark = [needs_compile, pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]

OF_OPS = {"dtype": torch.bfloat16, "device": "cpu"}


class Layer(torch.nn.Module):
    """A `GroupedLinear`, on fixed shares of the rows."""

    def __init__(self, **options):
        super().__init__()
        options |= {"params_dtype": torch.bfloat16, "device": "cpu"}
        self.experts = te.GroupedLinear(3, 128, 256, **options)

    def forward(self, x, **options):
        return self.experts(x, counts(x), **options)


class Chain(torch.nn.Module):
    """Operations of experts."""

    def __init__(self, **options):
        super().__init__()
        self.experts = te.ops.Sequential(
            te.ops.GroupedLinear(3, 128, 256, **OF_OPS, **options),
            te.ops.ScaledSwiGLU(),
            te.ops.GroupedLinear(3, 128, 128, bias=False, **OF_OPS, **options),
        )

    def forward(self, x, **options):
        factors = x[:, 0].detach().float()
        return self.experts(x, counts(x), factors, counts(x), **options)


def counts(x):
    return torch.tensor([5, 0, 11]) * (x.shape[0] // 16)


MAKERS = {
    "one": lambda **more: Layer(single_grouped_weight=True, **more),
    "each": lambda **more: Layer(**more),
    "chain of one": lambda **more: Chain(single_grouped_weight=True, **more),
    "chain of each": lambda **more: Chain(**more),
}


def quantized(name, recipe, *, grads=True, **options):
    with torch.set_grad_enabled(grads), te.quantized_model_init(recipe=recipe):
        model = with_biases(MAKERS[name](**options))
    assert weights_of(model)
    return model


def weights_of(model):
    return [parameter for parameter in model.parameters() if is_quantized(parameter)]


def inside(model, x, recipe, is_first):
    """Run a model so that the graph enters the region."""
    keywords = {} if is_first is None else {"is_first_microbatch": is_first}
    with te.autocast(recipe=recipe):
        return torch.relu(model(x, **keywords))


def step(model, function, x, recipe, is_first=None):
    """Run a forward and a backward; return result and gradients."""
    given = x.clone().requires_grad_()
    y = function(model, given, recipe, is_first)
    y.square().sum().backward()
    return [y, given.grad, *(parameter.grad for parameter in model.parameters())]


def assert_equal(results):
    for one, two in zip(*results, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.equal(one, two)


@pytest.mark.parametrize(
    ("name", "kind"), quickly(list(product(MAKERS, RECIPES)), ("each", "delayed"))
)
def test_a_compiled_model_trains_as_eager_does(name, kind):
    recipe = RECIPES[kind]()
    assert_trains_alike(quantized(name, recipe), recipe, inside, cols=128)
    # There is one graph for the first row count, and one for all others.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    ("name", "kind"), quickly(list(product(MAKERS, RECIPES)), ("each", "current"))
)
def test_an_optimizer_compiles_nothing_and_no_weight_is_quantised_in_a_graph(name, kind):
    recipe = RECIPES[kind]()
    eager = quantized(name, recipe)
    graphed = copy.deepcopy(eager)
    run = compiled(inside)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (eager, graphed)]
    for _ in range(3):
        x = torch.randn(32, 128).bfloat16()
        dispatch.reset_counters()
        assert_equal([step(eager, inside, x, recipe), step(graphed, run, x, recipe)])
        assert dispatch.counters()["weight_casts"] == 0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(one, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        for is_first in (True, False, None):
            keywords = (recipe, None if name.startswith("chain") else is_first)
            assert torch.equal(run(graphed, x, *keywords), inside(eager, x, *keywords))
    assert dispatch.counters()["weight_casts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), every_value(MAKERS, RECIPES))
def test_inductors_code_around_experts(name, kind):
    recipe = RECIPES[kind]()
    options = {"rows": (16, 32), "cols": 128, "options": {"backend": "inductor"}}
    assert_trains_alike(quantized(name, recipe), recipe, inside, **options)


@pytest.mark.parametrize(
    ("name", "kind"), quickly(list(product(MAKERS, RECIPES)), ("each", "block"))
)
def test_weights_without_a_column_layout(name, kind):
    """Backward makes the column layout from the row layout, and does not keep the column layout."""
    recipe = RECIPES[kind]()
    model = quantized(name, recipe, grads=False)
    other = copy.deepcopy(model)
    x = torch.randn(32, 128).bfloat16()
    results = [step(model, inside, x, recipe), step(other, compiled(inside), x, recipe)]
    assert_equal(results)
    assert not any(weight.get_usages()["columnwise"] for weight in weights_of(other))


@pytest.mark.parametrize(
    ("name", "delay", "kind"),
    quickly(
        every_pair(MAKERS, [False, True], RECIPES),
        ("each", True, "delayed"),
        ("each", False, "block"),
    ),
)
def test_weight_gradients_go_into_main_grad(name, delay, kind):
    recipe = RECIPES[kind]()
    fuse = "accumulate_into_main_grad" if "chain" in name else "fuse_wgrad_accumulation"
    eager = quantized(name, recipe, delay_wgrad_compute=delay, **{fuse: True})
    graphed = copy.deepcopy(eager)
    for model in (eager, graphed):
        for weight in weights_of(model):
            weight.main_grad = torch.ones(weight.shape)
            weight.grad_added_to_main_grad = False
    run = compiled(inside)
    for is_first in (None, None) if "chain" in name else (True, False):
        x = torch.randn(16, 128).bfloat16()
        results = []
        for model, function in ((eager, inside), (graphed, run)):
            results.append(step(model, function, x, recipe, is_first)[:2])
            for op in model.modules() if delay else ():
                if hasattr(op, "backward_dw"):
                    op.backward_dw()
        assert_equal(results)
        for one, other in zip(weights_of(eager), weights_of(graphed), strict=True):
            assert torch.equal(one.main_grad, other.main_grad)
            assert other.grad_added_to_main_grad
            # torch's hooks see a gradient whose values nothing reads.
            assert type(other.grad) is torch.Tensor
            assert (other.grad.shape, other.grad.dtype) == (one.shape, torch.bfloat16)


@pytest.mark.parametrize("name", quickly(MAKERS, "each"))
def test_backward_in_high_precision(name):
    recipe = Float8CurrentScaling(backward_override="high_precision")
    assert_trains_alike(quantized(name, recipe), recipe, inside, rows=(16, 32), cols=128)


@pytest.mark.parametrize(
    ("name", "kind"),
    quickly(every_value(MAKERS, RECIPES), ("one", "delayed")),
)
def test_outside_of_fp8_they_are_dequantised(name, kind):
    def outside(model, x, *_):
        return torch.relu(model(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = quantized(name, RECIPES[kind]())
        assert_trains_alike(model, None, outside, rows=(16, 32), cols=128)


@pytest.mark.slow
def test_rows_that_gemms_lack_and_no_rows():
    def of_splits(model, x, recipe, splits):
        with te.autocast(recipe=recipe):
            return torch.relu(model.experts(x, splits))

    recipe = Float8BlockScaling()
    model = quantized("each", recipe, bias=False)
    other = copy.deepcopy(model)
    run = compiled(of_splits)
    te_fast.auto_pad(True)
    try:
        for splits in ([5, 0, 11], [2, 3, 0], [0, 0, 0], [8, 4, 4]):
            x, splits = torch.randn(sum(splits), 128).bfloat16(), torch.tensor(splits)
            results = [
                step(model, of_splits, x, recipe, splits),
                step(other, run, x, recipe, splits),
            ]
            assert_equal(results)
    finally:
        te_fast.auto_pad(False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_a_mixture(kind):
    """A graph has torch's operations around the experts, so the test compares with plain weights in a graph."""
    recipe = RECIPES[kind]()

    def make():
        return te.MoE(128, 256, 3, topk=2, **OF_OPS)

    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = make()
    assert len(weights_of(model)) == 6
    plain = make()
    with torch.no_grad():
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.copy_(getattr(other, "get_high_precision_init_val", other.clone)())
    run, x = compiled(inside), torch.randn(32, 128).bfloat16()
    assert_equal([step(each, run, x, recipe) for each in (model, plain)])
    assert not torch._dynamo.utils.counters["graph_break"]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step()
        step(model, run, x, recipe)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_weights_that_were_moved_apart():
    recipe = Float8CurrentScaling()
    model = quantized("each", recipe)
    other = copy.deepcopy(model)
    run, x = compiled(inside), torch.randn(32, 128).bfloat16()
    assert_equal([step(model, inside, x, recipe), step(other, run, x, recipe)])
    for each in (model, other):
        each.zero_grad()
        for weight in weights_of(each):
            weight.data = weight.detach().clone()
    assert_equal([step(model, inside, x, recipe), step(other, run, x, recipe)])


@pytest.mark.parametrize("name", quickly(["one", "each"], "each"))
def test_a_weight_that_was_written_before_backward_raises(name):
    recipe = Float8CurrentScaling()
    model = quantized(name, recipe)
    run = compiled(inside)
    for function in (inside, run):
        x = torch.randn(16, 128).bfloat16().requires_grad_()
        y = function(model, x, recipe, None)
        weight = weights_of(model)[-1]
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "each"])
def test_a_recipe_of_another_kind_raises_as_eager_does(name):
    model = quantized(name, Float8CurrentScaling())
    x = torch.randn(16, 128).bfloat16()
    messages = []
    for function in (inside, torch.compile(inside, backend="aot_eager")):
        with pytest.raises(StateError, match="it was quantised for") as caught:
            function(model, x, Float8BlockScaling(), None)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_weights_of_several_kinds_raise_as_in_eager():
    model = quantized("each", Float8CurrentScaling())
    model.experts.weight1 = torch.nn.Parameter(model.experts.weight1.dequantize())
    x = torch.randn(16, 128).bfloat16()
    for function in (inside, torch.compile(inside, backend="aot_eager")):
        with pytest.raises((ShapeError, AttributeError)):
            function(model, x, Float8CurrentScaling(), None)
