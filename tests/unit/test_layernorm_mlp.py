"""LayerNormMLP on the host backend, beyond test_compound_layers.py."""

import pytest
import torch
import torch.utils.checkpoint

import compound_reference as chain
import te_fast
import te_fast.pytorch as te
from compound_layers import (
    DTYPES,
    PRECISE,
    QUANTIZED,
    RECIPES,
    assert_close,
    clear,
    data,
    gradients,
    make,
    step,
)
from selection import sampled
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import DeviceError, ShapeError
from te_fast.state.extra_state import ExtraState, pack, unpack

GATED = ["geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"]


def mlp(**options):
    return make("mlp", **options)


# Activations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("activation", "dtype"), sampled(chain.ACTIVATIONS, DTYPES), ids=str)
def test_activations_in_high_precision(activation, dtype):
    layer = mlp(activation=activation, dtype=dtype)
    assert layer.fc1_weight.shape == (192 if activation in GATED else 96, 64)
    assert layer.fc2_weight.shape == (64, 96)
    x, grad = data(layer, 17, dtype)
    wanted = chain.exact(layer, x, grad)
    y = step(layer, x, grad)
    assert_close({"y": y, **gradients(layer, x)}, wanted, 2 * PRECISE[dtype])


@pytest.mark.parametrize(("activation", "name"), sampled(chain.ACTIVATIONS, RECIPES))
def test_activations_in_fp8(activation, name):
    layer = mlp(activation=activation)
    x, grad = data(layer)
    wanted = chain.quantized(layer, x, grad, name)
    y = step(layer, x, grad, RECIPES[name]())
    assert_close({"y": y, **gradients(layer, x)}, wanted, QUANTIZED[torch.float32])


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_activation_params(fp8):
    given = {"limit": 0.5, "alpha": 2.0, "glu_linear_offset": 0.25}
    layer, default = (
        mlp(activation="clamped_swiglu", activation_params=params) for params in (given, None)
    )
    x, grad = data(layer)
    y = step(layer, x, grad, Float8CurrentScaling() if fp8 else None)
    reference = chain.quantized(layer, x, grad, "current") if fp8 else chain.exact(layer, x, grad)
    assert_close({"y": y, **gradients(layer, x)}, reference, 2e-3 if fp8 else 4e-6)
    assert not torch.allclose(y, default(x), atol=1e-2)
    partly = mlp(activation="clamped_swiglu", activation_params={"limit": 7})
    assert torch.equal(partly(x), default(x))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": "tanh"}, NotImplementedError, "activation must be one of .*'tanh'"),
        ({"activation_params": {"limit": 1.0}}, TypeError, "gelu may have"),
        ({"activation_params": 7.0}, TypeError, "must be a dict"),
        (
            {"activation": "clamped_swiglu", "activation_params": {"slope": 1.0}},
            TypeError,
            "'slope'",
        ),
        (
            {"activation": "clamped_swiglu", "activation_params": {"limit": "7"}},
            TypeError,
            "finite number",
        ),
        (
            {"activation": "clamped_swiglu", "activation_params": {"alpha": float("nan")}},
            TypeError,
            "finite number",
        ),
    ],
    ids=str,
)
def test_wrong_activations_are_named(options, error, message):
    with pytest.raises(error, match=message) as raised:
        mlp(**options)
    assert isinstance(raised.value, te_fast.TeFastError)


# Without a norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_an_mlp_without_a_norm(name):
    layer = mlp(normalization=None)
    assert layer.layer_norm_weight is None
    assert set(layer.state_dict()) == {"fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"}
    x, grad = data(layer)
    y = step(layer, x, grad, RECIPES[name]() if name else None)
    if name is None:
        wanted, bound = chain.exact(layer, x, grad), 2e-6
    else:
        wanted, bound = chain.quantized(layer, x, grad, name), QUANTIZED[torch.float32]
    assert_close({"y": y, **gradients(layer, x)}, wanted, bound)


@pytest.mark.parametrize(
    "option", ["return_layernorm_output", "return_layernorm_output_gathered", "zero_centered_gamma"]
)
def test_options_that_need_a_norm(option):
    with pytest.raises(te_fast.ShapeError, match=f"{option} needs a norm"):
        mlp(normalization=None, **{option: True})


