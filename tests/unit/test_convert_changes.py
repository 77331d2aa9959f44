"""convert: who changes modules after the conversion is heard, and the surroundings of the call do not matter."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune

import te_fast
import te_fast.pytorch as te
from llama_like import Experts, MixtureOfExperts, Model
from recipes import RECIPES
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.convert.forwards import DecoderForward
from te_fast.runtime.compiling import CAN_COMPILE

TOKENS = torch.randint(1, 96, (2, 16), generator=torch.Generator().manual_seed(3))


def sequence():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def pair(make=lambda: Model(1)):
    """Return a converted model, and the same model as it was."""
    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    te_fast.convert(model)
    return model, other


def given_to(model):
    return TOKENS if isinstance(model, Model) else torch.linspace(-2, 2, 512).reshape(16, 32)


def check(model, other):
    x = given_to(other)
    torch.testing.assert_close(model(x), other(x), rtol=1e-4, atol=1e-5)


PLACES = {
    "norm": "layers.0.input_layernorm",
    "projection": "layers.0.self_attn.k_proj",
    "attention": "layers.0.self_attn",
    "feed-forward": "layers.0.mlp",
    "down": "layers.0.mlp.down_proj",
    "activation": "layers.0.mlp.act_fn",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "how", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_forward_that_is_replaced_in_a_decoder_layer_runs(place, how):
    model, other = pair()
    model = how(model)
    before = model(TOKENS)
    for each in (model, other):
        module = each.get_submodule(PLACES[place])
        old = module.forward

        def doubled(*args, old=old, **given):
            y = old(*args, **given)
            return (2 * y[0], *y[1:]) if isinstance(y, tuple) else 2 * y

        module.forward = doubled
    check(model, other)
    assert not torch.allclose(model(TOKENS), before)


@pytest.mark.parametrize("place", [0, 1])
def test_a_forward_that_is_replaced_in_a_sequence_runs(place):
    model, other = pair(sequence)
    for each in (model, other):
        each[place].forward = lambda x, old=each[place].forward: 2 * old(x)
    check(model, other)


@pytest.mark.parametrize("make", [lambda: Model(1), sequence])
def test_hooks_of_all_modules_run_once_for_each_module(make):
    model, other = pair(make)
    seen = []

    def double(module, _, y):
        if isinstance(module, nn.Linear):
            seen.append(module)
            return 2 * y
        return None

    handle = register_module_forward_hook(double)
    try:
        check(model, other)
        assert len(seen) == 2 * sum(isinstance(module, nn.Linear) for module in model.modules())
    finally:
        handle.remove()
    check(model, other)


CHANGES = {
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "weight norm": lambda module: parametrizations.weight_norm(module),
    "a bias more": lambda module: setattr(
        module, "bias", nn.Parameter(torch.ones(module.out_features))
    ),
}


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: Model(1), "layers.0.self_attn.o_proj"),
        (lambda: Model(1), "layers.0.mlp.up_proj"),
        (sequence, "1"),
        (lambda: nn.Sequential(nn.Linear(32, 32, bias=False)), "0"),
    ],
)
def test_parameters_that_come_and_go_are_seen(make, place, change, is_compiled):
    if is_compiled and not CAN_COMPILE:
        pytest.skip("torch 2.8 or later")
    model, other = pair(make)
    for each in (model, other):
        CHANGES[change](each.get_submodule(place))
    check(torch.compile(model) if is_compiled else model, other)


def test_pruned_layers_are_layers_again():
    model, other = pair()
    for each in (model, other):
        place = each.layers[0].mlp.up_proj
        prune.l1_unstructured(place, "weight", 0.5)
        prune.remove(place, "weight")
    ways = model.layers[0].ways
    check(model, other)
    assert model.layers[0].ways == ways


def test_an_activation_of_experts_that_is_replaced_runs():
    model = nn.Sequential(Experts(4, 64, 48))
    te_fast.convert(model)
    other = Experts(4, 64, 48)
    other.load_state_dict(model[0].state_dict())
    x = torch.randn(8, model[0].down_proj.shape[1])
    numbers, weights = torch.tensor([[0, 1]] * 8), torch.full((8, 2), 0.5)
    for each in (model[0], other):
        each.act_fn = nn.Tanh()
    torch.testing.assert_close(model[0](x, numbers, weights), other(x, numbers, weights))


@pytest.mark.parametrize("wrong", [None, [1.0]])
def test_what_is_no_tensor_gets_the_error_of_the_modules(wrong):
    model, other = pair(sequence)
    for each in (model, other):
        with pytest.raises(TypeError):
            each(wrong)


PLACES_OF_CALLS = {
    "default device": lambda: torch.device("meta"),
    "region": lambda: te.autocast(recipe=DelayedScaling()),
    "quantised": te.quantized_model_init,
}


@pytest.mark.parametrize("place", PLACES_OF_CALLS)
def test_convert_does_the_same_wherever_it_is_called(place):
    model, other = Model(1), Model(1)
    with PLACES_OF_CALLS[place]():
        report = te_fast.convert(model)
    assert report == te_fast.convert(other)
    assert isinstance(model.layers[0].__dict__["forward"], DecoderForward)
    assert torch.equal(model(TOKENS), other(TOKENS))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [0, 5, 8])
def test_all_parameters_get_gradients_from_any_number_of_rows(recipe, rows):
    model, other = pair()
    tokens = TOKENS.flatten()[None, :rows]
    te_fast.auto_pad(True)
    try:
        with te.autocast(recipe=RECIPES[recipe]()):
            model(tokens).square().sum().backward()
    finally:
        te_fast.auto_pad(False)
    assert [name for name, own in model.named_parameters() if own.grad is None] == []
    if rows == 0:  # the model as it was takes none
        return
    other(tokens).square().sum().backward()
    for own, plain in zip(model.parameters(), other.parameters(), strict=True):
        assert (own.grad - plain.grad).norm() <= 0.5 * plain.grad.norm() + 1e-6


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        sequence,
        lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
        lambda: Model(1),
        lambda: Model(1, mlp=MixtureOfExperts),
    ],
)
def test_kept_weights_are_forgotten_when_asked(make, wrapped):
    """A write through ``.data``, by which adapters are merged, leaves no trace."""

    def converted():
        model = make()
        te_fast.convert(model)
        for module in model.modules() if wrapped else ():  # as Accelerate's hooks do it
            if "forward" in module.__dict__:
                module._old_forward = module.forward
                module.forward = functools.partial(module._old_forward)
        return model

    model, other = converted(), converted()
    x = given_to(model)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        before = model(x)
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.data.mul_(1.5)
        te_fast.dispatch.drop_weight_cache(model)
        after = model(x)
        other.load_state_dict(model.state_dict())
        assert torch.equal(after, other(x))
    assert not torch.equal(after, before)
