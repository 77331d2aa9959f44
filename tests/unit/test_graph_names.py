"""The functions of Transformer Engine that Megatron-LM's own CUDA graphs call."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.errors import ArgumentKeyError, ArgumentNameError, DtypeError, StateError
from te_fast.pytorch import distributed, graph
from te_fast.runtime import rng, weak_tensors
from te_fast.state.module import StatefulModule

CPU = {"device": "cpu"}
manager = te.FP8GlobalStateManager


@pytest.fixture(autouse=True)
def _reset():
    manager.reset()
    yield
    graph.set_capture_end()
    manager.reset()


def models():
    return [te.LayerNormMLP(32, 32, **CPU), te.ops.Linear(32, 32, **CPU), torch.nn.Linear(32, 32)]


def states(module):
    """The states of delayed scaling of a module and its submodules, forward before backward."""
    return [
        state
        for part in module.modules()
        if isinstance(part, StatefulModule)
        for state in part._scaling_states()
        if state is not None
    ]


def step(module, recipe):
    with te.autocast(recipe=recipe):
        y = module(torch.randn(16, 32))
    y.sum().backward()


def test_every_name_that_megatron_imports_at_once_is_there(fresh):
    """A missing name silently turns off Megatron-LM's handling of FP8 in graphs."""
    script = """
from te_fast.pytorch.distributed import is_fp8_activation_recompute_enabled
from te_fast.pytorch.fp8 import FP8GlobalStateManager
from te_fast.pytorch.graph import make_graphed_callables, restore_fp8_tensors, save_fp8_tensors
from te_fast.pytorch.graph import set_capture_end, set_capture_start
from te_fast.pytorch.module.base import TransformerEngineBaseModule
from te_fast.pytorch.utils import make_weak_ref
"""
    assert fresh(script) == ""


def test_scales_are_saved_and_put_back():
    recipe = DelayedScaling(amax_history_len=4)
    modules = models()
    for _ in range(2):
        step(modules[0], recipe)
    assert graph.save_fp8_tensors(modules, Float8CurrentScaling()) is None
    assert graph.save_fp8_tensors(modules, None) is None
    graph.restore_fp8_tensors(modules, None)
    saved = graph.save_fp8_tensors(modules, recipe)
    known = [(s, s.scale.clone(), s.amax_history.clone()) for s in states(modules[0])]
    for module in modules:
        step(module, recipe)
    with pytest.raises(StateError, match="6 modules were saved and 5 are to be restored"):
        graph.restore_fp8_tensors(modules[:2], saved)
    assert any(not torch.equal(s.scale, scale) for s, scale, _ in known)
    graph.restore_fp8_tensors(modules, saved)
    for state, scale, history in known:
        assert torch.equal(state.scale, scale)
        assert torch.equal(state.amax_history, history)
    # States that did not exist when states were saved get their initial values.
    assert states(modules[1])
    for state in states(modules[1]):
        assert torch.equal(state.scale, torch.ones_like(state.scale))
        assert not state.amax_history.any()


def test_histories_have_the_recipes_length_from_the_saving_on():
    module = te.Linear(32, 32, **CPU)
    step(module, DelayedScaling(amax_history_len=8))
    recipe = DelayedScaling(amax_history_len=2)
    saved = graph.save_fp8_tensors([module], recipe)
    histories = [state.amax_history for state in states(module)]
    assert [history.shape[0] for history in histories] == [2, 2]
    before = [history.clone() for history in histories]
    step(module, recipe)
    graph.restore_fp8_tensors([module], saved)
    for state, history, values in zip(states(module), histories, before, strict=True):
        assert state.amax_history is history
        assert torch.equal(history, values)


def test_no_backward_updates_scales_while_graphs_are_captured():
    recipe, module = DelayedScaling(amax_history_len=4), te.Linear(32, 32, **CPU)
    graph.set_capture_start()
    assert graph.is_graph_capturing()
    step(module, recipe)
    forward, backward = states(module)
    assert not torch.equal(forward.scale, torch.ones(3))  # the region was not a graph's
    assert torch.equal(backward.scale, torch.ones(2))
    assert backward.amax_history[0].any()
    graph.set_capture_end()
    manager.reduce_and_update_fp8_tensors(forward=False)
    assert not torch.equal(backward.scale, torch.ones(2))


def test_a_layer_that_a_graph_has_run_takes_part_in_the_next_update():
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
    module = te.Linear(32, 32, **CPU)
    step(module, recipe)
    forward, _ = states(module)
    with te.autocast(recipe=recipe):
        # As after a replay, maxima are present although no layer has run.
        forward.amax_history[0].copy_(torch.tensor([2.0, 4.0, 0.0]))
        module.fp8_meta["recipe"], module.fp8_meta["fp8_group"] = recipe, None
        before = forward.scale.clone()
        manager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
        assert torch.equal(forward.scale, before)
    assert torch.equal(forward.scale[:2], torch.tensor([448 / 2.0, 448 / 4.0]))
    # A layer that no graph has run does not take part; layers without scales are left alone.
    forward.amax_history[0].copy_(torch.tensor([8.0, 8.0, 0.0]))
    with te.autocast(recipe=recipe):
        manager.add_fp8_tensors_to_global_buffer(te.Linear(32, 32, **CPU).fp8_meta)
    assert torch.equal(forward.scale[:2], torch.tensor([448 / 2.0, 448 / 4.0]))


