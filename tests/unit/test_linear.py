"""te_fast.pytorch.Linear on the host backend, against FP64 products of independently quantised operands."""

import copy
import pickle
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import reference as ref
import te_fast
import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from te_fast.errors import ShapeError

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place of the result, and room for FP32 sums in another order.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 3e-6}


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]()


def make(inputs=64, outputs=48, dtype=torch.bfloat16, **options):
    torch.manual_seed(inputs + outputs)
    layer = te.Linear(inputs, outputs, device="cpu", params_dtype=dtype, **options)
    if layer.use_bias and options.get("parameters_split") is None:
        torch.nn.init.normal_(layer.bias)
    return layer


def inputs(rows, layer, dtype=torch.bfloat16):
    torch.manual_seed(rows)
    x = torch.randn(rows, layer.in_features, dtype=dtype, requires_grad=True)
    return x, torch.randn(rows, layer.out_features, dtype=dtype)


def step(layer, x, grad, recipe, **options):
    with te.autocast(recipe=recipe):
        y = layer(x, **options)
    y.backward(grad)
    return y


def expected(layer, x, grad, name):
    """Products of quantised operands; delayed scaling is taken in its first step, at scale 1."""
    w, bias = layer.weight.detach(), layer.bias.detach()
    if w.dtype == torch.float32:
        bias = bias.bfloat16()  # no FP8 GEMM adds an FP32 bias
    bias = bias.double()
    if name == "block":
        kinds, grad_format, scale = ("1d", "2d", "1d"), "e4m3", None
    else:
        kinds, grad_format = ("t", "t", "t"), "e5m2"
        scale = torch.tensor(1.0) if name == "delayed" else None
    quantised = {
        "x": ref.quantized_values(x, "e4m3", kinds[0], scale=scale),
        "xt": ref.quantized_values(x, "e4m3", kinds[0], transposed=True, scale=scale),
        "w": ref.quantized_values(w, "e4m3", kinds[1], scale=scale),
        "g": ref.quantized_values(grad, grad_format, kinds[2], scale=scale),
        "gt": ref.quantized_values(grad, grad_format, kinds[2], transposed=True, scale=scale),
    }
    return {
        "y": quantised["x"] @ quantised["w"].t() + bias,
        "dx": quantised["g"] @ quantised["w"],
        "dw": quantised["gt"] @ quantised["xt"].t(),
        "db": grad.double().sum(0),
    }


def close(got, wanted, dtype):
    scale = wanted.abs().amax().clamp_min(1e-30)
    error = ((got.double() - wanted).abs() / scale).max().item()
    assert error <= 2 * ROUNDING[dtype], error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(32, 64, 48), (8, 16, 16), (136, 272, 144)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_whole_step_is_the_product_of_quantised_operands(name, shape, dtype):
    rows, ins, outs = shape
    layer = make(ins, outs, dtype)
    x, grad = inputs(rows, layer, dtype)
    if name == "delayed":
        x = (x.detach() * 0.5).requires_grad_()
    wanted = expected(layer, x, grad, name)
    y = step(layer, x, grad, RECIPES[name]())
    assert y.dtype == x.dtype
    close(y, wanted["y"], dtype)
    close(x.grad, wanted["dx"], dtype)
    close(layer.weight.grad, wanted["dw"], dtype)
    close(layer.bias.grad, wanted["db"], dtype)


