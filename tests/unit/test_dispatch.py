"""``te_fast.dispatch``: calls of the dispatcher by hand."""

import time

import pytest
import torch

import reference as ref
import te_fast
import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import ArgumentError, DtypeError, ShapeError
from te_fast.runtime import native

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has facts")


def tensor(rows, cols, dtype=torch.bfloat16):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + cols)).to(dtype)


def assert_close(got, wanted, bound):
    assert (got.double() - wanted).norm() < bound * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gemm_in_high_precision(dtype):
    x, w, bias = tensor(24, 40, dtype), tensor(56, 40, dtype), tensor(1, 56, dtype)[0]
    wanted = x.double() @ w.double().t()
    bound = 4 * torch.finfo(dtype).eps
    out = torch.full((24, 56), torch.nan, dtype=dtype)
    assert dispatch.gemm(x, w, out) is out
    assert_close(out, wanted, bound)
    dispatch.gemm(x, w, out, bias=bias)
    assert_close(out, wanted + bias.double(), bound)
    dispatch.gemm(x, w, out, accumulate=True)
    assert_close(out, 2 * wanted + bias.double(), bound)
    dispatch.gemm(x.t().contiguous(), w, out, x_k_outermost=True)
    assert_close(out, wanted, bound)
    dispatch.gemm(x, w.t().contiguous(), out, w_k_outermost=True)
    assert_close(out, wanted, bound)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("kind", ["t", "1d"])
def test_gemm_of_quantised_operands(kind, columnwise):
    """Either layout of an operand contracts along its rows."""
    recipe = Float8CurrentScaling() if kind == "t" else Float8BlockScaling()
    x, w = tensor(48, 160), tensor(80, 160)
    made = []
    for operand in (x, w):
        own = operand.t().contiguous() if columnwise else operand
        made.append(dispatch.quantize(own, recipe, columnwise=True))
    out = torch.empty(48, 80)
    dispatch.gemm(*made, out, x_columnwise=columnwise, w_columnwise=columnwise)
    values = [ref.quantized_values(operand, "e4m3", kind) for operand in (x, w)]
    assert_close(out, values[0] @ values[1].t(), 1e-6)


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        (((24, 40), (56, 48), (24, 56)), "gemm"),
        (((24, 40), (56, 40), (24, 40)), "out"),
        (((24, 40, 2), (56, 40), (24, 56)), "gemm"),
    ],
)
def test_gemm_refuses_what_does_not_fit(shapes, what):
    x, w, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    with pytest.raises(te_fast.ShapeError, match=what):
        dispatch.gemm(x, w, out)
    assert (out == 0).all()


def test_gemm_refuses_a_result_in_an_operand():
    x = torch.randn(32, 32)
    before = x.clone()
    for operands in ((x, torch.eye(32)), (torch.eye(32), x)):
        with pytest.raises(
            te_fast.ShapeError, match="gemm: an output must be in memory of its own"
        ):
            dispatch.gemm(*operands, x)
    assert torch.equal(x, before)


def test_dequantize_refuses_a_result_in_what_it_reads():
    # FP8 bytes and scales are in the result's memory: they would be read after the result is written.
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.arange(64, dtype=dtype).view(2, 32)
        before = out.clone()
        data = out.view(torch.uint8).flatten()[:64].view(2, 32)
        scale = torch.ones(1)
        for arguments in ((data, scale), (torch.zeros(2, 32, dtype=torch.uint8), None)):
            data, scale_inv = arguments
            if scale_inv is None:
                scale_inv = out.view(torch.float32).flatten()[:1]
            with pytest.raises(
                te_fast.ShapeError, match="dequantize: an output must be in memory of its own"
            ):
                native.dequantize(data, scale_inv, "e4m3", 0, 32, out)
        assert torch.equal(out, before)


def test_a_missing_layout_is_named():
    quantized = dispatch.quantize(tensor(16, 32), Float8CurrentScaling(), columnwise=False)
    with pytest.raises(te_fast.ShapeError, match="layout"):
        dispatch.dequantize(quantized, columnwise=True)


def layer_of(**options):
    torch.default_generator.manual_seed(0)
    options = {"device": "cpu", "params_dtype": torch.bfloat16} | options
    return te.Linear(64, 48, **options)


def test_linear_forward_is_the_layer_without_its_hooks():
    layer, x = layer_of(), tensor(32, 64)
    wanted = layer(x)
    layer.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    assert torch.equal(dispatch.linear_forward(layer, x), wanted)
    with te.autocast(recipe=Float8CurrentScaling()):
        first = dispatch.linear_forward(layer, x, True)
        assert torch.equal(dispatch.linear_forward(layer, x, is_first_microbatch=False), first)
    assert not torch.equal(first, wanted)


