import copy
import dataclasses
import io
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_fast.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    _FormatHelper,
)
from te_fast.errors import RecipeError, TeFastError
from te_fast.runtime import native
from te_fast.runtime.delayed import native_recipe

RUNNABLE = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)
RECIPES = (*RUNNABLE, MXFP8BlockScaling, NVFP4BlockScaling)
PREDICATES = {
    "delayed": {DelayedScaling},
    "float8_current_scaling": {Float8CurrentScaling},
    "float8_per_tensor_scaling": {DelayedScaling, Float8CurrentScaling},
    "float8_block_scaling": {Float8BlockScaling},
    "mxfp8": {MXFP8BlockScaling},
    "nvfp4": {NVFP4BlockScaling},
    "custom": {CustomRecipe},
}


@pytest.mark.parametrize("cls", [*RECIPES, CustomRecipe])
@pytest.mark.parametrize("name", PREDICATES)
def test_predicates(cls, name):
    assert getattr(cls, name)() is (cls in PREDICATES[name])


def test_subclasses_keep_their_kind():
    class Mine(Float8BlockScaling):
        pass

    assert Mine.float8_block_scaling()
    assert native_recipe(Mine()) == native_recipe(Float8BlockScaling())


@pytest.mark.parametrize("cls", RUNNABLE)
def test_four_bit_numbers_are_refused(cls):
    with pytest.raises(RecipeError, match="E4M3 or HYBRID"):
        cls(fp8_format=Format.E2M1)


def test_formats():
    values = {member.name: tuple(member.value) for member in Format}
    assert values == {
        "E2M1": (6, 6),
        "E4M3": (448, 448),
        "E5M2": (57344, 57344),
        "HYBRID": (448, 57344),
    }


def test_defaults():
    delayed = DelayedScaling()
    assert (delayed.margin, delayed.amax_history_len) == (0, 1024)
    assert (delayed.amax_compute_algo, delayed.scaling_factor_compute_algo) == ("max", None)
    assert (delayed.reduce_amax, delayed.fp8_format) == (True, Format.HYBRID)
    current = Float8CurrentScaling()
    assert current.fp8_gemm_fprop == MMParams(use_split_accumulator=False)
    assert current.fp8_gemm_dgrad == current.fp8_gemm_wgrad == MMParams()
    assert current.fp8_quant_fwd_inp == QParams()
    block = Float8BlockScaling()
    dimensions = (block.x_block_scaling_dim, block.w_block_scaling_dim)
    assert (*dimensions, block.grad_block_scaling_dim) == (1, 2, 1)
    assert block.fp8_format is Format.E4M3
    assert block.fp8_quant_fwd_weight == QParams(power_2_scale=True)


@pytest.mark.parametrize("cls", RUNNABLE)
def test_equal_content_is_equal_natively(cls):
    assert native_recipe(cls()) == native_recipe(cls())
    others = [other for other in RUNNABLE if other is not cls]
    assert all(native_recipe(cls()) != native_recipe(other()) for other in others)


def edits():
    quantization = QParams(power_2_scale=True, amax_epsilon=0.5)
    yield DelayedScaling, "margin", 3
    yield DelayedScaling, "fp8_format", Format.E4M3
    yield DelayedScaling, "amax_history_len", 16
    yield DelayedScaling, "amax_compute_algo", "most_recent"
    yield DelayedScaling, "amax_compute_algo", lambda history: history[0]
    yield DelayedScaling, "scaling_factor_compute_algo", lambda *_: 1
    yield DelayedScaling, "reduce_amax", False
    yield Float8CurrentScaling, "use_power_2_scales", True
    yield Float8CurrentScaling, "fp8_quant_fwd_inp", quantization
    yield Float8CurrentScaling, "fp8_quant_fwd_weight", quantization
    yield Float8CurrentScaling, "fp8_quant_bwd_grad", QParams(amax_epsilon=1e-3)
    yield Float8CurrentScaling, "fp8_gemm_fprop", MMParams(use_split_accumulator=True)
    yield Float8CurrentScaling, "backward_override", "high_precision"
    yield Float8BlockScaling, "use_f32_scales", True
    yield Float8BlockScaling, "w_block_scaling_dim", 1
    yield Float8BlockScaling, "fp8_format", Format.HYBRID


