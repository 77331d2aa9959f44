"""Regions inside of a graph whose call is inside of another region."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import te_fast.pytorch as te
from graphs import compiled, needs_compile, states_of
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling

pytestmark = [needs_compile, pytest.mark.usefixtures("fresh_dynamo")]

RECIPE = DelayedScaling(amax_history_len=4)
OUTER = {
    "the same": {"recipe": RECIPE},
    "another": {"recipe": Float8CurrentScaling()},
    "disabled": {"enabled": False},
}


@pytest.mark.parametrize("outer", OUTER)
def test_the_outermost_region_updates_the_scales(outer):
    """Two calls in one region use the same scales, as eager calls do."""
    eager = te.LayerNormLinear(32, 32, device="cpu")
    graphed = copy.deepcopy(eager)

    def forward(layer, x):
        with te.autocast(recipe=RECIPE):
            return layer(x)

    for run, layer in ((forward, eager), (compiled(forward), graphed)):
        torch.manual_seed(0)
        layer.found = []
        for scale in (1, 2, 3):
            with te.autocast(**OUTER[outer]):
                results = [run(layer, scale * torch.randn(16, 32)) for _ in range(2)]
            for y in results:
                y.square().sum().backward()
            layer.found += results
            layer.found += [
                layer.weight.grad.clone(),
                *(state.clone() for state in states_of(layer)),
            ]
    assert all(map(torch.equal, eager.found, graphed.found))


def test_a_graph_of_both_directions_updates_the_scales():
    """No backward of torch's is running when such a graph runs."""
    eager = te.LayerNormLinear(32, 32, device="cpu")
    graphed = copy.deepcopy(eager)
    x = torch.randn(16, 32)

    def step(layer, x):
        return torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])

    with te.autocast(recipe=RECIPE):
        step(eager, x.clone().requires_grad_())
    with te.autocast(recipe=RECIPE):  # the trace runs the step, too
        graph = make_fx(lambda x: step(graphed, x))(x.clone().requires_grad_())
    for scale in (1, 2, 3):
        results = []
        for run in (lambda x: step(eager, x), graph):
            with te.autocast(recipe=RECIPE):
                results.append(run((scale * x).requires_grad_()))
        assert all(map(torch.equal, *results))
        for one, two in zip(states_of(eager), states_of(graphed), strict=True):
            assert torch.equal(one, two)


@needs_compile
def test_backwards_of_one_region_update_the_scales_of_gradients_once():
    def scales(run):
        torch.manual_seed(0)
        layer = te.Linear(32, 32, bias=False, device="cpu")
        call = run(layer)
        found = []
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            for factor in (1.0, 10.0, 100.0):
                call(factor * torch.ones(16, 32)).square().sum().backward()
                found.append(layer.fp8_meta["scaling_bwd"].scale.tolist())
        return found

    def compiled(layer):
        return torch.compile(layer, fullgraph=True, backend="aot_eager")

    assert scales(compiled) == scales(lambda layer: layer)