def test_leading_dimensions_and_layouts(recipe):
    layer = make(bias=False)
    x, _ = inputs(32, layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        y = layer(x)
        assert torch.equal(layer(x.view(2, 4, 4, 64)), y.view(2, 4, 4, 48))
        assert torch.equal(layer(x.t().contiguous().t()), y)
        shifted = torch.empty(32 * 64 + 1, dtype=x.dtype)[1:].view(32, 64).copy_(x)
        assert torch.equal(layer(shifted), y)
        if not recipe.float8_current_scaling():  # whose scale is that of the rows it sees
            assert torch.equal(layer(x[::2].expand(2, 16, 64))[0], y[::2])
        assert layer(x[0].expand(8, 64)).shape == (8, 48)


def test_expanded_gradient(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.sum().backward()  # a gradient of stride 0
    first = x.grad.clone()
    x.grad = None
    layer = make()
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, first)


@pytest.mark.parametrize("frozen", ["input", "weight", "bias", "all but bias", "all"])
def test_frozen_parts(recipe, frozen):
    layer, plain = make(), make()
    x, grad = inputs(32, layer)
    step(plain, x.detach().requires_grad_(), grad, recipe)
    wanted = step(plain, leaf := x.detach().requires_grad_(), grad, recipe)
    plain.zero_grad()
    layer.weight.requires_grad_(frozen not in ("weight", "all but bias", "all"))
    layer.bias.requires_grad_(frozen not in ("bias", "all"))
    x = x.detach().requires_grad_(frozen not in ("input", "all but bias", "all"))
    with te.autocast(recipe=recipe):
        y = layer(x)
    assert y.requires_grad == (frozen != "all")
    if frozen == "all":
        return
    y.backward(grad)
    for part in (x, layer.weight, layer.bias):
        assert (part.grad is not None) == part.requires_grad
    if x.requires_grad and recipe.float8_current_scaling():
        assert torch.equal(x.grad, leaf.grad)
        assert torch.equal(y, wanted)
    if frozen == "all but bias":
        assert torch.allclose(layer.bias.grad.float(), grad.float().sum(0), rtol=2e-2, atol=2e-2)


def test_return_bias(recipe):
    layer = make(return_bias=True)
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y, bias = layer(x)
    assert torch.equal(bias, layer.bias)
    (y + bias).backward(grad)
    assert layer.bias.grad is not None
    without = make(return_bias=True, bias=False)
    with te.autocast(recipe=recipe):
        y, bias = without(x)
    assert bias.numel() == 0
    assert "bias" not in without.state_dict()


@pytest.mark.parametrize("name", ["current", "block"])
@pytest.mark.parametrize("first", [None, True, False])
def test_main_grad(first, name):
    recipe = RECIPES[name]()
    layer, plain = make(fuse_wgrad_accumulation=True), make()
    x, grad = inputs(32, layer)
    step(plain, x, grad, recipe)
    layer.weight.main_grad = torch.full((48, 64), 2.0)
    step(layer, x, grad, recipe, is_first_microbatch=first)
    assert layer.weight.grad is None
    base = 0 if first else 2
    assert torch.allclose(
        layer.weight.main_grad - base, plain.weight.grad.float(), rtol=2e-2, atol=2e-2
    )
    layer.weight.overwrite_main_grad = True
    layer.weight.grad_added_to_main_grad = False
    step(layer, x, grad, recipe)
    assert layer.weight.grad_added_to_main_grad
    assert layer.weight.grad.shape == layer.weight.shape
    assert torch.allclose(layer.weight.main_grad, plain.weight.grad.float(), rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_main_grad_is_missing(fp8):
    layer = make(fuse_wgrad_accumulation=True)
    x, grad = inputs(32, layer)
    with te.autocast(enabled=fp8):
        y = layer(x)
    with pytest.raises(RuntimeError, match="main_grad"):
        y.backward(grad)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_delayed_weight_gradient(fp8, fuse):
    recipe = Float8CurrentScaling()
    layer, plain = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse), make()
    fired = []
    layer.register_wgrad_accumulation_and_reduce_hooks(
        wgrad_accumulation_and_reduce_hook=lambda: fired.append(1)
    )
    assert layer.need_backward_dw()
    x, grad = inputs(32, layer)
    layer.weight.main_grad = torch.zeros(48, 64)
    for _ in range(2):
        for each in (layer, plain):
            with te.autocast(enabled=fp8, recipe=recipe):
                y = each(x)
            y.backward(grad)
    assert layer.weight.grad is None
    layer.backward_dw()
    layer.backward_dw()
    assert fired == [1, 1]
    got = layer.weight.main_grad if fuse else layer.weight.grad
    assert torch.allclose(got.float(), plain.weight.grad.float(), rtol=2e-2, atol=0.1)
    assert torch.equal(layer.bias.grad, plain.bias.grad)
    with pytest.raises(te_fast.TeFastError, match="without a backward"):
        layer.backward_dw()


@pytest.mark.parametrize(
    "calls",
    [((False, 32), (True, 32)), ((True, 32), (False, 32)), ((True, 0), (True, 32))],
    ids=["high precision first", "fp8 first", "no rows first"],
)
@pytest.mark.parametrize("override", [None, "high_precision"])
def test_delayed_weight_gradients_are_computed_oldest_first(calls, override):
    """Of whatever kind their forwards were: the first microbatch sets main_grad, and later ones add to it."""
    recipe = Float8CurrentScaling(backward_override=override)
    layer = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((48, 64), 100.0)
    wanted = torch.zeros(48, 64)
    for index, (fp8, rows) in enumerate(calls):
        x, grad = inputs(rows, layer)
        plain = make()
        for each, options in ((layer, {"is_first_microbatch": index == 0}), (plain, {})):
            with te.autocast(enabled=fp8, recipe=recipe):
                y = each(x, **options)
            y.backward(grad)
        wanted += plain.weight.grad
    layer.backward_dw()
    layer.backward_dw()
    assert torch.allclose(layer.weight.main_grad, wanted, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
@pytest.mark.parametrize("override", [None, "high_precision"])
@pytest.mark.parametrize("split", [None, ("a", "b")], ids=str)
def test_a_delayed_weight_gradient_outlives_a_main_grad_that_is_missing(fp8, override, split):
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
    layer, plain = make(parameters_split=split, **options), make(parameters_split=split)
    recipe = Float8CurrentScaling(backward_override=override)
    x, grad = inputs(32, layer)
    for each in (layer, plain):
        with te.autocast(enabled=fp8, recipe=recipe):
            y = each(x)
        y.backward(grad)
    with pytest.raises(RuntimeError, match="main_grad"):
        layer.backward_dw()
    parts = [getattr(layer, name) for name in layer.weight_names]
    for part in parts:
        part.main_grad = torch.zeros_like(part, dtype=torch.float32)
    layer.backward_dw()
    for part, name in zip(parts, layer.weight_names, strict=True):
        wanted = getattr(plain, name).grad.float()
        assert torch.allclose(part.main_grad, wanted, rtol=2e-2, atol=0.1)


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
@pytest.mark.parametrize("name", ["current", "block"])
def test_save_original_input(name):
    layer, plain = make(save_original_input=True), make()
    x, grad = inputs(32, layer)
    for each in (layer, plain):
        step(each, x, grad, RECIPES[name]())
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    with (
        te.autocast(recipe=DelayedScaling()),
        pytest.raises(ValueError, match="save_original_input"),
    ):
        layer(x)


@pytest.mark.parametrize("split", [("q", "k", "v"), {"q_": 16, "kv_": 32}], ids=str)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_parameters_split(split, fp8):
    layer, plain = make(parameters_split=split), make()
    names = [name.removesuffix("_") for name in split]
    assert [name for name, _ in layer.named_parameters()] == [
        f"{name}_{kind}" for name in names for kind in ("weight", "bias")
    ] or set(dict(layer.named_parameters())) == {
        f"{n}_{k}" for n in names for k in ("weight", "bias")
    }
    with torch.no_grad():
        plain.weight.copy_(torch.cat([getattr(layer, f"{name}_weight") for name in names]))
        plain.bias.copy_(torch.cat([getattr(layer, f"{name}_bias") for name in names]))
    x, grad = inputs(32, layer)
    for _ in range(2):
        ys = []
        for each in (layer, plain):
            each.zero_grad()
            with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
                ys.append(each(x))
            ys[-1].backward(grad)
        assert torch.equal(*ys)
        got = torch.cat([getattr(layer, f"{name}_weight").grad for name in names])
        assert torch.equal(got, plain.weight.grad)
        with torch.no_grad():  # a part that changes is quantised anew
            getattr(layer, f"{names[0]}_weight").add_(0.25)
            plain.weight[: getattr(layer, f"{names[0]}_weight").shape[0]].add_(0.25)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_parameters_split_into_main_grad(fp8):
    layer, plain = make(parameters_split=("a", "b"), fuse_wgrad_accumulation=True), make()
    with torch.no_grad():
        plain.weight.copy_(torch.cat([layer.a_weight, layer.b_weight]))
    x, grad = inputs(32, layer)
    step(plain, x, grad, Float8CurrentScaling()) if fp8 else plain(x).backward(grad)
    for first, base in ((None, 2.0), (True, 0.0)):
        for weight in (layer.a_weight, layer.b_weight):
            weight.main_grad = torch.full((24, 64), 2.0)
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            y = layer(x, is_first_microbatch=first)
        y.backward(grad)
        got = torch.cat([layer.a_weight.main_grad, layer.b_weight.main_grad]) - base
        assert torch.allclose(got, plain.weight.grad.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("first", [None, True])
def test_frozen_parts_get_no_gradient(fp8, delay, fuse, first):
    options = {"delay_wgrad_compute": delay, "fuse_wgrad_accumulation": fuse}
    layer, plain = make(parameters_split=("a", "b"), **options), make(parameters_split=("a", "b"))
    x, grad = inputs(32, layer)
    layer.b_weight.requires_grad_(False)  # and has no main_grad
    layer.a_weight.main_grad = torch.full((24, 64), 2.0)
    for each, call in ((layer, {"is_first_microbatch": first}), (plain, {})):
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            y = each(x, **call)
        y.backward(grad)
    layer.backward_dw()
    assert layer.b_weight.grad is None
    assert not hasattr(layer.b_weight, "main_grad")
    base = 0.0 if first else 2.0
    got = layer.a_weight.main_grad - base if fuse else layer.a_weight.grad.float()
    assert torch.allclose(got, plain.a_weight.grad.float(), rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
@pytest.mark.parametrize("first", [None, True])
def test_parts_wait_for_their_delayed_gradient(fp8, first):
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
    layer, plain = make(parameters_split=("a", "b"), **options), make()
    with torch.no_grad():
        plain.weight.copy_(torch.cat([layer.a_weight, layer.b_weight]))
    x, grad = inputs(32, layer)
    parts = layer.a_weight, layer.b_weight
    for part in parts:
        part.main_grad = torch.full((24, 64), 2.0)
    for each, call in ((layer, {"is_first_microbatch": first}), (plain, {})):
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            y = each(x, **call)
        y.backward(grad)
    assert all(part.grad is None for part in parts)
    layer.backward_dw()
    got = torch.cat([part.main_grad for part in parts]) - (0.0 if first else 2.0)
    assert torch.allclose(got, plain.weight.grad.float(), rtol=2e-2, atol=2e-2)


def test_parameters_split_errors():
    with pytest.raises(ValueError, match="add up"):
        make(parameters_split={"a": 16, "b": 16})
    with pytest.raises(ValueError, match="at least one"):
        make(parameters_split=())
    with pytest.raises(TypeError, match="tuple"):
        make(parameters_split=3)


# Weight cache ------------------------------------------------------------------------------------


def casts(function):
    before = dispatch.counters()["weight_casts"]
    function()
    return dispatch.counters()["weight_casts"] - before


def test_unchanged_weight_is_quantised_once(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert casts(lambda: layer(x)) == 1
        assert casts(lambda: [layer(x) for _ in range(3)]) == 0
        assert casts(lambda: layer(x[:8])) == 0
        assert casts(lambda: layer(x, is_first_microbatch=True)) == 1
        assert casts(lambda: layer(x, is_first_microbatch=False)) == 0


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "copy": lambda layer: layer.weight.copy_(layer.weight * 2),
    "load_state_dict": lambda layer: layer.load_state_dict(
        {"weight": layer.weight * 2, "bias": layer.bias}
    ),
    "data": lambda layer: setattr(layer.weight, "data", layer.weight * 2),
    "parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight * 2)),
    "to": lambda layer: _round_trip(layer),
}


def _round_trip(layer):
    layer.double()
    layer.weight.data = layer.weight.data * 2
    layer.bfloat16()


@pytest.mark.parametrize("first", [None, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_stale_weight_is_never_used(recipe, change, first):
    layer = make(bias=True)
    torch.nn.init.zeros_(layer.bias)
    x, _ = inputs(32, layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(x, is_first_microbatch=None if first is None else True)
        CHANGES[change](layer)
        got = layer(x, is_first_microbatch=first)
        fresh = make()
        fresh.load_state_dict(layer.state_dict(), strict=False)
        assert torch.equal(got, fresh(x))


def test_optimizer_steps_are_seen(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        outputs.append(step(layer, x, grad, recipe).detach())
        optimizer.step()
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


class RawOptimizer(torch.optim.Optimizer):
    """Writes past torch's version counters, as apex's and Transformer Engine's fused optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(2)


def test_steps_of_optimizers_that_write_through_raw_pointers_are_seen(recipe):
    layer = make(bias=False)
    x, _ = inputs(32, layer)
    optimizer = RawOptimizer(layer.parameters())
    with te.autocast(recipe=recipe):
        layer(x)
        version = layer.weight._version
        optimizer.step()
        assert layer.weight._version == version
        got = layer(x)
        fresh = make(bias=False)
        fresh.load_state_dict(layer.state_dict(), strict=False)
        assert torch.equal(got, fresh(x))


def test_gradient_accumulation_quantises_an_unchanged_weight_once():
    layer = make()
    x, grad = inputs(32, layer)
    recipe = Float8CurrentScaling()
    assert casts(lambda: [step(layer, x, grad, recipe) for _ in range(4)]) == 1


def test_change_between_forward_and_backward_is_an_error(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def test_weight_quantised_anew_between_two_forwards_and_their_backwards():
    layer, other = make(), make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=Float8CurrentScaling()):
        first = layer(x)
        layer(x, is_first_microbatch=True)
        wanted = other(x)
    first.backward(grad)
    got = x.grad.clone()
    x.grad = None
    wanted.backward(grad)
    assert torch.equal(got, x.grad)


# Autograd ----------------------------------------------------------------------------------------


def test_retain_graph_and_second_backward(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(grad, retain_graph=True)
    once = x.grad.clone()
    y.backward(grad)
    assert torch.allclose(x.grad.float(), 2 * once.float(), rtol=0.2, atol=0.5)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(grad)


def test_double_backward_is_an_error(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    (dx,) = torch.autograd.grad(y, x, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_gives_the_same_gradients(recipe, reentrant):
    layer, plain = make(), make()
    x, grad = inputs(32, layer)
    y = step(plain, x, grad, recipe)
    wanted = x.grad.clone(), plain.weight.grad
    x.grad = None
    with te.autocast(recipe=recipe):
        again = checkpoint(layer, x, use_reentrant=reentrant)
    again.backward(grad)  # recomputation runs outside of the region
    assert torch.equal(y, again)
    if not recipe.delayed():
        assert torch.equal(x.grad, wanted[0])
        assert torch.equal(layer.weight.grad, wanted[1])
    assert torch.allclose(x.grad.float(), wanted[0].float(), rtol=0.2, atol=0.2)


def test_saved_tensor_hooks_see_what_is_kept(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step(layer, x, grad, recipe)
    assert len(packed) == 1
    assert packed[0].dtype == torch.uint8
    got = layer.weight.grad.clone()
    layer.zero_grad()
    if not recipe.delayed():
        assert torch.equal(step(layer, x, grad, recipe), y)
        assert torch.equal(layer.weight.grad, got)


@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}], ids=["now", "later"])
@pytest.mark.parametrize("keeps_input", [False, True], ids=["quantised", "input"])
def test_saved_tensors_that_a_hook_changed_are_refused(recipe, keeps_input, options):
    if keeps_input and recipe.delayed():
        pytest.skip("delayed scaling keeps no input")
    layer = make(256, 128, save_original_input=keeps_input, **options)
    x, grad = inputs(64, layer)
    for unpack in (
        lambda tensor: tensor.flatten()[:16],  # backward would read past its end
        lambda tensor: tensor.float(),
        lambda tensor: tensor.half() if tensor.is_floating_point() else tensor.view(torch.int8),
    ):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack)
        with te.autocast(recipe=recipe), hooks:
            y = layer(x)
        with pytest.raises(ShapeError, match=r"Layer_\d+: linear: a saved tensor must be \d+ elem"):
            y.backward(grad)


def test_gradients_of_another_shape_are_refused(recipe):
    layer = make(64, 48)
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    for wrong in (grad[:, :16], grad[:16], grad.view(16, 96), grad.float()):
        with pytest.raises(ShapeError, match="gradient of the output must be .* 32 rows of 48"):
            y.grad_fn.apply(wrong)
    y.backward(grad)
    assert x.grad.shape == x.shape


def kept_bytes(layer, x, recipe):
    """Tensors that a forward keeps for backward."""
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(packed.append, lambda tensor: tensor)
    with hooks, te.autocast(recipe=recipe):
        layer(x)
    return packed


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_bytes_kept_for_backward(recipe, frozen):
    layer = make(512, 256, bias=False)
    layer.weight.requires_grad_(not frozen)
    x, _ = inputs(512, layer)
    kept = sum(tensor.nbytes for tensor in kept_bytes(layer, x, recipe))
    assert kept <= (0 if frozen else 1.02 * x.numel())


def test_full_scales_are_kept_as_they_are():
    layer = make(512, 256, bias=False)
    x, _ = inputs(512, layer)
    (kept,) = kept_bytes(layer, x, Float8BlockScaling(use_f32_scales=True))
    assert kept.nbytes == x.numel() + x.numel() // 128 * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 512), (200, 272), (8, 16)], ids=str)
def test_scales_kept_as_bytes_change_no_gradient(shape, dtype):
    rows, width = shape
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(7)).mul(3).to(dtype)
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4, 1e-30, 5e4]
    for column, value in enumerate([*edges, float("inf"), float("nan")]):
        x[: (rows + 1) // 2, column] = value
        x[-1, column] = value
    x[:, 10] = info.smallest_normal / 8
    gradients = []
    for save_original_input in (False, True):  # the latter quantises again, to FP32 scales
        layer = make(width, 48, dtype, save_original_input=save_original_input)
        _, grad = inputs(rows, layer, dtype)
        step(layer, x, grad, Float8BlockScaling())
        gradients.append(layer.weight.grad)
    assert torch.equal(gradients[0].nan_to_num(nan=-1.5), gradients[1].nan_to_num(nan=-1.5))
    assert gradients[0].isfinite().sum() > gradients[0].numel() // 4


def test_a_deferred_weight_gradient_reads_scales_kept_as_bytes():
    layer = make(256, 48, delay_wgrad_compute=True)
    plain = make(256, 48)
    x, grad = inputs(128, layer)
    step(plain, x, grad, Float8BlockScaling())
    step(layer, x, grad, Float8BlockScaling())
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
def test_module_hooks_and_overrides_run(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    seen = []
    handle = layer.register_forward_hook(lambda _m, _a, out: seen.append(out.shape))
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(x)
    handle.remove()
    assert seen == [(32, 48)]

    class Doubled(te.Linear):
        def forward(self, inp, **options):
            return 2 * super().forward(inp, **options)

    doubled = Doubled(64, 48, device="cpu", params_dtype=torch.bfloat16)
    doubled.load_state_dict(layer.state_dict(), strict=False)
    fresh = make()
    fresh.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(doubled(x), 2 * fresh(x))
        fresh.forward = lambda inp: inp.sum()
        assert fresh(x) == x.sum()


# Copies and checkpoints --------------------------------------------------------------------------


def test_state_dict_both_ways_with_nn_linear():
    layer, plain = make(), torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer.weight, plain.weight)
    torch.nn.init.normal_(layer.weight)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.weight, plain.weight)


def test_delayed_scaling_survives_a_checkpoint(tmp_path):
    layer = make()
    x, grad = inputs(32, layer)
    recipe = DelayedScaling()
    for _ in range(3):
        step(layer, x, grad, recipe)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    restored = make()
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for key in ("scaling_fwd", "scaling_bwd"):
        assert torch.equal(restored.fp8_meta[key].scale, layer.fp8_meta[key].scale)
        assert torch.equal(restored.fp8_meta[key].amax_history, layer.fp8_meta[key].amax_history)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), restored(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent(recipe, how):
    layer = make()
    x, grad = inputs(32, layer)
    step(layer, x, grad, recipe)
    other = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), other(x))
        other.weight.mul_(2)
        assert not torch.equal(layer(x), other(x))


def test_meta_device_then_reset():
    layer = te.Linear(64, 48, device="meta", params_dtype=torch.bfloat16)
    assert layer.weight.is_meta
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert 0.015 < layer.weight.std() < 0.03
    assert layer.bias.abs().max() == 0
    x, _ = inputs(8, layer)
    with torch.no_grad(), te.autocast():
        assert torch.isfinite(layer(x)).all()


def test_initialisation():
    layer = te.Linear(256, 256, device="cpu")
    assert layer.weight.dtype == torch.float32
    assert abs(layer.weight.std().item() - 0.023) < 1e-3
    ones = te.Linear(16, 16, device="cpu", init_method=torch.nn.init.ones_)
    assert (ones.weight == 1).all()


# High precision and torch's autocast -------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outside_of_autocast_it_is_nn_linear(dtype):
    layer, plain = make(dtype=dtype), torch.nn.Linear(64, 48, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    x, grad = inputs(5, layer, dtype)
    y = layer(x)
    y.backward(grad)
    got = x.grad.clone()
    x.grad = None
    wanted = plain(x)
    wanted.backward(grad)
    assert torch.equal(y, wanted)
    assert torch.equal(got, x.grad)
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_torch_autocast(recipe):
    layer = make(dtype=torch.float32)
    x, grad = inputs(32, layer, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        with te.autocast(recipe=recipe):
            y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(grad.bfloat16())
    assert layer.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.float32
    with pytest.raises(TypeError, match="torch.autocast"):
        layer(x.bfloat16())


# Bad input ---------------------------------------------------------------------------------------


def test_bad_input_is_named(recipe):
    layer = make(name="proj")
    x, _ = inputs(32, layer)
    cases = [
        (lambda: layer(x[:, :32]), ValueError, "proj: .*in_features = 64"),
        (lambda: layer(x[:3]), ValueError, "proj: .*append 5 rows"),
        (lambda: layer(x.float()), TypeError, "proj: .*bfloat16"),
        (lambda: layer(x.to("meta")), RuntimeError, "proj: .*cpu"),
        (lambda: layer("x"), TypeError, "proj: .*str"),
        (lambda: layer(torch.tensor(1.0, dtype=torch.bfloat16)), ValueError, "proj: .*in_features"),
        (lambda: layer(x, fp8_output=True), NotImplementedError, "fp8_output"),
        (lambda: layer(x, fp8_grad=True), NotImplementedError, "fp8_grad"),
    ]
    for call, kind, message in cases:
        with te.autocast(recipe=recipe), pytest.raises(kind, match=message) as raised:
            call()
        assert isinstance(raised.value, te_fast.TeFastError)


@pytest.mark.parametrize(
    "options",
    [
        {"tp_size": 2},
        {"sequence_parallel": True},
        {"ub_overlap_ag": True},
        {"ub_overlap_rs": True},
        {"ub_overlap_rs_dgrad": True},
        {"ub_bulk_dgrad": True},
        {"ub_bulk_wgrad": True},
        {"ub_name": "qkv"},
        {"symmetric_ar_type": "multimem_all_reduce"},
    ],
    ids=str,
)
def test_unsupported_arguments_are_named(options):
    with pytest.raises(te_fast.UnsupportedError, match=next(iter(options))):
        make(**options)


def test_unaligned_features():
    for layer in (make(40, 48), make(64, 40)):
        x, grad = inputs(32, layer)
        with te.autocast(), pytest.raises(ValueError, match="multiple of"):
            layer(x).backward(grad)


def test_any_number_of_rows_with_auto_pad(recipe):
    layer = make()
    former = te_fast.auto_pad(True)
    try:
        for rows in (1, 3, 7, 9, 17):
            x, grad = inputs(rows, layer)
            layer.zero_grad()
            step(layer, x, grad, recipe)
            name = next(name for name, kind in RECIPES.items() if isinstance(recipe, kind))
            if name != "delayed":
                close(layer.weight.grad, expected(layer, x, grad, name)["dw"], torch.bfloat16)
    finally:
        te_fast.auto_pad(former)


@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows(recipe, leading):
    layer = make()
    x = torch.empty(*leading, 64, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = layer(x)
    assert y.shape == (*leading, 48)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.abs().max() == 0


def test_no_rows_leave_main_grad_alone_in_high_precision():
    layer = make(fuse_wgrad_accumulation=True)
    for first, left in ((None, 2.0), (True, 0.0)):
        layer.weight.main_grad = torch.full((48, 64), 2.0)
        x = torch.empty(0, 64, dtype=torch.bfloat16, requires_grad=True)
        layer(x, is_first_microbatch=first).sum().backward()
        assert layer.weight.grad is None
        assert (layer.weight.main_grad == left).all()


def test_quantize_takes_no_scale_that_it_would_not_use():
    with pytest.raises(ValueError, match="own scales"):
        dispatch.quantize(torch.ones(16, 16), Float8CurrentScaling(), scale=torch.ones(1))


def test_special_values(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(torch.zeros_like(x)), layer.bias.expand(32, 48))
        layer.weight[3, 5] = float("nan")
        y = layer(x)
        assert y[:, 3].isnan().all()
        assert torch.isfinite(y[:, 4:]).all()


def test_blackwell_recipes_raise():
    with pytest.raises(RuntimeError, match="MXFP8"), te.autocast(recipe=MXFP8BlockScaling()):
        pass


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
def test_recipe_may_change_between_forward_and_backward():
    layer, plain = make(), make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = layer(x)
    with te.autocast(recipe=Float8BlockScaling()):
        layer(x)
    y.backward(grad)
    got = layer.weight.grad.clone()
    step(plain, x, grad, Float8CurrentScaling())
    assert torch.equal(got, plain.weight.grad)


def test_functorch_is_refused_in_fp8_only():
    layer = make()
    x = torch.randn(3, 8, 64, dtype=torch.bfloat16)
    assert torch.func.vmap(layer)(x).shape == (3, 8, 48)
    with te.autocast(), pytest.raises(te_fast.UnsupportedError, match="vmap"):
        torch.func.vmap(layer)(x)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:Graph break due to unsupported builtin")
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_torch_compile_breaks_the_graph_and_is_right(name):
    layer = make()
    x, _ = inputs(32, layer)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(layer(x)) * 2, backend="eager")
    with torch.no_grad(), te.autocast(recipe=RECIPES[name]()):
        assert torch.equal(compiled(x), torch.relu(layer(x)) * 2)


def test_inference_mode(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    with torch.inference_mode(), te.autocast(recipe=recipe):
        y = layer(x)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), y)


def test_threads_share_a_layer(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    failures = []
    with torch.no_grad(), te.autocast(recipe=recipe):
        wanted = layer(x)

        def work():
            with torch.no_grad():
                for _ in range(50):
                    same = torch.equal(layer(x.t().contiguous().t()), wanted)
                    failures.extend([] if same else [1])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


# What a forward launches -------------------------------------------------------------------------


def test_launches(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    step(layer, x, grad, recipe)
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(x)
        before = dispatch.counters()
        with dispatch.record() as launches:
            layer(x)
        after = dispatch.counters()
    kernel = {
        "delayed": ["cast_bf16_e4m3"],
        "current": ["amax_bf16", "cast_bf16_e4m3"],
        "block": ["cast_block_1d_bf16_e4m3"],
    }
    name = next(name for name, kind in RECIPES.items() if isinstance(recipe, kind))
    assert [launch.name for launch in launches] == [*kernel[name], "gemm"]
    assert after["plan_misses"] == before["plan_misses"]
    assert after["allocations"] == before["allocations"]


def test_all_scales_of_a_direction_are_updated_by_one_launch():
    layers = [make() for _ in range(5)]
    x, grad = inputs(32, layers[0])
    recipe = DelayedScaling()
    for layer in layers:
        step(layer, x, grad, recipe)
    with dispatch.record() as launches:
        with te.autocast(recipe=recipe):
            ys = [layer(x) for layer in layers]
        torch.autograd.backward(ys, [grad] * 5)
    updates = [launch.name for launch in launches if launch.name.startswith("scale_update")]
    assert len(updates) == 2  # forward, backward
    with torch.no_grad(), dispatch.record() as launches, te.autocast(recipe=recipe):
        layers[0](x)
    assert not any(launch.name.startswith("scale_update") for launch in launches)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_attributes_that_change_after_a_forward(fp8):
    layer, plain = make(), make()
    x, grad = inputs(32, layer)

    def run(module):
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            return module(x)

    for module in (plain, layer):
        run(module).backward(grad)
    layer.weight.grad = None
    layer.weight.main_grad = torch.zeros(48, 64)
    layer.fuse_wgrad_accumulation = True
    run(layer).backward(grad)
    assert layer.weight.grad is None
    assert torch.allclose(layer.weight.main_grad, plain.weight.grad.float(), rtol=2e-2, atol=0.1)
    layer.return_bias, layer.apply_bias = True, False
    y, bias = run(layer)
    assert torch.allclose((y + bias).float(), run(plain).float(), rtol=2e-2, atol=2e-2)
