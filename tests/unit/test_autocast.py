import copy
import gc
import itertools

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from te_fast.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_fast.errors import ShapeError, StateError, TeFastError
from te_fast.pytorch import quantization as q
from te_fast.runtime import native, scale_tape

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU decides differently")


@pytest.fixture(autouse=True)
def fresh_state():
    q.FP8GlobalStateManager.reset()
    yield
    assert q.FP8GlobalStateManager.quantization_state.autocast_depth == 0
    q.FP8GlobalStateManager.reset()


def epoch():
    return native.autocast_region()[5]


# Regions.


def test_region_is_visible_and_goes_away():
    manager, state = q.FP8GlobalStateManager, q.FP8GlobalStateManager.quantization_state
    recipe, group = Float8CurrentScaling(), object()
    with q.autocast(recipe=recipe, amax_reduction_group=group):
        assert manager.is_fp8_enabled()
        assert not manager.is_fp8_calibration()
        assert manager.get_fp8_recipe() is recipe
        assert manager.get_fp8_group() is group
        assert state.autocast_depth == 1
        assert epoch() != 0
    assert not manager.is_fp8_enabled()
    assert manager.get_fp8_group() is None
    assert state.fp8_recipe is None
    assert epoch() == 0


def test_nested_regions_restore_the_outer():
    manager = q.FP8GlobalStateManager
    outer, inner = DelayedScaling(), Float8BlockScaling()
    with q.autocast(recipe=outer):
        first = epoch()
        with q.autocast(recipe=inner):
            assert manager.get_fp8_recipe() is inner
            assert epoch() != first
            with q.autocast(enabled=False):
                assert not manager.is_fp8_enabled()
                assert epoch() == 0
            assert manager.get_fp8_recipe() is inner
        assert manager.get_fp8_recipe() is outer
        assert epoch() == first


def test_exceptions_restore():
    with q.autocast(recipe=DelayedScaling()):
        before = epoch()
        with pytest.raises(KeyError), q.autocast(recipe=Float8CurrentScaling()):
            raise KeyError
        assert epoch() == before
    assert epoch() == 0


def test_an_instance_is_entered_once_at_a_time_and_again_later():
    region = q.autocast(recipe=DelayedScaling())
    for _ in range(2):
        with region:
            with pytest.raises(StateError, match="more than once"):
                region.__enter__()
            assert q.FP8GlobalStateManager.quantization_state.autocast_depth == 1
    with pytest.raises(RuntimeError, match="without having been entered"):
        region.__exit__(None, None, None)


def test_positional_arguments_and_truthiness():
    recipe = DelayedScaling()
    with q.autocast(1, 0, recipe, None, False):
        assert q.FP8GlobalStateManager.is_fp8_enabled()
    for none in (q.autocast(None), q.autocast(enabled=None, recipe=recipe)):
        with none:
            assert not q.FP8GlobalStateManager.is_fp8_enabled()


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {"unknown": 1}, r"autocast\(\) got an unexpected keyword argument 'unknown'$"),
        ((), {"fp8_recipe": None}, "'fp8_recipe', which is fp8_autocast's name of recipe"),
        ((), {"fp8_group": None}, "'fp8_group', which is .* name of amax_reduction_group"),
        ((Float8BlockScaling(),), {}, "enabled must be a bool, got Float8BlockScaling; .* recipe="),
        (
            (True, Float8BlockScaling()),
            {},
            "calibrating must be a bool, got Float8BlockScaling; .* recipe=",
        ),
    ],
)
def test_arguments_in_another_place_are_named(arguments, keywords, message):
    with pytest.raises(TypeError, match=message):
        q.autocast(*arguments, **keywords)


def test_same_content_keeps_the_epoch():
    seen = []
    for recipe in (DelayedScaling(), DelayedScaling(), copy.deepcopy(DelayedScaling())):
        with q.autocast(recipe=recipe):
            seen.append(epoch())
    assert len(set(seen)) == 1
    recipe.margin = 1
    with q.autocast(recipe=recipe):
        assert epoch() not in seen


