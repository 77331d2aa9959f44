"""Scales of delayed scaling: life cycle, update, reduction over ranks."""

import copy
import gc
import io
import os
import pickle
from functools import partial
from multiprocessing import reduction
from multiprocessing.context import set_spawning_popen

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import delayed_states
import te_fast.pytorch as te
from delayed_states import record
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from te_fast.errors import DtypeError, RecipeError, ShapeError, StateError
from te_fast.pytorch import quantization as q
from te_fast.runtime import delayed, native
from te_fast.runtime.delayed import states

F32_MAX = torch.finfo(torch.float32).max
LOCAL = {"reduce_amax": False}


def living():
    return len([*states(forward=True), *states(forward=False)])


@pytest.fixture(autouse=True)
def fresh_state():
    q.FP8GlobalStateManager.reset()
    before = living()
    yield
    if living() > before:  # the states left are reference cycles, or leaks
        gc.collect()
    assert living() <= before
    q.FP8GlobalStateManager.reset()


make_state = partial(delayed_states.make_state, **LOCAL)


def reference(scale, history, fp8_max, margin=0, most_recent=False):
    """Transformer Engine's kernel, tensor by tensor, in plain Python and FP32 scalars."""
    scale, history = scale.clone(), history.clone()
    for column in range(scale.numel()):
        last = history[0, column].clone()
        if last == 0:
            continue
        window = torch.cat([history[1:, column], last[None]])
        numbers = window[~window.isnan()]
        largest = last if most_recent else numbers.max() if numbers.numel() else last
        history[:, column] = window
        history[0, column] = 0
        if torch.isfinite(largest) and largest > 0:
            new = torch.tensor(fp8_max * 2.0**-margin, dtype=torch.float32) / largest
            scale[column] = F32_MAX if torch.isinf(new) else new
    return scale, history


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("mode", "fp8_max"), [("forward", 448.0), ("backward", 57344.0)])
@pytest.mark.parametrize("margin", [0, 2, -1])
def test_update_is_that_of_the_formula(algorithm, mode, fp8_max, margin):
    state = make_state(mode=mode, amax_compute_algo=algorithm, margin=margin)
    scale, history = state.scale.clone(), state.amax_history.clone()
    steps = [
        [1.0, 0.0, 3e-40],
        [float("inf"), 2.5, 1e-45],
        [0.0, 0.0, 448.0],
        [7.0, float("inf"), 1.0],
        [0.3, 0.1, 1e38],
        [1e-9, 1e30, 0.0],
    ]
    for values in steps:
        with q.autocast(recipe=state.recipe):
            record(state, values)
        if mode == "backward":
            q.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        history[0] = torch.maximum(history[0], torch.tensor(values))
        scale, history = reference(scale, history, fp8_max, margin, algorithm == "most_recent")
        assert torch.equal(state.scale, scale)
        assert torch.equal(state.amax_history, history)


AMAX = st.floats(0, width=32, allow_nan=False) | st.sampled_from([0.0, 1e-45, 1e-38, F32_MAX])


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(st.lists(AMAX, min_size=2, max_size=2), min_size=1, max_size=8),
    length=st.integers(1, 5),
    margin=st.integers(-8, 8),
    most_recent=st.booleans(),
)
def test_update_property(steps, length, margin, most_recent):
    algorithm = "most_recent" if most_recent else "max"
    recipe = DelayedScaling(margin, Format.HYBRID, length, algorithm, **LOCAL)
    state = make_state(recipe, tensors=2)
    scale, history = state.scale.clone(), state.amax_history.clone()
    for values in steps:
        with q.autocast(recipe=recipe):
            record(state, values)
        history[0] = torch.maximum(history[0], torch.tensor(values))
        scale, history = reference(scale, history, 448.0, margin, most_recent)
        assert torch.equal(state.scale, scale)
        assert torch.equal(state.amax_history, history)


def test_one_launch_updates_all_states():
    many = [make_state() for _ in range(5)]
    native.reset_counters()
    with q.autocast(recipe=many[0].recipe):
        for state in many:
            record(state, [1.0, 2.0, 4.0])
    assert native.counters()["launches"] == 1
    for state in many:
        assert state.scale.tolist() == [448.0, 224.0, 112.0]
    native.reset_counters()
    with q.autocast(recipe=many[0].recipe):
        pass
    assert native.counters()["launches"] == 0


