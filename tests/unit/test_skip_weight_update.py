"""The flag by which a captured graph skips the quantisation of its weights, on the host backend."""

import pytest
import torch

import te_fast.pytorch as te
from reference import quantized_values
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling
from te_fast.errors import ShapeError
from te_fast.pytorch.graph import set_capture_end, set_capture_start

manager = te.FP8GlobalStateManager
ONE = torch.tensor(1.0)


@pytest.fixture(autouse=True)
def cpu_flag(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    manager.reset()
    yield
    manager.reset()


def make(**options):
    torch.default_generator.manual_seed(3)
    layer = te.Linear(64, 48, bias=False, device="cpu", params_dtype=torch.bfloat16, **options)
    return layer, torch.randn(32, 64, dtype=torch.bfloat16)


def graph_call(layer, x, recipe, **options):
    """Call a layer as a graph wrapper does, which updates delayed scales itself."""
    with te.autocast(recipe=recipe, _graph=True):
        return layer(x, **options)


@pytest.mark.parametrize("first", [None, True, False], ids=["none", "first", "later"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_the_flag_decides_whether_the_weight_is_quantised(recipe, first, grad):
    layer, x = make()
    x.requires_grad_(grad)
    manager.set_skip_fp8_weight_update_tensor(False)
    with torch.set_grad_enabled(grad):
        former = graph_call(layer, x, recipe, is_first_microbatch=first)
        with torch.no_grad():
            layer.weight.mul_(-2)
        manager.set_skip_fp8_weight_update_tensor(True)
        skipped = graph_call(layer, x, recipe, is_first_microbatch=first)
        manager.set_skip_fp8_weight_update_tensor(False)
        fresh = graph_call(layer, x, recipe, is_first_microbatch=first)
    assert torch.equal(skipped, former)
    # A power of two times a weight has the same FP8 digits. At scale 1, delayed scaling may lose small values.
    if recipe.delayed():
        wanted = (
            quantized_values(x, "e4m3", "t", scale=ONE)
            @ quantized_values(layer.weight, "e4m3", "t", scale=ONE).t()
        )
        assert (fresh.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    else:
        assert torch.equal(fresh, -2 * former)


def test_warm_ups_of_a_phase_heed_the_flag(recipe):
    """Megatron-LM's own graphs open no region for graphs: their warm-ups make the memory that the graphs read."""
    layer, x = make()
    manager.set_skip_fp8_weight_update_tensor(False)

    def call():
        with te.autocast(recipe=recipe):
            return layer(x, is_first_microbatch=False)

    set_capture_start()
    try:
        former = call()
        with torch.no_grad():
            layer.weight.mul_(-2)
        manager.set_skip_fp8_weight_update_tensor(True)
        if not recipe.delayed():  # whose scales have changed
            assert torch.equal(call(), former)
        manager.set_skip_fp8_weight_update_tensor(False)
        fresh = call()
    finally:
        set_capture_end()
    if not recipe.delayed():
        assert torch.equal(fresh, -2 * former)
    manager.set_skip_fp8_weight_update_tensor(True)
    with torch.no_grad():
        layer.weight.zero_()
    with te.autocast(recipe=recipe):
        assert not layer(x, is_first_microbatch=True).any()  # the phase is over


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_a_flag_that_is_no_float_is_refused(kind, recipe):
    layer, x = kind(64, 48, device="cpu"), torch.randn(32, 64)
    for wrong in (torch.tensor(True), torch.ones(1, dtype=torch.float16), torch.ones(2)):
        manager.quantization_state.skip_fp8_weight_update_tensor = wrong
        with pytest.raises(ShapeError, match="update_tensor must be one element of torch.float32"):
            graph_call(layer, x, recipe)
    manager.quantization_state.skip_fp8_weight_update_tensor = None
    assert graph_call(layer, x, recipe).shape == (32, 48)


def test_a_weight_that_is_not_there_is_quantised_whatever_the_flag(recipe):
    layer, x = make()
    with torch.no_grad():
        with te.autocast(recipe=recipe):
            wanted = layer(x)
        manager.set_skip_fp8_weight_update_tensor(True)
        assert torch.equal(graph_call(layer, x, recipe), wanted)


def test_calls_outside_of_graphs_do_not_read_the_flag(recipe):
    layer, x = make()
    with torch.no_grad():
        manager.set_skip_fp8_weight_update_tensor(True)
        graph_call(layer, x, recipe)
        layer.weight.mul_(-2)
        with te.autocast(recipe=recipe):
            eager = layer(x)
        fresh, _ = make()
        fresh.weight.mul_(-2)
        with te.autocast(recipe=recipe):
            assert torch.equal(eager, fresh(x))
        layer.weight.fill_(0)
        with te.autocast(recipe=recipe):
            assert not layer(x).any()
        assert graph_call(layer, x, recipe).any()  # the graph's own weight is older


def test_delayed_scales_are_those_of_the_quantised_weight():
    recipe = DelayedScaling(amax_history_len=4)
    layer, x = make()
    x.requires_grad_()
    manager.set_skip_fp8_weight_update_tensor(False)
    graph_call(layer, x, recipe)
    state = layer.fp8_meta["scaling_fwd"]
    weight_amax = layer.weight.abs().max().float()
    assert state.amax_history[0, 1] == weight_amax
    manager.reduce_and_update_fp8_tensors(forward=True)
    scale = state.scale.clone()
    assert scale[1] == 448.0 / weight_amax

    graph_call(layer, x, recipe)  # this call quantises with the new scale
    manager.reduce_and_update_fp8_tensors(forward=True)
    assert torch.equal(state.scale, scale)
    manager.set_skip_fp8_weight_update_tensor(True)
    expected = graph_call(layer, x, recipe)
    with torch.no_grad():
        layer.weight.mul_(64)
    skipped = graph_call(layer, x, recipe)
    assert torch.equal(skipped, expected)
    assert state.amax_history[0, 1] == 0  # a skipped weight leaves no maximum
    assert state.amax_history[0, 0] == x.abs().max().float()
    manager.reduce_and_update_fp8_tensors(forward=True)
    assert torch.equal(state.scale, scale)
    assert torch.equal(graph_call(layer, x, recipe), expected)

    manager.set_skip_fp8_weight_update_tensor(False)
    saturated = graph_call(layer, x, recipe)
    assert state.amax_history[0, 1] == 64 * weight_amax
    manager.reduce_and_update_fp8_tensors(forward=True)
    assert state.scale[1] == 448.0 / (64 * weight_amax)
    fitting = graph_call(layer, x, recipe)
    assert torch.equal(
        fitting, 64 * expected
    )  # 64 is a power of two, so that the digits are the same
    assert not torch.equal(fitting, saturated)


def test_gradients_are_added_where_the_flag_decides(recipe):
    layer, x = make(fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.ones(48, 64)
    manager.set_skip_fp8_weight_update_tensor(False)
    y = graph_call(layer, x, recipe, is_first_microbatch=True)
    y.backward(torch.zeros_like(y))
    assert torch.equal(layer.weight.main_grad, torch.ones(48, 64))
    manager.reset()
    y = graph_call(layer, x, recipe, is_first_microbatch=True)
    y.backward(torch.zeros_like(y))
    assert not layer.weight.main_grad.any()


def test_the_graphs_weight_outlives_the_cache(recipe):
    layer, x = make()
    manager.set_skip_fp8_weight_update_tensor(False)
    with torch.no_grad():
        former = graph_call(layer, x, recipe)
        dispatch.drop_weight_cache(layer)
        manager.set_skip_fp8_weight_update_tensor(True)
        layer.weight.fill_(0)
        assert torch.equal(graph_call(layer, x, recipe), former)
