"""Layers and chains in graphs that have a parameter several times."""

from __future__ import annotations

import pytest
import torch

import te_fast.pytorch as te
from graphs import assert_trains_alike, compiled, needs_compile
from recipes import RECIPES
from te_fast.pytorch import ops

pytestmark = [needs_compile, pytest.mark.usefixtures("fresh_dynamo")]


def twice(**options):
    linear = ops.Linear(32, 32, device="cpu", **options)
    return ops.Sequential(linear, ops.ReLU(), linear)


def tied(**options):
    first, second = (ops.Linear(32, 32, device="cpu", **options) for _ in range(2))
    second.weight = first.weight
    return ops.Sequential(first, ops.ReLU(), second)


def layer(**options):
    fused = bool(options)
    module = te.LayerNormMLP(32, 32, device="cpu", fuse_wgrad_accumulation=fused)
    module.fc2_weight = module.fc1_weight
    return module


MAKERS = [twice, tied, layer]


def forward(model, x, recipe, is_first):
    with te.autocast(recipe=recipe):
        return torch.relu(model(x, is_first_microbatch=is_first))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", RECIPES)
def test_a_model_trains_as_in_eager(make, kind):
    for microbatches in ((None,), (True, False)):
        options = {"rows": (16, 24), "microbatches": microbatches}
        assert_trains_alike(make(), RECIPES[kind](), forward, **options)


@pytest.mark.parametrize("make", MAKERS)
def test_gradients_go_into_main_grad(make):
    found = []
    for run in (forward, compiled(forward)):
        torch.manual_seed(0)
        model = make(accumulate_into_main_grad=True)
        for parameter in model.parameters():
            parameter.main_grad = torch.ones_like(parameter)
        for is_first in (True, False):
            y = run(model, torch.randn(16, 32), RECIPES["current"](), is_first)
            y.square().sum().backward()
        found.append([parameter.main_grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