def test_the_skip_flag_may_be_made_under_inference_mode():
    with torch.inference_mode():
        manager.set_skip_fp8_weight_update_tensor(True)
    flag = manager.quantization_state.skip_fp8_weight_update_tensor
    assert not flag.is_inference()
    manager.set_skip_fp8_weight_update_tensor(False)
    assert flag == 0


def test_weak_tensors_are_on_the_same_memory():
    x = torch.ones(3)
    assert te.utils.make_weak_ref(x) is x  # no graph owns the host's memory
    got = te.utils.make_weak_ref((x, [1, 2.0, None], {"a": True}))
    assert got == (x, [1, 2.0, None], {"a": True})
    with pytest.raises(DtypeError, match="got a str"):
        te.utils.make_weak_ref("x")
    for tensor in (
        torch.randn(6, 4)[1:, ::2],
        torch.tensor(3.0),
        torch.empty(0),
        torch.ones(2, dtype=torch.bfloat16),
    ):
        alias = weak_tensors._alias(tensor)
        assert torch.equal(alias, tensor)
        assert alias.stride() == tensor.stride()
        assert alias.dtype == tensor.dtype
        if tensor.numel():
            tensor.fill_(5)
            assert (alias == 5).all()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "Sequential", "mixed", "recomputed"])