def test_plans_and_counters():
    layer = layer_of()
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        layer(tensor(32, 64))
        assert dispatch.plan_count(layer) == 1
        dispatch.reset_counters()
        assert set(dispatch.counters().values()) == {0}
        layer(tensor(32, 64))
        counted = dispatch.counters()
        assert counted["plan_hits"] == 1
        assert counted["gemms"] == 1
        assert counted["launches"] > 0
        assert counted["plan_misses"] == counted["weight_casts"] == 0
        layer(tensor(16, 64))
        assert dispatch.counters()["plan_misses"] == 1
        assert dispatch.plan_count(layer) == 2


def test_memory_is_given_back_and_taken_again():
    layer, x = layer_of(), tensor(32, 64)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        wanted = layer(x)
        held = dispatch.inventory()["cpu"]
        assert held["gemm_plans"] > 0
        dispatch.release_memory()
        # Memory that must be zero between launches stays.
        assert dispatch.inventory()["cpu"]["private_bytes"] <= held["private_bytes"] - x.numel()
        assert torch.equal(layer(x), wanted)


def test_launches_that_are_not_made():
    layer, x = layer_of(), tensor(32, 64)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        wanted = layer(x)
        with dispatch.record() as made:
            assert torch.equal(layer(x), wanted)
        assert [launch.name for launch in made][-1] == "gemm"
        dispatch.reset_counters()
        with dispatch.record(execute=False) as noted:
            layer(x)
        assert noted == []
        counted = dispatch.counters()
        assert counted["launches"] + counted["gemms"] == len(made)
        # The layer keeps no tensor that was not computed.
        assert torch.equal(layer(x), wanted)


def test_blocks_in_blocks_note_their_own_launches():
    layer, x = layer_of(), tensor(32, 64)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        layer(x)
        with dispatch.record() as one:
            layer(x)
        with dispatch.record() as outer:
            layer(x)
            with dispatch.record() as inner:
                layer(x)
            with dispatch.record(execute=False):
                layer(x)
            layer(x)
        layer(x)
    names = [launch.name for launch in one]
    assert [launch.name for launch in inner] == names
    # Without a launch, the weight's bytes were not written, so that the next call quantises it.
    assert [launch.name for launch in outer[: 2 * len(names)]] == 2 * names
    assert [launch.name for launch in outer[2 * len(names) :]][-1] == "gemm"
    assert len(outer) > 2 * len(names)


def test_stages_of_a_forward():
    layer, x = layer_of(), tensor(32, 64)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        stages = dispatch.stage_times(layer, x, calls=5)
    assert len(stages) > 3
    assert all(time >= 0 for time in stages.values())
    assert sum(stages.values()) > 0


def test_stages_of_an_operation_leave_out_what_came_before():
    layer, x = te.LayerNorm(64, device="cpu"), tensor(32, 64)
    with torch.no_grad():
        dispatch.stage_times(layer, x, calls=1)
        begin = time.perf_counter()
        time.sleep(0.05)
        stages = dispatch.stage_times(layer, x, calls=1)
        took = time.perf_counter() - begin
    assert sum(stages.values()) <= 1e6 * (took - 0.05)


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
def test_padding_is_asked_for():
    layer, x = layer_of(), tensor(5, 64)
    assert dispatch.auto_pad(True) is False
    try:
        with te.autocast(recipe=Float8CurrentScaling()):
            assert layer(x).shape == (5, 48)
    finally:
        assert dispatch.auto_pad(False) is True
    with te.autocast(), pytest.raises(ValueError, match="auto_pad"):
        layer(x)


@NO_GPU
@pytest.mark.parametrize("ask", [dispatch.device_facts, dispatch.cuda_driver_version])
def test_facts_of_no_gpu(ask):
    with pytest.raises(te_fast.CudaError, match="CUDA"):
        ask()


def test_facts_are_of_cuda_devices():
    for other in ("cpu", torch.device("meta")):
        with pytest.raises(te_fast.DeviceError, match=f"expected a CUDA device, got {other}"):
            dispatch.device_facts(other)


@pytest.mark.parametrize("device", ["abacus", -1, None, 1.5])
def test_what_is_no_device_is_named(device):
    for ask in (dispatch.device_facts, dispatch.load_kernels):
        with pytest.raises(te_fast.DeviceError, match=f"CUDA device, got {device!r}"):
            ask(device)


@pytest.mark.parametrize("other", [None, torch.ones(2), torch.nn.Linear(64, 48)], ids=type)
def test_what_is_no_layer_is_named(other):
    kind = type(other).__name__
    with pytest.raises(DtypeError, match=f"linear_forward: expected a layer .* got {kind}"):
        dispatch.linear_forward(other, tensor(32, 64))
    with pytest.raises(DtypeError, match=f"plan_count: expected a layer .* got {kind}"):
        dispatch.plan_count(other)
    if not isinstance(other, torch.nn.Module):
        with pytest.raises(DtypeError, match=f"layer must be a Module, got {kind}"):
            dispatch.drop_weight_cache(other)
        with pytest.raises(DtypeError, match=f"layer must be a Module, got {kind}"):
            dispatch.stage_times(other)


