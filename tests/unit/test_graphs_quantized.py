"""FP8 weights in graphs: a compiled model has the bits of an eager one."""

from __future__ import annotations

import copy
import warnings
from itertools import product

import pytest
import torch
import torch._dynamo

import te_fast
import te_fast.pytorch as te
from graphs import assert_trains_alike, compiled, needs_compile, region
from quantized_tensors import quantizer
from recipes import RECIPES
from selection import quickly
from te_fast import dispatch
from te_fast.common.recipe import Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import StateError, UnsupportedError
from te_fast.tensor.primary import is_quantized

pytestmark = [needs_compile, pytest.mark.usefixtures("fresh_dynamo")]


def counters():
    return torch._dynamo.utils.counters


OPTIONS = {"params_dtype": torch.bfloat16, "device": "cpu"}
OF_OPS = {"dtype": torch.bfloat16, "device": "cpu"}
MAKERS = {
    "Linear": lambda **more: te.Linear(128, 128, **OPTIONS, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(128, 128, **OPTIONS, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(128, 128, **OPTIONS, **more),
    "Sequential": lambda: te.ops.Sequential(
        te.ops.RMSNorm(128, **OF_OPS),
        te.ops.Linear(128, 256, **OF_OPS),
        te.ops.GELU(),
        te.ops.BasicLinear(256, 128, **OF_OPS),
    ),
}
every_recipe = pytest.mark.parametrize("kind", quickly(RECIPES, "current"))


def quantized(make, recipe, *, grads=True, **options):
    with torch.set_grad_enabled(grads), te.quantized_model_init(recipe=recipe):
        model = make(**options)
    assert any(is_quantized(parameter) for parameter in model.parameters())
    return model


def inside(model, x, recipe, is_first):
    """Run a model so that the graph enters the region."""
    keywords = {} if is_first is None else {"is_first_microbatch": is_first}
    with te.autocast(recipe=recipe):
        return torch.relu(model(x, **keywords))


@pytest.mark.every_torch
@pytest.mark.parametrize(
    ("name", "kind"),
    quickly(
        list(product(MAKERS, RECIPES)), ("LayerNormMLP", "block"), slow=[("Linear", "delayed")]
    ),
)
def test_a_compiled_layer_trains_as_eager_does(name, kind):
    recipe = RECIPES[kind]()
    assert_trains_alike(quantized(MAKERS[name], recipe), recipe, inside, cols=128)
    # There is one graph for the first row count, and one for all others.
    assert counters()["stats"]["unique_graphs"] == 2
    assert not counters()["graph_break"]


@pytest.mark.slow
@every_recipe
def test_an_optimizer_steps_on_them(kind):
    recipe = RECIPES[kind]()
    eager = quantized(MAKERS["LayerNormMLP"], recipe)
    graphed = copy.deepcopy(eager)
    run = compiled(inside)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (eager, graphed)]
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(32, 128).bfloat16()
        for model, function in ((eager, inside), (graphed, run)):
            function(model, x, recipe, None).square().sum().backward()
        dispatch.reset_counters()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(one, other)
    assert counters()["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@every_recipe
def test_no_weight_is_quantised_in_a_graph(kind):
    recipe = RECIPES[kind]()
    model = quantized(MAKERS["LayerNormMLP"], recipe)
    run = compiled(inside)
    x = torch.randn(32, 128).bfloat16()
    run(model, x, recipe, None).sum().backward()
    dispatch.reset_counters()
    run(model, x, recipe, None).sum().backward()
    with torch.no_grad():
        run(model, x, recipe, None)
    assert dispatch.counters()["weight_casts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_inductors_code_around_a_layer(kind):
    recipe = RECIPES[kind]()
    model = quantized(MAKERS["LayerNormLinear"], recipe)
    assert_trains_alike(
        model, recipe, inside, rows=(16, 32), cols=128, options={"backend": "inductor"}
    )


@pytest.mark.parametrize(
    ("name", "kind"), quickly(list(product(MAKERS, RECIPES)), ("LayerNormLinear", "current"))
)
def test_weights_without_a_column_layout(name, kind):
    """Backward makes the column layout from the row layout, and does not keep the column layout."""
    recipe = RECIPES[kind]()
    model = quantized(MAKERS[name], recipe, grads=False)
    run = compiled(inside)
    x = torch.randn(32, 128).bfloat16()
    results = []
    for function in (run, inside):
        given = x.clone().requires_grad_()
        other = copy.deepcopy(model)
        y = function(other, given, recipe, None)
        y.square().sum().backward()
        results.append([y, given.grad, *(parameter.grad for parameter in other.parameters())])
        if function is run:
            usages = [p.get_usages() for p in other.parameters() if is_quantized(p)]
            assert usages
            assert not any(usage["columnwise"] for usage in usages)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delay", "kind"), quickly(list(product([False, True], RECIPES)), (True, "block"))
)
def test_weight_gradients_go_into_main_grad(delay, kind):
    recipe = RECIPES[kind]()
    model = quantized(
        MAKERS["Linear"], recipe, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay
    )
    other = copy.deepcopy(model)
    for layer in (model, other):
        layer.weight.main_grad = torch.ones(128, 128)
        layer.weight.grad_added_to_main_grad = False
    run = compiled(inside)
    for is_first in (True, False):
        x = torch.randn(16, 128).bfloat16()
        for layer, function in ((model, inside), (other, run)):
            function(layer, x, recipe, is_first).sum().backward()
            if delay:
                layer.backward_dw()
        assert torch.equal(model.weight.main_grad, other.weight.main_grad)
        assert other.weight.grad_added_to_main_grad
        # torch's hooks see a gradient whose values nothing reads.
        for layer in (model, other):
            assert type(layer.weight.grad) is torch.Tensor
            assert (layer.weight.grad.shape, layer.weight.grad.dtype) == (
                (128, 128),
                torch.bfloat16,
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "make"),
    quickly(
        list(
            product(("high_precision", "dequantized"), (Float8CurrentScaling, Float8BlockScaling))
        ),
        ("high_precision", Float8CurrentScaling),
    ),
)
def test_backward_in_another_precision(override, make):
    recipe = make(backward_override=override)
    model = quantized(MAKERS["Linear"], recipe)
    assert_trains_alike(model, recipe, inside, rows=(16, 32), cols=128)


@pytest.mark.parametrize(
    ("name", "kind"), quickly(list(product(MAKERS, RECIPES)), ("Linear", "delayed"))
)
def test_outside_of_fp8_they_are_dequantised(name, kind):
    model = quantized(MAKERS[name], RECIPES[kind]())

    def outside(model, x, *_):
        return torch.relu(model(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_trains_alike(model, None, outside, rows=(16, 32), cols=128)
    assert not counters()["graph_break"]


def test_operations_of_torch_read_them():
    layer = quantized(MAKERS["Linear"], Float8BlockScaling())
    run = compiled(lambda x: x @ layer.weight.t() + layer.weight.square().sum())
    x = torch.randn(16, 128).bfloat16()
    expected = x @ layer.weight.dequantize().t() + layer.weight.dequantize().square().sum()
    y = run(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    grad = layer.weight.grad
    layer.weight.grad = None
    (x @ layer.weight.t() + layer.weight.square().sum()).sum().backward()
    assert torch.equal(grad, layer.weight.grad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["current", "block"])
def test_activations_are_recomputed(kind):
    recipe = RECIPES[kind]()
    model = quantized(MAKERS["LayerNormMLP"], recipe, checkpoint=True)
    assert_trains_alike(model, recipe, inside, rows=(16, 32), cols=128)


@pytest.mark.slow
def test_rows_that_gemms_lack_and_no_rows():
    recipe = Float8BlockScaling()
    model = quantized(MAKERS["LayerNormMLP"], recipe)
    te_fast.auto_pad(True)
    try:
        assert_trains_alike(model, recipe, inside, rows=(16, 5, 0, 16), cols=128)
    finally:
        te_fast.auto_pad(False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_a_transformer_layer(kind):
    """Attention has other kernels in a graph, so the test compares with weights in high precision in a graph."""
    recipe = RECIPES[kind]()

    def make():
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        return te.TransformerLayer(128, 256, 2, fuse_qkv_params=True, **dropout, **OPTIONS)

    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = make()
    plain = make()
    with torch.no_grad():
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.copy_(getattr(other, "get_high_precision_init_val", other.clone)())

    def forward(model, x):
        with te.autocast(recipe=recipe):
            return model(x)

    run, x = compiled(forward), torch.randn(16, 2, 128).bfloat16()
    results = []
    for each in (model, plain):
        given = x.clone().requires_grad_()
        y = run(each, given)
        y.square().sum().backward()
        results.append([y, given.grad, *(parameter.grad for parameter in each.parameters())])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    assert not counters()["graph_break"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = counters()["stats"]["unique_graphs"]
    for _ in range(3):
        optimizer.step()
        run(model, x.requires_grad_()).square().sum().backward()
    # The input has needed a gradient from the start.
    assert counters()["stats"]["unique_graphs"] == before


def test_layers_of_one_kind_share_a_graph():
    recipe = Float8CurrentScaling()
    blocks = [quantized(MAKERS["Linear"], recipe) for _ in range(3)]
    for block in blocks:
        block.forward = compiled(block.forward)
    x = torch.randn(16, 128).bfloat16().requires_grad_()
    with te.autocast(recipe=recipe):
        for block in blocks:
            block(x).sum().backward()
    # Two graphs are allowed: torch compiles the first block before it knows that the parameter may be another one.
    assert counters()["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_a_recipe_of_another_kind_raises_as_eager_does():
    layer = quantized(MAKERS["Linear"], Float8CurrentScaling(), name="first")
    x = torch.randn(16, 128).bfloat16()
    messages = []
    for function in (inside, torch.compile(inside, backend="aot_eager")):
        with pytest.raises(StateError, match="it was quantised for") as caught:
            function(layer, x, Float8BlockScaling(), None)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.every_torch
def test_a_weight_that_was_written_before_backward_raises():
    recipe = Float8CurrentScaling()
    layer = quantized(MAKERS["Linear"], recipe)
    run = compiled(inside)
    for function in (inside, run):
        x = torch.randn(16, 128).bfloat16().requires_grad_()
        y = function(layer, x, recipe, None)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(128, 128))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_fake_tensors_and_make_fx():
    recipe = Float8CurrentScaling()
    layer = quantized(MAKERS["Linear"], recipe)
    x = torch.randn(16, 128).bfloat16()

    def forward(x):
        with te.autocast(recipe=recipe):
            return layer(x)

    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        graph = make_fx(forward)(x)
        assert "te_fast.program_forward" in graph.code
        assert torch.equal(graph(x), forward(x))


def test_the_region_around_the_graph():
    recipe = Float8CurrentScaling()
    layer = quantized(MAKERS["Linear"], recipe)
    run = compiled(lambda x: torch.relu(layer(x)))
    x = torch.randn(16, 128).bfloat16()
    with region(recipe):
        assert torch.equal(run(x), torch.relu(layer(x)))
    assert counters()["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("name", "kind", "enabled"),
    quickly(
        [
            *product(("LayerNormLinear", "Sequential"), RECIPES, (True, False)),
            *product(("Linear",), RECIPES, (False,)),
        ],
        ("Linear", "block", False),
        slow=[("LayerNormLinear", "current", True)],
    ),
)
def test_a_quantised_input_is_dequantised_where_eager_does(name, kind, enabled):
    recipe, model = RECIPES[kind](), MAKERS[name]()

    def forward(model, x):
        with te.autocast(enabled=enabled, recipe=recipe):
            return model(x)

    results = []
    for function, each in ((forward, model), (compiled(forward), copy.deepcopy(model))):
        x = quantizer({"block": "1d"}.get(kind, kind))(torch.randn(32, 128).bfloat16())
        x.copy_(torch.linspace(-3, 3, 32 * 128).view(32, 128))
        y = function(each, x.requires_grad_())
        y.float().square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in each.parameters())])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.every_torch
def test_bytes_of_a_quantised_input_are_refused():
    x = quantizer("current")(torch.randn(32, 128).bfloat16())
    for ops in ((), (te.ops.Identity(),)):
        chain = te.ops.Sequential(*ops, te.ops.BasicLinear(128, 128, **OF_OPS))
        with te.autocast(recipe=Float8CurrentScaling()):
            chain(x)  # makes the plan, which a trace of torch 2.8 would not
        with (
            pytest.raises(UnsupportedError, match="passes no quantised input"),
            te.autocast(recipe=Float8CurrentScaling()),
        ):
            torch.compile(chain, backend="aot_eager")(x)