def test_default_recipe_is_restored_when_somebody_changed_it():
    with q.autocast():
        before, recipe = epoch(), q.FP8GlobalStateManager.get_fp8_recipe()
    assert type(recipe) is type(q.get_default_recipe())
    recipe.backward_override = None
    recipe.fp8_format = Format.E4M3
    with q.autocast():
        assert epoch() == before
        assert q.FP8GlobalStateManager.get_fp8_recipe() is not recipe


def test_calibration_without_quantisation():
    with q.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        assert q.FP8GlobalStateManager.is_fp8_calibration()
        assert not q.FP8GlobalStateManager.is_fp8_enabled()
        assert epoch() != 0


def test_first_module_of_the_outermost_region():
    manager = q.FP8GlobalStateManager
    with q.autocast(recipe=DelayedScaling()):
        assert manager.is_first_fp8_module()
        assert not manager.is_first_fp8_module()
        with q.autocast(recipe=DelayedScaling()):
            assert not manager.is_first_fp8_module()
    with q.autocast(recipe=DelayedScaling()):
        assert manager.is_first_fp8_module()


def test_snapshots_and_setters():
    manager, state = q.FP8GlobalStateManager, q.FP8GlobalStateManager.quantization_state
    recipe = Float8CurrentScaling()
    with q.autocast(recipe=recipe):
        snapshot, inside = manager.get_autocast_state(), epoch()
    manager.set_autocast_state(snapshot)
    assert (epoch(), manager.get_fp8_recipe()) == (inside, recipe)
    assert state.is_first_fp8_module
    state.fp8_enabled = False
    assert epoch() == 0
    state.fp8_calibration = True
    state.fp8_graph_capturing = True
    state.is_first_fp8_module = False
    state.autocast_depth = 3
    assert native.autocast_region()[:5] == (False, True, True, False, 3)
    assert manager.fp8_graph_capturing()
    state.fp8_recipe, state.fp8_distributed_group = DelayedScaling(), "group"
    assert manager.get_fp8_group() == "group"
    manager.reset()
    assert native.autocast_region() == (False, False, False, False, 0, 0)


def test_deprecated_names():
    with pytest.warns(DeprecationWarning, match="fp8_autocast"):
        region = q.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(), fp8_group=None)
    with region:
        assert q.FP8GlobalStateManager.is_fp8_enabled()
    with pytest.warns(DeprecationWarning, match="fp8_model_init"):
        context = q.fp8_model_init(enabled=False)
    with context:
        pass


def test_quantized_model_init_is_left_as_it_was_entered():
    with q.quantized_model_init(enabled=False, preserve_high_precision_init_val=True):
        assert q.FP8GlobalStateManager.with_high_precision_init_val()
        assert not q.FP8GlobalStateManager.with_fp8_parameters()
    assert not q.FP8GlobalStateManager.with_high_precision_init_val()
    with q.quantized_model_init():
        assert q.FP8GlobalStateManager.with_fp8_parameters()
    assert not q.FP8GlobalStateManager.with_fp8_parameters()


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        (MXFP8BlockScaling(), r"10\.0 or higher required for MXFP8|MXFP8"),
        (NVFP4BlockScaling(), r"10\.0 or higher required for NVFP4|NVFP4"),
    ],
)
def test_blackwell_recipes_raise_the_reason(recipe, match):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=match) as caught, q.autocast(recipe=recipe):
            pass
        assert isinstance(caught.value, TeFastError)
        assert epoch() == 0
    with q.autocast(enabled=False, recipe=recipe):
        assert q.FP8GlobalStateManager.get_fp8_recipe() is recipe