def test_who_watches_save_for_backward_sees_what_layers_keep(monkeypatch, kind):
    """Megatron-LM must know which buffers of its graphs a backward reads."""
    seen = []
    own = torch.autograd.function.FunctionCtx.save_for_backward

    def observe(ctx, *tensors):
        seen.extend(tensors)
        return own(ctx, *tensors)

    class Twice(te.ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return 2 * input_

        def op_backward(self, ctx, grad_output):
            return 2 * grad_output, ()

    model = {
        "Linear": lambda: te.Linear(32, 32, **CPU),
        "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, **CPU),
        "Sequential": lambda: te.ops.Sequential(te.ops.GELU(), te.ops.Linear(32, 32, **CPU)),
        "mixed": lambda: te.ops.Sequential(Twice(), te.ops.Linear(32, 32, **CPU)),
        "recomputed": lambda: te.LayerNormMLP(32, 32, checkpoint=True, **CPU),
    }[kind]()
    results = []
    for watched in (False, True):
        if watched:
            monkeypatch.setattr(torch.autograd.function.FunctionCtx, "save_for_backward", observe)
        x = torch.ones(16, 32, requires_grad=True)
        with te.autocast(recipe=Float8CurrentScaling()):
            y = model(x)
        assert (len(seen) > 0) == watched
        y.sum().backward()
        results.append((y, x.grad, [p.grad for p in model.parameters()]))
        model.zero_grad()
    assert (
        any(tensor is not None and tensor.dtype == torch.uint8 for tensor in seen)
        or kind == "recomputed"
    )
    for one, two in zip(*(torch.utils._pytree.tree_leaves(r) for r in results), strict=True):
        assert torch.equal(one, two)


WATCHED = """
import torch

own = torch.autograd.function.FunctionCtx.save_for_backward
seen = []

def observe(ctx, *tensors):
    seen.extend(tensors)
    return own(ctx, *tensors)

torch.autograd.function.FunctionCtx.save_for_backward = observe
import te_fast.pytorch as te

layer = te.LayerNormLinear(32, 32, device="cpu")
x = torch.ones(16, 32, requires_grad=True)
layer(x).sum().backward()
assert any(tensor is x for tensor in seen), seen
torch.autograd.function.FunctionCtx.save_for_backward = own
seen.clear()
layer(x).sum().backward()
assert not seen
"""


def test_who_watched_before_te_fast_came_sees_what_layers_keep(fresh):
    """Megatron-LM makes its graphs' managers before the first call of a layer."""
    assert fresh(WATCHED) == ""


@pytest.mark.parametrize(
    "other", ["functools.partial(own_mark)", "lambda ctx, *t: own_mark(ctx, *t)"]
)
def test_who_watches_other_methods_too(fresh, other):
    head = f"""
import functools
import torch

own_mark = torch.autograd.function.FunctionCtx.mark_dirty
torch.autograd.function.FunctionCtx.mark_dirty = {other}
"""
    assert fresh(head + WATCHED) == ""


class Generator:
    """A stand-in for a GPU's generator, which refers to its state as an object."""

    def __init__(self, state=None):
        self.state = state or [0]

    def clone_state(self):
        return Generator(list(self.state))

    def manual_seed(self, seed):
        self.state[0] = seed

    def graphsafe_get_state(self):
        return Generator(self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def draw(self):
        self.state[0] += 1
        return self.state[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="states are the GPU's where there is one")
def test_named_random_states_of_the_cpu():
    former, tracker = distributed.get_all_rng_states(), te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    torch.default_generator.manual_seed(0)
    wanted = torch.rand(2)
    torch.default_generator.manual_seed(0)
    drawn = []
    for _ in range(2):
        with tracker.fork():
            drawn.append(torch.rand(2))
    # The named state continues where it was left, even after an error.
    with pytest.raises(TypeError), tracker.fork():
        torch.rand([drawn.append(torch.rand(2))])
    with tracker.fork():
        drawn.append(torch.rand(2))
    assert torch.equal(torch.rand(2), wanted)
    own = torch.Generator().manual_seed(3)
    assert torch.equal(
        torch.stack(drawn), torch.stack([torch.rand(2, generator=own) for _ in drawn])
    )
    distributed.set_all_rng_states(former)


@pytest.mark.skipif(torch.cuda.is_available(), reason="states are the GPU's where there is one")
def test_a_state_of_the_cpu_inside_of_itself():
    """It goes on where the outer use is, as a GPU's state does."""
    former, tracker = distributed.get_all_rng_states(), te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    tracker.add("other", 4)
    drawn, x = [], torch.ones(2, requires_grad=True)

    def draw(scaled):
        with tracker.fork():
            drawn.append(torch.rand(2))
        return scaled * drawn[-1]

    with tracker.fork():
        draw(x)
        with tracker.fork("other"):
            torch.rand(2)
            draw(x)
        drawn.append(torch.rand(2))
        y = te.checkpoint(draw, x, get_rng_state_tracker=lambda: tracker)
    draw(x)
    with tracker.fork("other"):
        y.sum().backward(retain_graph=True)
    with tracker.fork():
        y.sum().backward()
    assert torch.equal(drawn.pop(), drawn[3])
    repeated = drawn.pop()
    draw(x)
    assert torch.equal(repeated, drawn[3])
    own = torch.Generator().manual_seed(3)
    assert torch.equal(
        torch.stack(drawn), torch.stack([torch.rand(2, generator=own) for _ in drawn])
    )
    distributed.set_all_rng_states(former)


@pytest.mark.parametrize(
    ("seed", "kind", "message"),
    [
        ([1], DtypeError, "an integer"),
        (True, DtypeError, "an integer"),
        (2**70, ArgumentNameError, "64 bits"),
    ],
)
def test_seeds_that_are_none(seed, kind, message):
    tracker = te.CudaRNGStatesTracker()
    with pytest.raises(kind, match=message):
        tracker.add("model-parallel-rng", seed)
    assert (tracker.states_, tracker.seeds_) == ({}, set())
    with pytest.raises(DtypeError, match="must be a dict of generators, got NoneType"):
        tracker.set_states(None)


def test_named_random_states(monkeypatch):
    default = Generator([100])
    monkeypatch.setattr(rng, "_current_generator", lambda: default)
    assert distributed.graph_safe_rng_available()
    former, tracker = distributed.get_all_rng_states(), te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1000)
    tracker.add("other", 2000)
    assert distributed.get_all_rng_states() is tracker.states_
    for name, seed, message in (("new", 1000, "seed 1000 is"), ("other", 3000, "a state 'other'")):
        with pytest.raises(ArgumentNameError, match=message):
            tracker.add(name, seed)
    with tracker.fork():
        assert default.draw() == 1001
        with tracker.fork("other"):
            assert default.draw() == 2001
        assert default.draw() == 1002
    assert default.draw() == 101
    with tracker.fork():
        assert default.draw() == 1003
    with pytest.raises(ArgumentKeyError, match="no state 'x'"), tracker.fork("x"):
        pass
    with pytest.raises(KeyError), tracker.fork("x"):
        pass
    with pytest.raises(DtypeError, match="must be an integer, got 'seed'"):
        tracker.add("third", "seed")
    assert "seed" not in tracker.seeds_
    with pytest.raises(DtypeError, match="state 'a' must be a torch.Generator"):
        tracker.set_states({"a": torch.get_rng_state()})
    with pytest.raises(DtypeError, match="state 'a' must be a torch.Generator, .* got int"):
        tracker.set_states({"a": 1000})
    assert set(tracker.states_) == {"model-parallel-rng", "other"}
    states_ = tracker.get_states()
    tracker.reset()
    assert (tracker.states_, tracker.seeds_) == ({}, set())
    tracker.set_states(states_)
    assert distributed.get_all_rng_states() is states_
    with tracker.fork("other"):
        assert default.draw() == 2002
    distributed.set_all_rng_states(former)
