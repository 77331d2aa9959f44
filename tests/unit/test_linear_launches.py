"""The kernels that a Linear launches."""

import torch

import te_fast.pytorch as te
from linear_layers import inputs, make, step
from recipes import name_of
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling


def test_launches(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    step(layer, x, grad, recipe)
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(x)
        before = dispatch.counters()
        with dispatch.record() as launches:
            layer(x)
        after = dispatch.counters()
    kernel = {
        "delayed": ["cast_bf16_e4m3"],
        "current": ["cast_current_bf16_e4m3"],
        "block": ["cast_block_1d_bf16_e4m3"],
    }
    name = name_of(recipe)
    assert [launch.name for launch in launches] == [*kernel[name], "gemm"]
    assert after["plan_misses"] == before["plan_misses"]
    assert after["allocations"] == before["allocations"]


def test_all_scales_of_a_direction_are_updated_by_one_launch():
    layers = [make() for _ in range(5)]
    x, grad = inputs(32, layers[0])
    recipe = DelayedScaling()
    for layer in layers:
        step(layer, x, grad, recipe)
    with dispatch.record() as launches:
        with te.autocast(recipe=recipe):
            ys = [layer(x) for layer in layers]
        torch.autograd.backward(ys, [grad] * 5)
    updates = [launch.name for launch in launches if launch.name.startswith("scale_update")]
    assert len(updates) == 2  # one for the forward, one for the backward
    with torch.no_grad(), dispatch.record() as launches, te.autocast(recipe=recipe):
        layers[0](x)
    assert not any(launch.name.startswith("scale_update") for launch in launches)
