"""FP8 weights in compiled models on a GPU: results equal eager ones bit for bit, also where CUDA graphs replay them."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fast.pytorch as te
from graphs import assert_trains_alike, compiled, needs_compile, region, states_of
from recipes import RECIPES
from te_fast.common.recipe import DelayedScaling

pytestmark = [
    pytest.mark.gpu,
    needs_compile,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS = {"params_dtype": torch.bfloat16, "device": "cuda"}
MODELS = {
    "Linear": lambda: te.Linear(256, 512, **OPTIONS),
    "LayerNormMLP": lambda: te.LayerNormMLP(256, 512, activation="swiglu", **OPTIONS),
}


def inside(model, x, recipe, is_first):
    keywords = {} if is_first is None else {"is_first_microbatch": is_first}
    with te.autocast(recipe=recipe):
        return torch.relu(model(x, **keywords))


def quantized(name, recipe, *, grads=True):
    with torch.set_grad_enabled(grads), te.quantized_model_init(recipe=recipe):
        return MODELS[name]()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_layer_trains_as_eager_does(name, kind, backend):
    recipe = RECIPES[kind]()
    options = {"backend": backend}
    model = quantized(name, recipe)
    assert_trains_alike(model, recipe, inside, rows=(32, 64, 96), cols=256, options=options)


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("grads", [True, False])
def test_cuda_graphs_read_them_where_an_optimizer_writes(kind, grads):
    """Each replay makes a column layout if the weight has none."""
    recipe = RECIPES[kind]()
    eager = quantized("LayerNormMLP", recipe, grads=grads)
    graphed = copy.deepcopy(eager)
    run = torch.compile(inside, fullgraph=True, mode="reduce-overhead")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, graphed)]
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for model, function in ((eager, inside), (graphed, run)):
            given = x.clone().requires_grad_()
            y = function(model, given, recipe, None)
            y.square().sum().backward()
            results.append([y.detach().clone(), given.grad.clone(), *states_of(model)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_a_recomputation_behind_the_regions_end_has_the_forwards_scales(name):
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
    eager = MODELS[name]()
    graphed = copy.deepcopy(eager)
    run = compiled(lambda x: torch.relu(te.checkpoint(graphed, x)), backend="inductor")
    for scale in (1.0, 100.0, 0.01):
        x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16) * scale
        results = []
        for model, function in ((eager, lambda x: torch.relu(eager(x))), (graphed, run)):
            given = x.clone().requires_grad_()
            with region(recipe):
                y = function(given)
            (y.square().sum() * scale).backward()
            grads = [parameter.grad for parameter in model.parameters()]
            results.append([y, given.grad, *grads, *states_of(model)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def test_a_compiled_model_is_moved():
    layer = te.Linear(64, 64, device="cpu")
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for device in ("cpu", "cuda"):
        layer.to(device)
        x = torch.randn(16, 64, device=device)
        with region(RECIPES["current"]()), torch.no_grad():
            assert torch.equal(run(x), copy.deepcopy(layer)(x))