@NO_GPU
def test_availability_without_a_gpu():
    assert q.is_fp8_available(return_reason=True) == (True, "")
    assert q.is_fp8_block_scaling_available(return_reason=True) == (True, "")
    assert q.is_bf16_available(True) == (True, "")
    for available in (q.is_mxfp8_available, q.is_nvfp4_available):
        assert available() is False
        assert "10.0 or higher" in available(return_reason=True)[1]
    assert q.get_device_compute_capability() == (0, 0)
    assert q.get_default_recipe() == DelayedScaling()


@pytest.mark.parametrize(
    ("capability", "fp8", "block", "mxfp8", "default"),
    [
        ((8, 0), False, False, False, DelayedScaling),
        ((8, 9), True, False, False, DelayedScaling),
        ((9, 0), True, True, False, DelayedScaling),
        ((10, 0), True, False, False, Float8CurrentScaling),
        ((12, 0), True, False, False, Float8CurrentScaling),
    ],
)
def test_availability_follows_the_current_device(
    monkeypatch, capability, fp8, block, mxfp8, default
):
    from te_fast.runtime import support

    monkeypatch.setattr(support, "get_device_compute_capability", lambda: capability)
    monkeypatch.setattr(support, "driver_problem", lambda: "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert q.is_fp8_available() is fp8
    assert q.is_fp8_block_scaling_available() is block
    assert q.is_mxfp8_available() is mxfp8
    assert type(q.get_default_recipe()) is default
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not q.is_fp8_block_scaling_available()


def test_alignment():
    sizes = [(DelayedScaling(), 16), (MXFP8BlockScaling(), 32), (NVFP4BlockScaling(), 128)]
    for recipe, size in [*sizes, (CustomRecipe(print, quantization_alignment=64), 64)]:
        assert q.get_align_size_for_quantization(recipe) == size


def test_any_sequence_of_regions_ends_where_it_began():
    recipes = [DelayedScaling(), Float8BlockScaling(), None]
    for order in itertools.product(recipes, repeat=3):
        regions = [q.autocast(enabled=recipe is not None, recipe=recipe) for recipe in order]
        seen = []
        for region in regions:
            seen.append(native.autocast_region())
            region.__enter__()
        for region, before in zip(reversed(regions), reversed(seen), strict=True):
            region.__exit__(None, None, None)
            assert native.autocast_region()[4:] == before[4:]


@pytest.fixture
def two_gpus(monkeypatch):
    """Let torch show two GPUs, a Hopper and an Ada; return the function that sets the current device."""
    from te_fast.runtime import autocast, global_state, support

    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    capabilities = [(9, 0), (8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(support, "driver_problem", lambda: "")
    monkeypatch.setattr(autocast, "_supported", set())
    monkeypatch.setattr(global_state, "_defaults", {})
    cached = support._capability_of, support.gpus_differ
    for function in cached:
        function.cache_clear()
    yield lambda index, capability=None: (
        current.__setitem__(0, index),
        capability and capabilities.__setitem__(index, capability),
    )
    for function in cached:
        function.cache_clear()
    if "__enter__" in vars(q.autocast):
        del q.autocast.__enter__


def test_a_recipe_is_checked_on_each_kind_of_gpu(two_gpus):
    """A second GPU of another kind may refuse a recipe of the first GPU, even if the recipe object ran there."""
    recipe, region = Float8BlockScaling(), q.autocast(recipe=Float8BlockScaling())
    for entered in (q.autocast(recipe=recipe), region, q.autocast(recipe=DelayedScaling())):
        with entered:
            assert q.FP8GlobalStateManager.is_fp8_enabled()
    two_gpus(1)
    for refused in (q.autocast(recipe=recipe), region, q.autocast(recipe=Float8BlockScaling())):
        with pytest.raises(RuntimeError, match="compute capability 9.0 or higher"), refused:
            pass
        assert not q.FP8GlobalStateManager.is_fp8_enabled()
        assert native.autocast_region()[4] == 0
    with q.autocast(enabled=False, recipe=recipe), q.autocast(recipe=DelayedScaling()):
        assert q.FP8GlobalStateManager.is_fp8_enabled()
    two_gpus(0)
    with q.autocast(recipe=recipe):
        assert q.FP8GlobalStateManager.get_fp8_recipe() is recipe


def test_the_default_recipe_is_that_of_the_current_gpu(two_gpus):
    two_gpus(1, (10, 0))
    for index, wanted in ((0, DelayedScaling), (1, Float8CurrentScaling), (0, DelayedScaling)):
        two_gpus(index)
        with q.autocast():
            assert type(q.FP8GlobalStateManager.get_fp8_recipe()) is wanted


class Nested(DelayedScaling):
    """A recipe whose description uses the region that asks for the description."""

    def _describe(self):
        if self.region is not None:
            region, self.region = self.region, None
            with region:
                assert q.FP8GlobalStateManager.get_fp8_recipe() is not None
        return super()._describe()


def test_a_region_may_be_used_by_what_entering_and_leaving_it_run():
    recipe = Nested(amax_history_len=2, reduce_amax=False)
    recipe.region = None
    region = q.autocast(recipe=recipe)
    recipe.region = region
    depths = []

    def amax_of(history):
        if not depths:
            depths.append(q.FP8GlobalStateManager.quantization_state.autocast_depth)
            with region:
                depths.append(q.FP8GlobalStateManager.quantization_state.autocast_depth)
        return history.amax(0)

    recipe.amax_compute_algo = amax_of
    state = q.DelayedScalingRecipeState(recipe, mode="forward", device="cpu")
    state.take_part()
    state.amax_history[0] = 4.0
    recipe.region = region
    with region:
        pass
    assert depths == [0, 1]
    assert recipe.region is None


class Farewell:
    """A process group whose finalizer uses the state that held the group."""

    def __init__(self, seen):
        self.seen = seen

    def __del__(self):
        with q.autocast(recipe=DelayedScaling(reduce_amax=False)):
            self.seen.append(q.FP8GlobalStateManager.is_fp8_enabled())


def test_what_regions_held_may_use_the_state_when_it_goes():
    seen, manager = [], q.FP8GlobalStateManager
    with q.autocast(recipe=Float8CurrentScaling(), amax_reduction_group=Farewell(seen)):
        assert manager.get_fp8_group() is not None
    assert seen == [True]
    with q.autocast(recipe=Float8CurrentScaling()):
        manager.quantization_state.fp8_distributed_group = Farewell(seen)
        manager.quantization_state.fp8_distributed_group = None
        assert seen == [True, True]
        manager.quantization_state.fp8_distributed_group = Farewell(seen)
    assert seen == [True] * 3
    manager.quantization_state.fp8_distributed_group = Farewell(seen)
    manager.reset()
    assert seen == [True] * 4
    snapshot = (True, False, Float8CurrentScaling(), Farewell(seen), True, False)
    with scale_tape.recorded_region(snapshot):
        del snapshot
    gc.collect()
    assert seen == [True] * 5


def test_an_error_of_the_update_does_not_hide_one_that_leaves_the_region(monkeypatch):
    """An error that leaves the region starts no update, so that the user sees this error."""

    def refuse(**_):
        message = "another rank is gone"
        raise RuntimeError(message)

    layer = te.Linear(32, 32, device="cpu")
    x = torch.randn(16, 32)
    with te.autocast(recipe=DelayedScaling()):
        layer(x)
    monkeypatch.setattr(te_fast.runtime.autocast.delayed, "update_scales", refuse)
    with pytest.raises(ShapeError, match="31"), te.autocast(recipe=DelayedScaling()):
        layer(layer(x)[:, 1:])
    with pytest.raises(RuntimeError, match="another rank"), te.autocast(recipe=DelayedScaling()):
        layer(x)
