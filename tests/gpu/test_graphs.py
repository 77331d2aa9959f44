"""Compiled models on a GPU equal eager ones bit for bit, also where CUDA graphs replay them."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fast.pytorch as te
from graphs import assert_trains_alike, needs_compile, states_of
from recipes import RECIPES

pytestmark = [
    pytest.mark.gpu,
    needs_compile,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS = {"dtype": torch.bfloat16, "device": "cuda"}
MODELS = {
    "Linear": lambda: te.Linear(256, 512, params_dtype=torch.bfloat16, device="cuda"),
    "LayerNormMLP": lambda: te.LayerNormMLP(
        256,
        512,
        normalization="RMSNorm",
        activation="swiglu",
        params_dtype=torch.bfloat16,
        device="cuda",
    ),
    "Sequential": lambda: te.ops.Sequential(
        te.ops.RMSNorm(256, **OPTIONS),
        te.ops.Linear(256, 512, **OPTIONS),
        te.ops.GELU(),
        te.ops.Linear(512, 256, **OPTIONS),
    ),
}


def inside(model, x, recipe, is_first):
    keywords = {} if is_first is None else {"is_first_microbatch": is_first}
    with te.autocast(recipe=recipe):
        return torch.relu(model(x, **keywords))


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_compiled_layer_trains_as_eager_does(make, kind):
    assert_trains_alike(make(), RECIPES[kind](), inside, rows=(32, 64, 96), cols=256)


@pytest.mark.parametrize("kind", RECIPES)
def test_microbatches_and_inductors_code(kind):
    model = MODELS["Linear"]()
    options = {"backend": "inductor"}
    assert_trains_alike(
        model,
        RECIPES[kind](),
        inside,
        rows=(32, 64),
        cols=256,
        microbatches=(True, False),
        options=options,
    )


@pytest.mark.parametrize("kind", RECIPES)
def test_replayed_graphs_train_as_eager_does(kind):
    """With ``reduce-overhead``, the host runs no code of te_fast after two calls."""
    eager = MODELS["LayerNormMLP"]()
    graphed, recipe = copy.deepcopy(eager), RECIPES[kind]()
    run = torch.compile(inside, fullgraph=True, mode="reduce-overhead")
    for step in range(6):
        x = torch.randn(64, 256, **OPTIONS)
        results = []
        for function, model in ((inside, eager), (run, graphed)):
            torch.compiler.cudagraph_mark_step_begin()
            given = x.clone().requires_grad_()
            y = function(model, given, recipe, None)
            y.backward(torch.ones_like(y))
            results.append(
                [y.clone(), given.grad.clone(), *(p.grad.clone() for p in model.parameters())]
            )
            for p in model.parameters():
                with torch.no_grad():
                    p -= 0.1 * p.grad
                p.grad = None
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two), step
        for one, two in zip(states_of(eager), states_of(graphed), strict=True):
            assert torch.equal(one, two), step


def test_replayed_graphs_use_scales_that_moved():
    eager = MODELS["LayerNormMLP"]()
    graphed, recipe = copy.deepcopy(eager), RECIPES["delayed"]()
    run = torch.compile(inside, fullgraph=True, mode="reduce-overhead")
    for step in range(8):
        x = torch.randn(64, 256, **OPTIONS)
        results = []
        for function, model in ((inside, eager), (run, graphed)):
            torch.compiler.cudagraph_mark_step_begin()
            y = function(model, x, recipe, None)
            y.float().square().sum().backward()
            grads = [parameter.grad.clone() for parameter in model.parameters()]
            results.append([y.clone(), *grads, *(state.clone() for state in states_of(model))])
            model.zero_grad()
            for key in ("scaling_fwd", "scaling_bwd") if step == 4 else ():
                state = model.fp8_meta[key]
                state.scale, state.amax_history = state.scale / 4, state.amax_history * 4
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), step
