"""Recomputation of what runs inside of nodes of Python: chains with operations of others, layers that recompute."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_fast
import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling
from te_fast.pytorch import ops


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_chain_with_a_reshape_has_the_same_bits(use_reentrant):
    """A first run without gradients must not hand results on in FP8 where the second run cannot."""
    torch.manual_seed(0)
    options = {"device": "cpu", "dtype": torch.bfloat16}
    linears = (ops.BasicLinear(32, 32, **options) for _ in range(2))
    chain = ops.Sequential(ops.Reshape([-1, 32]), *linears)
    twin = copy.deepcopy(chain)
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    with te.autocast(recipe=DelayedScaling()):
        wanted = chain(x)
    with te.autocast(recipe=DelayedScaling()):
        y = te.checkpoint(twin, x, use_reentrant=use_reentrant)
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_recomputes_pads_rows_again(use_reentrant):
    """Backward repeats the forward where the region, which says what is padded, is over."""
    te_fast.auto_pad(True)
    try:
        layer = te.LayerNormMLP(32, 64, checkpoint=True, device="cpu")
        twin = copy.deepcopy(layer)
        x = torch.randn(5, 32, requires_grad=True)
        with te.autocast(recipe=Float8BlockScaling()):
            wanted = torch.autograd.grad(twin(x).square().sum(), x)[0]
            y = torch_checkpoint(layer, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
        assert torch.equal(x.grad, wanted)
    finally:
        te_fast.auto_pad(False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_in_a_recomputation_leaves_maxima_of_an_evaluation(use_reentrant):
    """Without recomputation, backward enters no region, and the maxima wait for the next region's end."""
    layer = te.Linear(32, 32, device="cpu")
    twin = copy.deepcopy(layer)
    x = torch.randn(16, 32, requires_grad=True)

    def run(module, x):
        with te.autocast(recipe=DelayedScaling()):
            x = module(x)
        return x.exp()  # torch's checkpoint stops inside of the region without it

    def step(module, forward):
        y = forward()
        with torch.no_grad():
            run(module, 2 * x)
        y.sum().backward()
        return module.fp8_meta["scaling_fwd"].amax_history.clone()

    wanted = step(layer, lambda: run(layer, x))
    found = step(twin, lambda: te.checkpoint(run, twin, x, use_reentrant=use_reentrant))
    assert torch.equal(found, wanted)
    assert torch.equal(twin.weight.grad, layer.weight.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_regions_inside_of_checkpoints_update_scales_before_the_next_forward(use_reentrant):
    """The end of a region updates scales although a reentrant checkpoint's first run has no gradients."""
    layer = te.Linear(32, 32, device="cpu")
    twin = copy.deepcopy(layer)
    inputs = [(scale * torch.randn(16, 32)).requires_grad_() for scale in (1, 4, 2)]

    def step(module, forward):
        def run(x):
            with te.autocast(recipe=DelayedScaling()):
                return module(x)

        outs = [forward(run, x) for x in inputs]
        sum(y.square().sum() for y in outs).backward()
        grads = [x.grad.clone() for x in inputs]
        for x in inputs:
            x.grad = None
        return [*outs, *grads, module.weight.grad, module.fp8_meta["scaling_fwd"].scale.clone()]

    wanted = step(layer, lambda run, x: run(x))
    found = step(twin, lambda run, x: te.checkpoint(run, x, use_reentrant=use_reentrant))
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got, expected)
