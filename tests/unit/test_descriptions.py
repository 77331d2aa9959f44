"""Names, reprs and listings, which a person sees first in a shell."""

import inspect

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.errors import StateError


@pytest.mark.parametrize("module", [te_fast, te])
def test_dir_lists_what_is_public_and_all_of_it_is_there(module):
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in dir(module) if name != "__version__")


def test_profile_is_a_function_with_help():
    assert inspect.isfunction(te_fast.profile)
    assert te_fast.profile.__doc__.startswith("Measure where the host time")
    assert list(inspect.signature(te_fast.profile).parameters) == [
        "module",
        "inputs",
        "rounds",
        "calls",
    ]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (
            lambda: te.Linear(32, 16, bias=False, device="cpu"),
            "Linear(in_features=32, out_features=16, bias=False, params_dtype=torch.float32)",
        ),
        (
            lambda: te.Linear(32, 16, parallel_mode="row", device="cpu"),
            "Linear(in_features=32, out_features=16, bias=True, params_dtype=torch.float32, "
            "parallel_mode=row)",
        ),
        (
            lambda: te.LayerNormLinear(
                32, 16, eps=1e-6, normalization="RMSNorm", params_dtype=torch.bfloat16, device="cpu"
            ),
            "LayerNormLinear(in_features=32, out_features=16, bias=True, normalization=RMSNorm, "
            "eps=1e-06, params_dtype=torch.bfloat16)",
        ),
        (
            lambda: te.LayerNormMLP(32, 64, activation="swiglu", device="cpu"),
            "LayerNormMLP(hidden_size=32, ffn_hidden_size=64, bias=True, normalization=LayerNorm, "
            "eps=1e-05, activation=swiglu, params_dtype=torch.float32)",
        ),
    ],
)
def test_reprs_of_layers_tell_what_they_compute(layer, expected):
    assert repr(layer()) == expected


def test_the_repr_of_a_layer_names_the_recipe_that_it_last_ran_with():
    layer = te.Linear(32, 16, device="cpu")
    with te.autocast(recipe=Float8CurrentScaling()):
        layer(torch.ones(16, 32))
    assert repr(layer).endswith("params_dtype=torch.float32, recipe=Float8CurrentScaling)")


def test_a_layer_that_was_never_made_real_has_a_repr():
    assert "params_dtype=torch.float32" in repr(te.Linear(32, 16, device="meta"))


def test_a_checkpoint_that_does_not_fit_is_told_by_the_path_of_the_module():
    def model(layer):
        block = torch.nn.ModuleDict({"proj": layer})
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])})

    def ran(layer):
        with te.autocast():
            layer(torch.ones(16, 32))
        return layer

    state = model(ran(te.Linear(32, 32, device="cpu"))).state_dict()
    state["layers.0.proj._extra_state"] = model(
        ran(te.LayerNormMLP(32, 32, device="cpu"))
    ).state_dict()["layers.0.proj._extra_state"]
    with pytest.raises(StateError, match=r"layers\.0\.proj.*: _extra_state has scales"):
        model(te.Linear(32, 32, device="cpu")).load_state_dict(state)
