"""Factories of quantizers on a GPU: the results of the recipes that the quantizers are those of."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from te_fast.pytorch import ops
from te_fast.pytorch.custom_recipes import quantizer_factories as factories

pytestmark = pytest.mark.gpu

PLAIN = {
    "delayed": (factories.delayed_scaling_factory, DelayedScaling),
    "current": (factories.current_scaling_factory, Float8CurrentScaling),
    "block": (factories.float8_block_scaling_factory, Float8BlockScaling),
    "plain": (factories.high_precision_factory, None),
}
OPTIONS = {"device": "cuda", "dtype": torch.bfloat16}
PARAMS = {"device": "cuda", "params_dtype": torch.bfloat16}
LAYERS = {
    "linear": lambda: te.Linear(128, 256, **PARAMS),
    "layernorm_mlp": lambda: te.LayerNormMLP(128, 256, **PARAMS),
    "ops": lambda: ops.Sequential(
        ops.RMSNorm(128, **OPTIONS), ops.Linear(128, 256, **OPTIONS), ops.SwiGLU()
    ),
    "transformer_layer": lambda: te.TransformerLayer(
        128, 256, 2, attention_dropout=0.0, hidden_dropout=0.0, **PARAMS
    ),
    "mixture": lambda: te.MoE(128, 256, 4, 2, **OPTIONS),
}


def steps(module, recipe, *, enabled=True, count=4):
    """Results and gradients of training steps on random data, and the parameters behind them."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _ in range(count):
        x = torch.randn(64, 2, 128, **OPTIONS).requires_grad_()
        with te.autocast(enabled=enabled, recipe=recipe):
            y = module(x)
        y.backward(torch.randn_like(y))
        seen += [y.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seen + [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", LAYERS)
def test_a_factory_of_one_recipe_trains_as_the_recipe_does(name, kind, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.manual_seed(1)
    first = LAYERS[name]()
    second = copy.deepcopy(first)
    factory, plain = PLAIN[kind]
    expected = steps(first, plain and plain(), enabled=plain is not None)
    for one, other in zip(expected, steps(second, CustomRecipe(qfactory=factory)), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_a_graph_of_layers_with_different_recipes():
    torch.manual_seed(1)
    names = ["current", "plain", "block", "delayed"]
    model = torch.nn.Sequential(*[te.Linear(128, 128, name=name, **PARAMS) for name in names])
    recipe = CustomRecipe(
        qfactory=lambda role: PLAIN[role.name if role is not None else "plain"][0](role)
    )
    x = torch.randn(64, 128, **OPTIONS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream), te.autocast(recipe=recipe):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph), te.autocast(recipe=recipe):
        y = model(x)
    x.copy_(torch.randn(64, 128, **OPTIONS))
    graph.replay()
    with torch.no_grad(), te.autocast(recipe=recipe):
        torch.testing.assert_close(y, model(x), rtol=0, atol=0)