@pytest.mark.parametrize("calls", [0, -1, 1.5, "2"])
def test_stages_are_of_one_call_at_least(calls):
    with pytest.raises(
        ArgumentError, match=f"calls must be an integer of 1 or more, got {calls!r}"
    ):
        dispatch.stage_times(layer_of(), tensor(32, 64), calls=calls)


def test_functions_and_outputs_are_named_by_what_came():
    x, gamma = tensor(4, 16), torch.ones(16)
    relu, rms = dispatch.ActivationFunction("relu"), dispatch.NormFunction("RMSNorm")
    for call, name in (
        (lambda: dispatch.activation_outputs(x, "relu"), "function"),
        (lambda: dispatch.activation_outputs(None, relu), "x"),
        (lambda: dispatch.activation(x, "relu", dispatch.ActivationOutputs(x)), "function"),
        (lambda: dispatch.activation(x, relu, x), "out"),
        (lambda: dispatch.activation_backward(x, x, relu, x), "out"),
        (lambda: dispatch.norm_outputs(x, "RMSNorm"), "function"),
        (lambda: dispatch.norm(x, gamma, rms, x), "out"),
        (lambda: dispatch.norm_gradients(x, None, rms), "gamma"),
        (lambda: dispatch.norm_backward(x, x, gamma, None, gamma, rms, x), "out"),
    ):
        with pytest.raises(DtypeError, match=f": {name} must be a .*, got"):
            call()
    for make, function in ((dispatch.activation_outputs, relu), (dispatch.norm_outputs, rms)):
        with pytest.raises(ShapeError, match=r"2 dimensions .* got 3"):
            make(x[None], function)


def test_the_device_check_can_be_turned_off():
    assert te.should_set_cuda_device_every_batch()
    te.set_cuda_device_every_batch(False)
    try:
        assert not te.should_set_cuda_device_every_batch()
        assert layer_of()(tensor(32, 64)).shape == (32, 48)
    finally:
        te.set_cuda_device_every_batch(True)
    assert te.should_set_cuda_device_every_batch()


def test_a_failed_forward_leaves_scales_and_weight_as_they_were():
    layer, x = layer_of(), tensor(32, 64)
    recipe = DelayedScaling()
    with torch.no_grad(), te.autocast(recipe=recipe):
        wanted = layer(x)
        state = layer.fp8_meta["scaling_fwd"]
        live = state.amax_history[0].clone()
        for wrong in (x[:5] * 100, x.float() * 100, (x * 100)[:, :32]):
            with pytest.raises(te_fast.TeFastError):
                layer(wrong)
        assert torch.equal(state.amax_history[0], live)
        assert torch.equal(layer(x), wanted)


class Tracker:
    """A tracker like Megatron-LM's, which forks a generator of its own."""

    def __init__(self):
        self.forked = []

    def fork(self, name="model-parallel-rng"):
        self.forked.append(name)
        return torch.random.fork_rng(devices=[])


def test_initialisation_forks_the_tracker():
    tracker = Tracker()
    layer_of(get_rng_state_tracker=lambda: tracker)
    layer_of(get_rng_state_tracker=lambda: tracker, rng_tracker_name="expert")
    assert tracker.forked == ["model-parallel-rng", "expert"]


def test_quantize_takes_no_scale_that_it_would_not_use():
    with pytest.raises(ValueError, match="own scales"):
        dispatch.quantize(torch.ones(16, 16), Float8CurrentScaling(), scale=torch.ones(1))


@pytest.mark.parametrize("recipe", [None, 3, Float8CurrentScaling])
def test_what_is_no_recipe_is_named(recipe):
    x, splits = tensor(32, 64), torch.tensor([16, 16])
    with pytest.raises(DtypeError, match=r"quantize: recipe must be .* got"):
        dispatch.quantize(x, recipe)
    with pytest.raises(DtypeError, match=r"quantize_groups: recipe must be .* got"):
        dispatch.quantize_groups(x, splits, recipe)


def test_what_is_no_operand_is_named():
    x, out = tensor(32, 64), torch.empty(32, 32)
    operand = dispatch.quantize(x, Float8CurrentScaling(), columnwise=True)
    with pytest.raises(DtypeError, match="dequantize: expected a QuantizedOperand, got Tensor"):
        dispatch.dequantize(x)
    with pytest.raises(DtypeError, match=r"gemm: w must be .* got NoneType"):
        dispatch.gemm(x, None, out)
    with pytest.raises(
        ShapeError, match="x_columnwise does not apply to x, a Tensor; give x_k_outermost"
    ):
        dispatch.gemm(x, x, out, x_columnwise=True)
    with pytest.raises(
        ShapeError, match="w_k_outermost does not apply to w, a QuantizedOperand; give w_c"
    ):
        dispatch.gemm(operand, operand, out, w_k_outermost=True)