@pytest.mark.parametrize(("cls", "name", "value"), list(edits()))
def test_an_edit_reaches_the_dispatcher(cls, name, value):
    recipe = cls()
    before, text = native_recipe(recipe), repr(recipe)
    assert native_recipe(recipe) is before
    setattr(recipe, name, value)
    edited = native_recipe(recipe)
    assert edited != before
    assert (repr(recipe) == text) == (name in ("amax_compute_algo", "scaling_factor_compute_algo"))
    if name in {field.name for field in dataclasses.fields(cls)}:
        assert native_recipe(cls(**{name: value})) == edited


@pytest.mark.parametrize(
    "name", ["fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"]
)
@pytest.mark.parametrize(
    ("base", "flag", "sets"),
    [
        (Float8CurrentScaling, "use_power_2_scales", True),
        (Float8BlockScaling, "use_f32_scales", False),
    ],
)
def test_subclasses_have_quantisations_of_their_own(base, flag, sets, name):
    own = QParams(power_2_scale=not getattr(base, name).power_2_scale, amax_epsilon=0.5)
    others = {"fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"} - {name}
    recipe = type("Mine", (base,), {name: own})()
    assert getattr(recipe, name) == own
    assert native_recipe(recipe) != native_recipe(base())
    assert all(getattr(recipe, other) == getattr(base, other) for other in others)
    setattr(recipe, flag, True)
    assert getattr(recipe, name) == dataclasses.replace(own, power_2_scale=sets)


class Scaler:
    """An algorithm that cannot be hashed, with a method that is one, too."""

    __hash__ = None

    def __eq__(self, other):
        return self is other

    def __call__(self, amax, *_):
        return amax

    def method(self, amax, *_):
        return amax


@pytest.mark.parametrize("field", ["amax_compute_algo", "scaling_factor_compute_algo"])
@pytest.mark.parametrize("get", [lambda one: one, lambda one: one.method], ids=["object", "method"])
def test_algorithms_are_told_apart_and_not_kept(field, get):
    first, second = Scaler(), Scaler()
    recipes = [DelayedScaling(**{field: get(one)}) for one in (first, first, second)]
    natives = [native_recipe(recipe) for recipe in recipes]
    assert natives[0] == natives[1]
    assert natives[0] != natives[2]
    assert native_recipe(DelayedScaling()) not in natives
    gone = weakref.ref(first)
    del first, recipes
    assert gone() is None


def test_power_2_flag_of_the_constructor_takes_effect():
    for recipe in (Float8CurrentScaling(use_power_2_scales=True), Float8CurrentScaling(True)):
        assert recipe.fp8_quant_fwd_inp.power_2_scale
        assert recipe.fp8_quant_fwd_weight.power_2_scale
        assert recipe.fp8_quant_bwd_grad.power_2_scale
    assert not Float8CurrentScaling.fp8_quant_fwd_inp.power_2_scale
    assert not Float8BlockScaling(use_f32_scales=True).fp8_quant_bwd_grad.power_2_scale
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=2.0)
    recipe.use_power_2_scales = True
    assert recipe.fp8_quant_fwd_inp == QParams(power_2_scale=True, amax_epsilon=2.0)