# Recomputation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *RECIPES])
@pytest.mark.parametrize(
    "options", [{}, {"normalization": None}, {"activation": "swiglu"}], ids=str
)
def test_checkpoint_is_the_same_step_with_less_memory(name, options):
    layer, plain = mlp(checkpoint=True, **options), mlp(**options)
    x, grad = data(layer)
    recipe = RECIPES[name]() if name else None
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (layer, plain)]
    for _ in range(3):
        outputs, found, sizes = [], [], []
        for each in (layer, plain):
            packed = []
            clear(each, x)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, packed=packed: packed.append(t) or t, lambda t: t
            ):
                outputs.append(step(each, x, grad, recipe))
            found.append({key: value.clone() for key, value in gradients(each, x).items()})
            sizes.append([tensor.shape for tensor in packed])
        assert torch.equal(*outputs)
        assert_close(found[0], found[1], 0)
        assert sizes[0] == [x.shape]
        if name == "delayed":
            for key in ("scaling_fwd", "scaling_bwd"):
                ours, others = layer.fp8_meta[key], plain.fp8_meta[key]
                assert torch.equal(ours.scale, others.scale), key
                assert torch.equal(ours.amax_history, others.amax_history), key
        for optimizer in optimizers:
            optimizer.step()


def test_recomputation_uses_the_scales_of_its_forward():
    layer, plain = mlp(checkpoint=True), mlp()
    recipe = DelayedScaling(amax_compute_algo="most_recent")
    small, grad = data(layer)
    large = (100 * small.detach()).requires_grad_()
    found = []
    for each in (layer, plain):
        step(each, small.detach(), grad, recipe)
        clear(each)
        with te.autocast(recipe=recipe):
            y = each(small)
        with te.autocast(recipe=recipe):
            each(large)  # leaving the region changes the scales before the backward
        small.grad = None
        y.backward(grad)
        found.append(gradients(each, small))
    assert_close(found[0], found[1], 0)
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(layer.fp8_meta[key].amax_history, plain.fp8_meta[key].amax_history)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_checkpoint_under_torch_autocast(fp8):
    layer, plain = mlp(checkpoint=True), mlp()
    x, grad = data(layer)
    found = []
    for each in (layer, plain):
        clear(each, x)
        with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=fp8):
            y = each(x)
        y.backward(grad.bfloat16())
        found.append(gradients(each, x))
    assert_close(found[0], found[1], 0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["current", "block"]
)
def test_checkpoint_inside_of_torchs(recipe, reentrant):
    """torch recomputes the forward outside of the region; the layer's own checkpoint then recomputes it again."""
    layer, plain = mlp(checkpoint=True, activation="silu"), mlp(activation="silu")
    x, grad = data(layer)
    y = step(plain, x, grad, recipe)
    wanted = gradients(plain, x)
    x.grad = None
    with te.autocast(recipe=recipe):
        again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    again.backward(grad)
    assert torch.equal(y, again)
    for name, value in gradients(layer, x).items():
        assert torch.equal(value, wanted[name]), name


def test_checkpoint_without_rows():
    layer = mlp(checkpoint=True)
    x = torch.empty(0, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


def test_recomputation_repeats_the_region_of_its_forward():
    layer, plain = mlp(checkpoint=True), mlp()
    x, grad = data(layer)
    found = []
    for each in (layer, plain):
        leaves = [x.detach().requires_grad_() for _ in range(2)]
        with te.autocast(recipe=Float8CurrentScaling()):
            quantised = each(leaves[0])
        precise = each(leaves[1])
        quantised.backward(grad)
        with te.autocast(recipe=DelayedScaling()):  # the backward runs inside of another region
            precise.backward(grad)
        found.append({str(index): leaf.grad for index, leaf in enumerate(leaves)})
    assert_close(found[0], found[1], 0)


@pytest.mark.parametrize("fuse", [False, True])
def test_checkpoint_with_gradients_that_go_their_own_way(fuse):
    layer = mlp(checkpoint=True, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    plain = mlp()
    x, grad = data(layer)
    for weight in (layer.fc1_weight, layer.fc2_weight):
        weight.main_grad = torch.zeros(weight.shape)
    for each in (layer, plain):
        step(each, x, grad, Float8CurrentScaling())
    assert layer.fc1_weight.grad is None
    layer.backward_dw()
    for name in ("fc1_weight", "fc2_weight"):
        weight = getattr(layer, name)
        got = weight.main_grad if fuse else weight.grad
        assert torch.allclose(got, getattr(plain, name).grad, rtol=1e-5, atol=1e-5)


def test_checkpoint_returns_what_is_asked_for():
    options = {"return_bias": True, "return_layernorm_output": True}
    layer, plain = mlp(checkpoint=True, **options), mlp(**options)
    x, grad = data(layer)
    found = []
    for each in (layer, plain):
        clear(each, x)
        y, bias, ln = each(x)
        torch.autograd.backward([y + bias, ln], [grad, torch.ones_like(ln)])
        found.append(gradients(each, x))
    assert_close(found[0], found[1], 1e-6)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], plain(x)[0])