def test_updates_wait_for_the_outermost_exit_and_for_gradients():
    state = make_state()
    with q.autocast(recipe=state.recipe):
        with q.autocast(recipe=state.recipe):
            record(state, [1.0, 1.0, 1.0])
        assert state.scale.tolist() == [1.0] * 3
    assert state.scale.tolist() == [448.0] * 3
    with torch.no_grad(), q.autocast(recipe=state.recipe):
        record(state, [2.0, 2.0, 2.0])
    assert state.scale.tolist() == [448.0] * 3
    assert state.amax_history[0].tolist() == [2.0] * 3
    with q.autocast(recipe=state.recipe, _graph=True):
        record(state, [2.0, 2.0, 2.0])
    assert state.scale.tolist() == [448.0] * 3
    # As in Transformer Engine, the maxima of evaluation count at the next exit with gradients.
    with q.autocast(recipe=state.recipe):
        pass
    assert state.scale.tolist() == [224.0] * 3


def test_an_exception_that_leaves_a_region_leaves_the_update_to_the_next_one():
    """On several ranks, one of which raises, a reduction would wait for the others."""
    recipe = DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3, **LOCAL)
    layer = te.Linear(16, 16, bias=False, device="cpu")
    torch.nn.init.constant_(layer.weight, 0.5)

    def fails():
        layer(torch.full((16, 16), 8.0))
        raise KeyError

    with pytest.raises(KeyError), te.autocast(recipe=recipe):
        fails()
    state = layer.fp8_meta["scaling_fwd"]
    assert torch.equal(state.scale, torch.ones_like(state.scale))
    assert state.amax_history[0, :2].tolist() == [8.0, 0.5]
    with te.autocast(recipe=recipe):
        layer(torch.full((16, 16), 2.0))
    assert state.scale[:2].tolist() == [448 / 8, 448 / 0.5]
    assert state.amax_history[:, 0].tolist() == [0, 0, 0, 8]


def test_calibration_updates_also_without_gradients():
    state = make_state()
    with torch.no_grad(), q.autocast(enabled=False, calibrating=True, recipe=state.recipe):
        record(state, [2.0, 4.0, 8.0])
    assert state.scale.tolist() == [224.0, 112.0, 56.0]


def test_backward_scales_are_their_own():
    forward, backward = make_state(), make_state(mode="backward", tensors=2)
    with q.autocast(recipe=forward.recipe):
        record(forward, [1.0, 1.0, 1.0])
        record(backward, [1.0, 2.0])
    assert backward.scale.tolist() == [1.0, 1.0]
    q.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
    assert backward.scale.tolist() == [57344.0, 28672.0]
    assert forward.scale.tolist() == [448.0] * 3


def test_own_algorithms_run_in_python():
    calls = []

    def amax_of(history):
        calls.append(history.clone())
        return history.mean(dim=0)

    def scale_of(amax, scale, fp8_max, recipe):
        return torch.full_like(scale, fp8_max) / (amax + 1) / 2**recipe.margin

    state = make_state(
        amax_compute_algo=amax_of, scaling_factor_compute_algo=scale_of, margin=1, tensors=2
    )
    plain = make_state()
    for live in ([4.0, 8.0], [0.0, 0.0]):
        with q.autocast(recipe=state.recipe):
            record(state, live)
            record(plain, [1.0, 1.0, 1.0])
    # Unlike in the kernel, the history is rolled also when the newest maximum is 0.
    assert [history[0].tolist() for history in calls] == [[4.0, 8.0], [0.0, 0.0]]
    assert state.amax_history[2].tolist() == [4.0, 8.0]
    assert state.amax_history[3].tolist() == [0.0, 0.0]
    mean = torch.tensor([4.0, 8.0]) / 4
    assert torch.equal(state.scale, torch.full((2,), 448.0) / (mean + 1) / 2)
    assert plain.scale.tolist() == [448.0] * 3


def test_own_scaling_with_the_default_maximum():
    state = make_state(scaling_factor_compute_algo=lambda amax, *_: 1 / amax, tensors=2)
    with q.autocast(recipe=state.recipe):
        record(state, [4.0, 8.0])
    assert state.scale.tolist() == [0.25, 0.125]


@pytest.mark.parametrize("field", ["amax_compute_algo", "scaling_factor_compute_algo"])
@pytest.mark.parametrize(
    "result", [None, 1.0, torch.ones(2)], ids=["nothing", "float", "other shape"]
)
def test_own_algorithms_that_return_no_number_for_each_tensor(field, result):
    fails = [True]

    def algorithm(amax, *_):
        return result if fails[0] else torch.ones(3)

    layer = te.Linear(32, 32, device="cpu", name="proj")
    recipe = DelayedScaling(amax_history_len=4, **LOCAL, **{field: algorithm})
    with (
        pytest.raises(RecipeError, match=f"proj: delayed scaling: .*{field} must return"),
        te.autocast(recipe=recipe),
    ):
        layer(torch.ones(16, 32))
    # The error has been told: regions in which the layer does not run do not raise it again.
    with te.autocast(recipe=DelayedScaling(**LOCAL)):
        pass
    fails[0] = False
    with torch.no_grad(), te.autocast(recipe=recipe):
        y = layer(torch.ones(16, 32))
    assert torch.isfinite(y).all()


