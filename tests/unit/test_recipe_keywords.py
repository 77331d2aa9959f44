"""Keywords that recipes of Transformer Engine take and ignore: those of its older versions, and any other."""

import copy
import inspect
import pickle
import warnings

import pytest

from te_fast.common import recipe as recipes
from te_fast.common.recipe import DelayedScaling, Format

RECIPES = {
    "DelayedScaling": {},
    "Float8CurrentScaling": {},
    "Float8BlockScaling": {},
    "MXFP8BlockScaling": {},
    "NVFP4BlockScaling": {},
    "CustomRecipe": {"qfactory": print},
}


def test_the_example_of_old():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = DelayedScaling(
            margin=1,
            interval=1,
            fp8_format=Format.E4M3,
            override_linear_precision=(False, False, False),
        )
    assert made == DelayedScaling(margin=1, fp8_format=Format.E4M3)
    assert repr(made) == repr(DelayedScaling(margin=1, fp8_format=Format.E4M3))
    assert not hasattr(made, "interval")
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    "keywords",
    [
        {"interval": 16},
        {"override_linear_precision": (False, False, True)},
        {"amax_history_length": 4},
        {"dtype": None, "layer": "cuda"},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_what_has_no_effect_is_warned_of(keywords):
    with pytest.warns(UserWarning, match="DelayedScaling: .*no effect") as caught:
        made = DelayedScaling(margin=1, **keywords)
    assert made == DelayedScaling(margin=1)
    assert caught[0].filename == __file__
    for name in keywords:
        assert name in str(caught[0].message)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_them(name):
    cls, given = getattr(recipes, name), RECIPES[name]
    with pytest.warns(UserWarning, match=f"{name}: wrong"):
        made = cls(**given, wrong=1)
    assert made == cls(**given)
    assert "wrong" not in inspect.signature(cls).parameters


def test_a_subclass_passes_them_on():
    class Own(DelayedScaling):
        def __init__(self, fp8_format, override_linear_precision):
            super().__init__(
                fp8_format=fp8_format,
                override_linear_precision=override_linear_precision,
                dtype=None,
                # Megatron-LM's layers have these keywords.
                params_dtype=None,
                device="cuda",
            )

    with pytest.warns(UserWarning, match="Own: dtype: no such field"):
        made = Own(Format.E4M3, (False, False, False))
    assert (made.fp8_format, made.delayed()) == (Format.E4M3, True)


def test_too_many_positional_arguments_are_an_error():
    with pytest.raises(TypeError, match="positional"):
        DelayedScaling(*range(20))