def test_checkpoint_sees_a_parameter_that_changed():
    layer = mlp(checkpoint=True)
    x, grad = data(layer)
    y = layer(x)
    with torch.no_grad():
        layer.fc1_bias.add_(1)
    with pytest.raises(te_fast.StateError, match="fc1_bias has been modified by an inplace"):
        y.backward(grad)


def test_checkpoint_twice():
    """The second backward has the gradient scales that the first one led to, as without recomputation."""
    found = []
    for checkpoint in (True, False):
        layer = mlp(checkpoint=checkpoint)
        x, grad = data(layer)
        with te.autocast(recipe=DelayedScaling()):
            y = layer(x)
        y.backward(grad, retain_graph=True)
        first = layer.fc1_weight.grad.clone()
        y.backward(grad)
        assert not torch.equal(layer.fc1_weight.grad, 2 * first)
        found.append(gradients(layer, x))
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(grad)
    assert_close(found[0], found[1], 0)


# Weight gradients --------------------------------------------------------------------------------


def test_backward_dw_of_the_second_weight_comes_first():
    layer = mlp(delay_wgrad_compute=True)
    given = []
    original = layer._compute_deferred
    layer._compute_deferred = lambda name, handle: (given.append(name), original(name, handle))
    x, grad = data(layer)
    step(layer, x, grad)
    assert layer.fc1_weight.grad is None
    assert layer.fc2_weight.grad is None
    layer.backward_dw()
    assert given == ["fc2_weight", "fc1_weight"]


def test_backward_dw_of_a_frozen_weight_is_left_out():
    layer = mlp(delay_wgrad_compute=True)
    layer.fc2_weight.requires_grad_(False)
    x, grad = data(layer)
    step(layer, x, grad)
    layer.backward_dw()
    assert layer.fc2_weight.grad is None
    assert layer.fc1_weight.grad is not None


# States ------------------------------------------------------------------------------------------


def state(slots=(6, 4), history=5):
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.rand(size, generator=generator) + 0.5
        for count in slots
        for size in ((count,), (history, count))
    ]
    return ExtraState(DelayedScaling(amax_history_len=history), *tensors)


def test_extra_state_has_six_and_four_slots():
    layer = mlp()
    wanted = state()
    layer.load_state_dict(layer.state_dict() | {"_extra_state": pack(wanted)})
    read = unpack(layer.state_dict()["_extra_state"], layer="mlp")
    for key in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
        assert torch.equal(getattr(read, key), getattr(wanted, key))
    with pytest.raises(RuntimeError, match=r"scales of \(3, 2\) tensors, the layer has \(6, 4\)"):
        layer.set_extra_state(pack(state((3, 2))))


def test_slots_are_those_of_transformer_engine():
    """fc1: input 0, weight 1; fc2: input 3, weight 4; gradients of fc1's output 0, of fc2's 2."""
    layer = mlp()
    x, grad = data(layer)
    with te.autocast(recipe=DelayedScaling()):
        y = layer(x)
        forward = layer.fp8_meta["scaling_fwd"].amax_history[0].clone()
    y.backward(grad)
    backward = layer.fp8_meta["scaling_bwd"].amax_history[-1]
    assert forward[0] > 0
    assert forward[1] == layer.fc1_weight.abs().amax()
    assert forward[4] == layer.fc2_weight.abs().amax()
    assert forward[3] > 0
    assert backward[2] == grad.abs().amax()
    assert backward[0] > 0
    assert (forward[[2, 5]] == 0).all()
    assert (backward[[1, 3]] == 0).all()


def test_load_torch_modules():
    layer = mlp(activation="swiglu")
    gate, up, down = (
        torch.nn.Linear(64, 96),
        torch.nn.Linear(64, 96),
        torch.nn.Linear(96, 64),
    )
    norm = torch.nn.LayerNorm(64)
    layer.load_torch(norm, (gate, up), down)
    x = torch.randn(8, 64)
    ln = norm(x)
    wanted = down(torch.nn.functional.silu(gate(ln)) * up(ln))
    assert torch.allclose(layer(x), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="fc1.weight must have shape"):
        layer.load_torch(fc1=gate)
    with pytest.raises(ValueError, match="layer_norm needs exactly"):
        mlp(normalization=None).load_torch(norm)


