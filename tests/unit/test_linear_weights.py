"""When a Linear quantises its weight, and how long it keeps the quantised weight."""

import copy

import pytest
import torch

import te_fast.pytorch as te
from linear_layers import casts, inputs, make, step
from recipes import RECIPES
from selection import sampled
from te_fast.common.recipe import Float8CurrentScaling


def test_unchanged_weight_is_quantised_once(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert casts(lambda: layer(x)) == 1
        assert casts(lambda: [layer(x) for _ in range(3)]) == 0
        assert casts(lambda: layer(x[:8])) == 0
        assert casts(lambda: layer(x, is_first_microbatch=True)) == 1
        assert casts(lambda: layer(x, is_first_microbatch=False)) == 0


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "copy": lambda layer: layer.weight.copy_(layer.weight * 2),
    "load_state_dict": lambda layer: layer.load_state_dict(
        {"weight": layer.weight * 2, "bias": layer.bias}
    ),
    "data": lambda layer: setattr(layer.weight, "data", layer.weight * 2),
    "parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight * 2)),
    "to": lambda layer: _round_trip(layer),
}


def _round_trip(layer):
    layer.double()
    layer.weight.data = layer.weight.data * 2
    layer.bfloat16()


@pytest.mark.parametrize(
    ("recipe", "change", "first"), sampled(RECIPES, CHANGES, [None, False]), indirect=["recipe"]
)
def test_a_stale_weight_is_never_used(recipe, change, first):
    layer = make(bias=True)
    torch.nn.init.zeros_(layer.bias)
    x, _ = inputs(32, layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(x, is_first_microbatch=None if first is None else True)
        CHANGES[change](layer)
        got = layer(x, is_first_microbatch=first)
        fresh = make()
        fresh.load_state_dict(layer.state_dict(), strict=False)
        assert torch.equal(got, fresh(x))


def test_optimizer_steps_are_seen(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        outputs.append(step(layer, x, grad, recipe).detach())
        optimizer.step()
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


class RawOptimizer(torch.optim.Optimizer):
    """Writes past torch's version counters, as apex's and Transformer Engine's fused optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(2)


def test_steps_of_optimizers_that_write_through_raw_pointers_are_seen(recipe):
    layer = make(bias=False)
    x, _ = inputs(32, layer)
    optimizer = RawOptimizer(layer.parameters())
    with te.autocast(recipe=recipe):
        layer(x)
        version = layer.weight._version
        optimizer.step()
        assert layer.weight._version == version
        got = layer(x)
        fresh = make(bias=False)
        fresh.load_state_dict(layer.state_dict(), strict=False)
        assert torch.equal(got, fresh(x))


def test_gradient_accumulation_keeps_the_weight_from_the_second_microbatch_on():
    layer = make()
    x, grad = inputs(32, layer)

    def accumulate():
        for _ in range(4):
            step(layer, x, grad, Float8CurrentScaling())

    # The first backward frees the quantised weight, since an optimizer step might have followed.
    assert casts(accumulate) == 2
    for _ in range(2):
        with torch.no_grad():
            layer.weight.add_(1)
        assert casts(accumulate) == 1


def test_a_weight_that_is_trained_is_freed_by_its_backward(recipe):
    layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, grad = inputs(32, layer)
    for _ in range(3):
        with te.autocast(recipe=recipe):
            y = layer(x)
        # `y` keeps its autograd node alive, as in a training loop.
        assert y.grad_fn.te_saved.holds_weights
        y.backward(grad)
        assert not y.grad_fn.te_saved.holds_weights
        assert not layer._fp8_workspaces
        optimizer.step()
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(grad, retain_graph=True)
    y.backward(grad)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(grad)


def test_a_frozen_weight_is_quantised_once(recipe):
    layer, head = make(), make()
    layer.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    x, _ = inputs(32, layer)

    def train():
        for _ in range(3):
            with te.autocast(recipe=recipe):
                y = layer(x)
            y.sum().backward()
            optimizer.step()

    if recipe.delayed():
        assert casts(train) == 3  # each step quantises with another scale
    else:
        assert casts(train) == 1


def evaluated(layer, x, recipe):
    with torch.no_grad(), te.autocast(recipe=recipe):
        return layer(x)


def test_a_frozen_weight_that_an_optimizer_writes_is_quantised_again():
    """It was frozen after its backward; torch's fused optimizers count no versions."""
    recipe = Float8CurrentScaling()
    layer = make()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        layer(x).backward(grad)
    layer.requires_grad_(False)
    evaluated(layer, x, recipe)
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(evaluated(layer, x, recipe), evaluated(copy.deepcopy(layer), x, recipe))


def test_change_between_forward_and_backward_is_an_error(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def test_weight_quantised_anew_between_two_forwards_and_their_backwards():
    layer, other = make(), make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=Float8CurrentScaling()):
        first = layer(x)
        layer(x, is_first_microbatch=True)
        wanted = other(x)
    first.backward(grad)
    got = x.grad.clone()
    x.grad = None
    wanted.backward(grad)
    assert torch.equal(got, x.grad)
