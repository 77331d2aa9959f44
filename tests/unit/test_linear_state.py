"""Parameters and scales of a Linear: made, copied, saved and loaded."""

import copy
import pickle

import pytest
import torch

import te_fast.pytorch as te
from linear_layers import close, expected, inputs, make, step
from te_fast.common.recipe import DelayedScaling


def test_state_dict_both_ways_with_nn_linear():
    layer, plain = make(), torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)
    torch.nn.init.normal_(layer.weight)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.weight, plain.weight)


def test_delayed_scaling_survives_a_checkpoint(tmp_path):
    layer = make()
    x, grad = inputs(32, layer)
    recipe = DelayedScaling()
    for _ in range(3):
        step(layer, x, grad, recipe)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    restored = make()
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(restored.fp8_meta[key].scale, layer.fp8_meta[key].scale)
        assert torch.equal(restored.fp8_meta[key].amax_history, layer.fp8_meta[key].amax_history)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), restored(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent(recipe, how):
    layer = make()
    x, grad = inputs(32, layer)
    step(layer, x, grad, recipe)
    other = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), other(x))
        other.weight.mul_(2)
        assert not torch.equal(layer(x), other(x))


def test_meta_device_then_reset():
    layer = te.Linear(64, 48, device="meta", params_dtype=torch.bfloat16)
    assert layer.weight.is_meta
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert 0.015 < layer.weight.std() < 0.03
    assert layer.bias.abs().max() == 0
    x, grad = inputs(8, layer)
    with torch.no_grad(), te.autocast():
        close(layer(x), expected(layer, x, grad, "delayed")["y"], torch.bfloat16)


def test_initialisation():
    layer = te.Linear(256, 256, device="cpu")
    assert layer.weight.dtype == torch.float32
    assert abs(layer.weight.std().item() - 0.023) < 1e-3
    ones = te.Linear(16, 16, device="cpu", init_method=torch.nn.init.ones_)
    assert (ones.weight == 1).all()