@pytest.mark.parametrize("fault", ["shape", "meta source", "meta layer"])
def test_load_torch_changes_all_or_nothing(fault):
    layer = mlp(zero_centered_gamma=True)
    if fault == "meta layer":
        layer.fc2_bias = torch.nn.Parameter(layer.fc2_bias.to("meta"))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    norm, up = torch.nn.LayerNorm(64), torch.nn.Linear(64, 96)
    torch.nn.init.normal_(norm.weight)
    down = torch.nn.Linear(64 if fault == "shape" else 96, 64)
    if fault == "meta source":
        down.bias = torch.nn.Parameter(down.bias.to("meta"))
    error = ShapeError if fault == "shape" else DeviceError
    with pytest.raises(error, match=r"fc2\.(weight must have shape|bias: the .* meta device)"):
        layer.load_torch(norm, up, down)
    state = layer.state_dict()
    assert all(value.is_meta or torch.equal(value, before[name]) for name, value in state.items())


def test_a_zero_centred_weight_is_shifted_before_it_is_rounded():
    layer = mlp(zero_centered_gamma=True, params_dtype=torch.bfloat16)
    norm = torch.nn.LayerNorm(64)
    with torch.no_grad():
        norm.weight.add_(torch.linspace(-1e-3, 1e-3, 64))
    layer.load_torch(norm)
    assert torch.equal(layer.layer_norm_weight, (norm.weight - 1).bfloat16())


def test_marks_of_parallel_parameters():
    layer = mlp(set_parallel_mode=True)
    for name, dim in (("fc1_weight", 0), ("fc1_bias", 0), ("fc2_weight", 1)):
        parameter = getattr(layer, name)
        assert parameter.tensor_model_parallel
        assert (parameter.partition_dim, parameter.partition_stride) == (dim, 1)
    for name in ("layer_norm_weight", "layer_norm_bias", "fc2_bias"):
        assert getattr(layer, name).sequence_parallel is False
    x, grad = data(layer)
    assert_close({"y": step(layer, x, grad)}, chain.exact(layer, x, grad), 2e-6)


def test_initialisation():
    ones, twos = torch.nn.init.ones_, lambda weight: torch.nn.init.constant_(weight, 2)
    layer = te.LayerNormMLP(
        16, 32, device="cpu", init_method=ones, output_layer_init_method=twos, seq_length=4
    )
    assert (layer.fc1_weight == 1).all()
    assert (layer.fc2_weight == 2).all()
    assert (layer.fc1_bias == 0).all()
    default = te.LayerNormMLP(256, 256, device="cpu", activation="geglu")
    for weight in (default.fc1_weight, default.fc2_weight):
        assert abs(weight.std().item() - 0.023) < 1e-3


def test_the_fork_of_the_random_number_generator():
    forks = []

    class Tracker:
        def fork(self):
            forks.append(1)
            return torch.random.fork_rng()

    te.LayerNormMLP(16, 32, device="cpu", get_rng_state_tracker=Tracker)
    assert len(forks) == 2


# What a forward launches -------------------------------------------------------------------------


def launches_of(function):
    with te_fast.dispatch.record() as launches:
        function()
    return [launch.name for launch in launches]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_launches_of_a_forward_with_cached_weights(activation):
    layer = mlp(dtype=torch.bfloat16, activation=activation)
    x, grad = data(layer, 32, torch.bfloat16)
    recipe = DelayedScaling()
    step(layer, x, grad, recipe)
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(x)
        names = launches_of(lambda: layer(x))
    assert names.count("gemm") == 2
    assert len(names) <= 4, names


def test_all_scales_of_a_direction_are_updated_by_one_launch():
    layers = [mlp() for _ in range(3)]
    x, grad = data(layers[0])
    recipe = DelayedScaling()

    def whole_step():
        with te.autocast(recipe=recipe):
            ys = [layer(x) for layer in layers]
        torch.autograd.backward(ys, [grad] * 3)

    whole_step()
    updates = [name for name in launches_of(whole_step) if name.startswith("scale_update")]
    assert len(updates) == 2  # one for the forward, one for the backward