@pytest.mark.parametrize(
    ("cls", "fields", "match"),
    [
        *((cls, {"fp8_format": Format.E5M2}, "Pure E5M2") for cls in RUNNABLE),
        *((cls, {"backward_override": "fast"}, "backward_override") for cls in RECIPES),
        *((cls, {"fp8_format": "E4M3"}, "must be a Format") for cls in RUNNABLE),
        (DelayedScaling, {"backward_override": "high_precision"}, "backward_override=None"),
        (DelayedScaling, {"amax_compute_algo": "median"}, "amax_compute_algo"),
        (DelayedScaling, {"scaling_factor_compute_algo": 3}, "scaling_factor_compute_algo"),
        (DelayedScaling, {"amax_history_len": 0}, "amax_history_len"),
        (DelayedScaling, {"amax_history_len": 2.0}, "amax_history_len"),
        (DelayedScaling, {"margin": 1000}, "margin"),
        (Float8BlockScaling, {"x_block_scaling_dim": 3}, "Only 1D or 2D"),
        (Float8BlockScaling, {"x_block_scaling_dim": 2}, "2D by 2D"),
        (Float8BlockScaling, {"grad_block_scaling_dim": 2}, "2D by 2D"),
        (Float8BlockScaling, {"fp8_gemm_wgrad": MMParams(False)}, "Split accumulator.*wgrad"),
        (Float8BlockScaling, {"fp8_dpa": True}, "attention"),
        (NVFP4BlockScaling, {"nvfp4_4over6": "some"}, "nvfp4_4over6"),
        (NVFP4BlockScaling, {"fp4_format": Format.E4M3}, "fp4_format"),
        (NVFP4BlockScaling, {"nvfp4_4over6_err_mode": "MAX"}, "err_mode"),
    ],
)
def test_contradictions_are_refused(cls, fields, match):
    with pytest.raises(RecipeError, match=match) as caught:
        cls(**fields)
    assert isinstance(caught.value, (TeFastError, ValueError, AssertionError))
    recipe = cls()
    for name, value in fields.items():
        setattr(recipe, name, value)
    with pytest.raises(RecipeError, match=match):
        native_recipe(recipe)


def test_impossible_epsilon_is_refused():
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=float("nan"))
    with pytest.raises(ValueError, match="amax_epsilon"):
        native_recipe(recipe)


@pytest.mark.parametrize("cls", RECIPES)
def test_copies_do_not_share_what_is_derived(cls):
    recipe = cls()
    native_recipe(recipe)
    repr(recipe)
    copies = [pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), copy.copy(recipe)]
    for other in (*copies, dataclasses.replace(recipe)):
        assert other == recipe
        assert other._native is None
        assert native_recipe(other) == native_recipe(recipe)


@pytest.mark.parametrize("cls", RECIPES)
def test_torchs_reader_of_weights_may_be_allowed_recipes(cls):
    """Vortex (Evo 2) allows recipes by these names."""
    file = io.BytesIO()
    torch.save({"recipe": cls()}, file)
    file.seek(0)
    # Python 3.11 pickles a format as getattr(Format, name).
    allowed = [cls, Format, _FormatHelper, MMParams, QParams, getattr]
    with torch.serialization.safe_globals(allowed):
        assert torch.load(file, weights_only=True) == {"recipe": cls()}


def test_native_recipe_refuses_unknown_words():
    for fields in ({"scaling": "slow"}, {"fwd": "e3m4"}, {"backward_override": "no"}):
        with pytest.raises(ValueError, match="unknown"):
            native.Recipe(**{"scaling": "current", "fwd": "e4m3", "bwd": "e5m2", **fields})


@given(
    margin=st.integers(-126, 126),
    history_len=st.integers(1, 2**31),
    most_recent=st.booleans(),
    reduce_amax=st.booleans(),
)
def test_every_field_tells_natively(margin, history_len, most_recent, reduce_amax):
    recipe = DelayedScaling(
        margin=margin,
        amax_history_len=history_len,
        amax_compute_algo="most_recent" if most_recent else "max",
        reduce_amax=reduce_amax,
    )
    is_default = (margin, history_len, most_recent, reduce_amax) == (0, 1024, False, True)
    assert (native_recipe(recipe) == native_recipe(DelayedScaling())) == is_default
    other = dataclasses.replace(recipe, reduce_amax=not reduce_amax)
    assert native_recipe(other) != native_recipe(recipe)