@pytest.mark.parametrize(
    ("length", "error"), [(-3, ShapeError), (0, ShapeError), ("a", DtypeError)]
)
def test_histories_of_no_length(length, error):
    layer = te.Linear(32, 32, device="cpu", name="proj")
    with te.autocast(recipe=DelayedScaling(**LOCAL)):
        layer(torch.ones(16, 32))
    with pytest.raises(error, match="proj: length"):
        layer.adjust_amax_history_length(length)


def test_buffers_die_with_their_owner():
    before = living()
    state = make_state()
    assert living() == before + 1
    record(state, [1.0, 1.0, 1.0])
    del state
    assert living() == before
    q.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


def test_recipe_changes_carry_over():
    state = make_state()
    first = state.slots
    state.use(state.recipe, None)
    assert state.slots is first
    record(state, [4.0, 4.0, 4.0])
    state.amax_history[1:] = torch.tensor([[1.0], [2.0], [3.0]])
    state.recipe.margin = 1
    state.use(state.recipe, None)
    assert state.slots is not first
    assert state.slots.ran
    first.mark_ran()
    native.reset_counters()
    with q.autocast(recipe=state.recipe):
        pass
    assert native.counters()["launches"] == 1
    assert state.scale.tolist() == [56.0] * 3
    assert state.amax_history[:, 0].tolist() == [0.0, 2.0, 3.0, 4.0]
    for length, expected in ((2, [0.0, 2.0]), (3, [0.0, 2.0, 0.0])):
        state.use(DelayedScaling(amax_history_len=length, **LOCAL), None)
        assert state.amax_history[:, 0].tolist() == expected


def test_tensors_can_be_replaced_and_loaded():
    state = make_state()
    state.scale = torch.full((3,), 2.0)
    state.amax_history = torch.zeros(2, 3)
    with q.autocast(recipe=state.recipe):
        record(state, [1.0, 1.0, 0.0])
    assert state.scale.tolist() == [448.0, 448.0, 2.0]
    state.load(torch.ones(3), torch.ones(6, 3))
    assert state.amax_history.shape == (6, 3)
    with pytest.raises(StateError, match="3 tensors, got 2"):
        state.load(torch.ones(2), torch.ones(6, 2))
    for wrong in (torch.ones(4, 2), torch.ones(3, 4).t(), torch.ones(0, 3), torch.ones(3)):
        with pytest.raises(ShapeError, match="amax_history|elements"):
            state.amax_history = wrong
    with pytest.raises(ShapeError, match="2 elements, got 3"):
        state.load(torch.full((3,), 5.0), torch.ones(6, 2))
    with pytest.raises(ShapeError, match="3 elements, got 2"):
        state.scale = torch.ones(2)
    assert state.amax_history.shape == (6, 3)
    assert state.scale.tolist() == [1.0] * 3
    state.reset()
    assert state.amax_history.abs().sum() == 0
    with pytest.raises(TypeError, match="float32"):
        state.scale = torch.ones(3, dtype=torch.float64)
    with pytest.raises(StateError, match="mode must be"):
        make_state(mode="sideways")


def test_the_dispatcher_keeps_the_memory_of_tensors_whose_data_is_exchanged():
    state = make_state()
    memory = [StorageWeakRef(t.untyped_storage()) for t in (state.scale, state.amax_history)]
    state.scale.data, state.amax_history.data = torch.zeros(3), torch.zeros(4, 3)
    gc.collect()
    assert not any(reference.expired() for reference in memory)
    state.slots.mark_ran()
    with q.autocast(recipe=state.recipe):
        pass
    assert state.scale.tolist() == [0.0] * 3
    state.scale = torch.full((3,), 2.0)  # assignment replaces the scales
    gc.collect()
    assert memory[0].expired()


def test_copies_have_buffers_of_their_own():
    state = make_state()
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other.recipe == state.recipe
        with q.autocast(recipe=state.recipe):
            record(other, [1.0, 2.0, 4.0])
        assert other.scale.tolist() == [448.0, 224.0, 112.0]
        assert state.scale.tolist() == [1.0] * 3


class SpawnedProcess:
    """Takes the files that a process is given, as ``multiprocessing`` does while it pickles the arguments."""

    def __init__(self):
        self.files = []

    def duplicate_for_child(self, file):
        self.files.append(file)
        return file

    DupFd = staticmethod(int)


def test_a_spawned_process_can_take_a_layer():
    """It gets the memory of pickled tensors when it starts, which is after the pickling."""
    recipe = DelayedScaling(amax_history_len=2)
    layer = te.Linear(64, 64, device="cpu")
    with te.autocast(recipe=recipe):
        layer(torch.randn(32, 64)).sum().backward()
    layer.zero_grad()
    process = SpawnedProcess()
    set_spawning_popen(process)
    try:
        reduction.dump(layer, io.BytesIO())
    finally:
        set_spawning_popen(None)
    assert len(process.files) >= 6  # weight, bias, scales and histories
    assert len(set(process.files)) == len(process.files)
    for file in process.files:
        os.fstat(file)


def test_global_buffers_show_the_layers():
    first, second = make_state(), make_state()
    backward = make_state(mode="backward", tensors=2)
    manager, state = q.FP8GlobalStateManager, q.FP8GlobalStateManager.quantization_state
    key = manager.get_key_in_buffer(True, first.recipe, None)
    assert manager.split_key_in_buffer(key)[0] is True
    assert [id(scale) for scale in state.global_scale_buffer[key]] == [
        id(first.scale),
        id(second.scale),
    ]
    assert state.global_amax_buffer[key][0].data_ptr() == first.amax_history.data_ptr()
    key = manager.get_key_in_buffer(False, first.recipe, None)
    assert state.global_amax_history_buffer[key][0] is backward.amax_history


def test_recompute_runs_with_the_scales_of_the_first_phase():
    manager = q.FP8GlobalStateManager
    meta = {"scaling_fwd": make_state()}
    manager.copy_forward_fp8_meta_tensors_for_recompute(meta)
    meta["scaling_fwd"].scale.fill_(8.0)
    manager.get_old_fp8_meta_tensors_for_recompute(meta)
    assert meta["scaling_fwd"].scale.tolist() == [1.0] * 3
    manager.restore_fp8_meta_tensors(meta)
    assert meta["scaling_fwd"].scale.tolist() == [8.0] * 3
    for noop in (
        manager.copy_forward_fp8_meta_tensors_for_recompute,
        manager.get_old_fp8_meta_tensors_for_recompute,
        manager.restore_fp8_meta_tensors,
        manager.add_fp8_tensors_to_global_buffer,
    ):
        noop({})


def test_skip_flag():
    manager = q.FP8GlobalStateManager
    assert manager.get_skip_fp8_weight_update_tensor() is None
    manager.set_skip_fp8_weight_update_tensor(True)
    assert manager.get_skip_fp8_weight_update_tensor().item() == 1.0
    flag = manager.get_skip_fp8_weight_update_tensor()
    manager.set_skip_fp8_weight_update_tensor(False)
    assert flag.item() == 0.0


# Ranks; test_delayed_ranks.py runs two of them.


class OtherRank:
    """A stand-in for torch.distributed with another rank that has maxima of its own."""

    def __init__(self, monkeypatch, *maxima):
        self.maxima = list(maxima)
        self.groups = []
        monkeypatch.setattr(delayed, "_is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist, "all_gather_into_tensor", self.all_gather)

    def all_gather(self, everyones, own, group):
        everyones.view(2, -1).copy_(own.expand(2, -1))

    def all_reduce(self, tensor, op, group):
        assert op is dist.ReduceOp.MAX
        if group is None:  # maxima of layers that other tests have left
            return
        self.groups.append(group)
        torch.maximum(tensor, torch.tensor(self.maxima.pop(0)), out=tensor)


def test_reduced_maxima_are_those_of_all_ranks(monkeypatch):
    # The groups are this test's own: maxima of layers of other tests are reduced over all ranks.
    first, group = object(), object()
    reducing, idle = (make_state(reduce_amax=True, group=first) for _ in range(2))
    elsewhere = make_state(reducing.recipe, tensors=1, group=group)
    local = make_state()
    other = OtherRank(monkeypatch, [2.0, 1.0, 0.0, 0.0, 8.0, 0.0], [32.0], [0.0] * 6, [0.0])
    with q.autocast(recipe=reducing.recipe):
        record(reducing, [1.0, 4.0, 0.0])
        record(local, [1.0] * 3)
    assert other.groups == [first, group]
    assert reducing.scale.tolist() == [224.0, 112.0, 1.0]
    assert idle.scale.tolist() == [1.0, 56.0, 1.0]
    assert elsewhere.scale.tolist() == [14.0]
    assert local.scale.tolist() == [448.0] * 3
    with q.autocast(recipe=reducing.recipe):
        pass  # nothing ran here, but the other rank waits
    assert other.maxima == []
    assert idle.scale.tolist() == [1.0, 56.0, 1.0]


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_state_made_in_inference_mode_can_be_written_outside(mode):
    with torch.inference_mode():
        state = make_state(mode=mode)
        record(state, [1.0, 2.0, 4.0])
    assert not state.scale.is_inference()
    state.load(torch.full((3,), 8.0), torch.full((4, 3), 2.0))
    state.use(DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3, **LOCAL), None)
    assert torch.equal(state.amax_history, torch.full((4, 3), 2.0))
    # E5M2's largest number is 128 times E4M3's largest number.
    assert torch.equal(state.scale, torch.full((3,), 8.0 if mode == "forward" else 8.0 / 128))


def test_evaluation_before_training_leaves_nothing_read_only():
    recipe = DelayedScaling(amax_history_len=4)
    trained, layer = (te.Linear(16, 16, device="cpu") for _ in range(2))
    x = torch.ones(16, 16)
    for module in (trained, layer):
        with torch.inference_mode(module is layer), te.autocast(recipe=recipe):
            y = module(x)
        if module is trained:
            y.sum().backward()
    layer.load_state_dict(trained.state_dict())
    scales = [module.fp8_meta["scaling_fwd"].scale for module in (trained, layer)]
    assert torch.equal(*scales)
    assert (scales[0][:2] != 1).all()
    layer.reset_fp8_meta_tensors()
    assert (scales[1] == 1).all()


OPTIONS = {"device": "cpu", "bias": False}
LAYERS = {
    "linear": lambda: te.Linear(16, 16, **OPTIONS),
    "norm": lambda: te.LayerNormLinear(16, 16, **OPTIONS),
    "op": lambda: te.ops.BasicLinear(16, 16, device="cpu"),
}


def states_of(layer):
    if isinstance(layer, te.ops.BasicLinear):
        return [layer._delayed_state(mode) for mode in ("forward", "backward")]
    return [layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]]


def maxima_of_a_step(layer, recipe):
    """Run a step; return the maximum that the weight's scale comes from."""
    with te.autocast(recipe=recipe):
        y = layer(torch.ones(16, 16))
    y.sum().backward()
    forward, backward = states_of(layer)
    assert torch.equal(backward.scale[:1], torch.full((1,), 57344.0))
    return 448.0 / forward.scale[1]


@pytest.mark.parametrize("change", ["history", "scale"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_see_that_their_tensors_were_replaced(name, change):
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", **LOCAL)
    layer = LAYERS[name]()
    maxima_of_a_step(layer, recipe)
    for state in states_of(layer):
        if change == "history":
            state.amax_history = torch.zeros_like(state.amax_history)
        else:
            state.scale = torch.full_like(state.scale, 1e4)
    other, x = copy.deepcopy(layer), torch.linspace(-1, 1, 256).view(16, 16)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), other(x))
    with torch.no_grad():
        layer.weight.mul_(4)
    assert torch.allclose(maxima_of_a_step(layer, recipe), layer.weight.abs().max())


@pytest.mark.parametrize("fields", [{"amax_history_len": 8}, {"margin": 3}], ids=str)
@pytest.mark.parametrize("name", ["linear", "norm"])
def test_calibration_under_another_recipe_takes_no_scales_away(name, fields):
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", **LOCAL)
    layer = LAYERS[name]()
    maxima_of_a_step(layer, recipe)
    other = DelayedScaling(**{"amax_history_len": 2, **fields}, **LOCAL)
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=other):
        layer(torch.ones(16, 16))
    with torch.no_grad():
        layer.weight.mul_(4)
    assert torch.allclose(maxima_of_a_step(layer, recipe), layer.weight.abs().max())
    assert states_of(layer)[0].amax_history.shape[0] == 2


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
@pytest.mark.parametrize("name", ["linear", "norm"])
def test_calibration_for_other_recipes_takes_no_maxima(name):
    layer = LAYERS[name]()
    maxima_of_a_step(layer, DelayedScaling(amax_history_len=2, **LOCAL))
    state = states_of(layer)[0]
    scale, history = state.scale.clone(), state.amax_history.clone()
    with te.autocast(enabled=False, calibrating=True, recipe=Float8CurrentScaling()):
        layer(torch.linspace(-1000, 0, 256).view(16, 16))
    assert torch.equal(state.scale, scale)
    assert torch.equal(state.amax_history, history)
