"""Recipes with ``backward_override``: forward in FP8, backward in high precision, against FP64."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import reference as ref
import te_fast
import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import Float8BlockScaling, Float8CurrentScaling

RECIPES = {"current": Float8CurrentScaling, "block": Float8BlockScaling}
# Relative error in the Frobenius norm of one GEMM whose result is rounded to the type.
BOUNDS = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
SCALINGS = pytest.mark.parametrize("scaling", RECIPES)
OVERRIDES = pytest.mark.parametrize("override", ["high_precision", "dequantized"])


def recipe_of(scaling, override=None):
    return RECIPES[scaling](backward_override=override)


def linear(dtype=torch.bfloat16, inputs=144, outputs=80, **options):
    torch.default_generator.manual_seed(inputs)
    layer = te.Linear(inputs, outputs, device="cpu", params_dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def data(layer, rows=40, dtype=None):
    dtype = dtype or next(layer.parameters()).dtype
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, layer.in_features, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(rows, layer.out_features, generator=generator).to(dtype)


def step(layer, x, dy, recipe, **options):
    with te.autocast(recipe=recipe):
        y = layer(x, **options)
    y.backward(dy)
    return y.detach()


def operands(x, weight, scaling, override):
    """Input and weight as backward takes them, in FP64."""
    if override == "high_precision":
        return x.detach().double(), weight.detach().double()
    kinds = ("1d", "2d") if scaling == "block" else ("t", "t")
    pairs = zip((x, weight), kinds, strict=True)
    return [ref.quantized_values(t, "e4m3", kind).to(x.dtype).double() for t, kind in pairs]


def check(got, wanted, dtype):
    assert got.dtype == dtype
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < BOUNDS[dtype], error.item()


@OVERRIDES
@SCALINGS
@DTYPES
def test_linear_against_fp64(scaling, override, dtype):
    layer, plain = linear(dtype), linear(dtype)
    x, dy = data(layer)
    y = step(layer, x, dy, recipe_of(scaling, override))
    assert torch.equal(y, step(plain, x.detach(), dy, recipe_of(scaling)))
    xq, wq = operands(x, layer.weight, scaling, override)
    check(x.grad, dy.double() @ wq, dtype)
    check(layer.weight.grad, dy.double().t() @ xq, dtype)
    check(layer.bias.grad, dy.double().sum(0), dtype)
    # The two overrides differ by FP8's rounding, and both differ from FP8's own backward.
    other = linear(dtype)
    step(other, x, dy, recipe_of(scaling, ({"high_precision", "dequantized"} - {override}).pop()))
    for gradient in (plain.weight.grad, other.weight.grad):
        assert (layer.weight.grad.double() - gradient.double()).norm() > 0.01 * gradient.norm()


@OVERRIDES
@SCALINGS
@pytest.mark.parametrize("kind", ["layer", "operation"])
def test_experts_against_fp64(kind, scaling, override):
    splits = [24, 0, 7, 33]
    torch.default_generator.manual_seed(3)
    if kind == "layer":
        layer = te.GroupedLinear(4, 96, 48, params_dtype=torch.float32, device="cpu")
    else:
        layer = te.ops.GroupedLinear(4, 96, 48, dtype=torch.float32, device="cpu")
    x, dy = torch.randn(64, 96, requires_grad=True), torch.randn(64, 48)
    with te.autocast(recipe=recipe_of(scaling, override)):
        y = layer(x, torch.tensor(splits))
    y.backward(dy)
    with te.autocast(recipe=recipe_of(scaling)), torch.no_grad():
        assert torch.equal(y, layer(x, torch.tensor(splits)))
    parts = zip(x.split(splits), x.grad.split(splits), dy.split(splits), strict=True)
    for number, (rows, grad, of_y) in enumerate(parts):
        weight, bias = getattr(layer, f"weight{number}"), getattr(layer, f"bias{number}")
        if not len(rows):
            assert not weight.grad.any()
            continue
        xq, wq = operands(rows, weight, scaling, override)
        check(grad, of_y.double() @ wq, torch.float32)
        check(weight.grad, of_y.double().t() @ xq, torch.float32)
        check(bias.grad, of_y.double().sum(0), torch.float32)


@OVERRIDES
@SCALINGS
def test_a_chain_against_fp64(scaling, override):
    """Two linear layers with an activation in between, as one program."""
    torch.default_generator.manual_seed(3)
    first, second = (te.ops.Linear(64, 64, device="cpu") for _ in range(2))
    for layer in (first, second):
        nn.init.normal_(layer.bias)
    net = te.ops.Sequential(first, te.ops.ReLU(), second)
    x, dy = torch.randn(40, 64, requires_grad=True), torch.randn(40, 64)
    with te.autocast(recipe=recipe_of(scaling, override)):
        y = net(x)
    y.backward(dy)
    xq, w1 = operands(x, first.weight, scaling, override)
    # `h` is the value between the layers, as forward computes it.
    with te.autocast(recipe=recipe_of(scaling)), torch.no_grad():
        h = first(x)
    hq, w2 = operands(h.relu(), second.weight, scaling, override)
    wanted_h = (dy.double() @ w2) * (h > 0)
    check(second.weight.grad, dy.double().t() @ hq, torch.float32)
    check(first.weight.grad, wanted_h.t() @ xq, torch.float32)
    check(first.bias.grad, wanted_h.sum(0), torch.float32)
    check(x.grad, wanted_h @ w1, torch.float32)


@OVERRIDES
@SCALINGS
@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_only_one_gradient(scaling, override, frozen):
    layer = linear(bias=False)
    x, dy = data(layer)
    layer.weight.requires_grad_(frozen != "weight")
    x.requires_grad_(frozen != "input")
    step(layer, x, dy, recipe_of(scaling, override))
    xq, wq = operands(x, layer.weight, scaling, override)
    if frozen == "weight":
        assert layer.weight.grad is None
        check(x.grad, dy.double() @ wq, torch.bfloat16)
    else:
        assert x.grad is None
        check(layer.weight.grad, dy.double().t() @ xq, torch.bfloat16)


def kept_bytes(layer, x, recipe):
    """Bytes of the tensors that are kept for backward, without the caller's tensors."""
    own = {x.data_ptr(), *(parameter.data_ptr() for parameter in layer.parameters())}
    kept = []
    with (
        te.autocast(recipe=recipe),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        layer(x)
    return sum(t.numel() * t.element_size() for t in kept if t.data_ptr() not in own)


@SCALINGS
def test_what_is_kept(scaling):
    layer = linear(inputs=256, outputs=256, bias=False)
    x, _ = data(layer, rows=256)
    assert kept_bytes(layer, x, recipe_of(scaling, "high_precision")) == 0
    dequantized = kept_bytes(layer, x, recipe_of(scaling, "dequantized"))
    assert x.numel() <= dequantized <= x.numel() * (1 + 4 / 128) + 512


@OVERRIDES
def test_a_weight_that_is_used_again_is_kept(override):
    layer, recipe = linear(), recipe_of("current", override)
    x, dy = data(layer)
    for _ in range(2):
        step(layer, x, dy, recipe)
        x.grad = None
    step(layer, x, dy, recipe)
    te_fast.dispatch.reset_counters()
    wanted, x.grad = x.grad, None
    step(layer, x, dy, recipe)
    assert dispatch.counters()["weight_casts"] == 0
    assert torch.equal(x.grad, wanted)
    with torch.no_grad():
        layer.weight.mul_(2)
    x.grad = None
    y = step(layer, x, dy, recipe)
    xq, wq = operands(x, layer.weight, "current", override)
    check(x.grad, dy.double() @ wq, torch.bfloat16)
    assert torch.equal(y, step(copy.deepcopy(layer), x, dy, recipe_of("current")))


@OVERRIDES
def test_a_weight_changed_in_between_is_an_error(override):
    layer = linear()
    x, dy = data(layer)
    with te.autocast(recipe=recipe_of("current", override)):
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@OVERRIDES
@SCALINGS
@pytest.mark.parametrize("split", [None, ("q", "k")], ids=["whole", "split"])
def test_main_grad_and_delayed_weight_gradients(scaling, override, split):
    options = {"parameters_split": split}
    recipe = recipe_of(scaling, override)
    plain, fused = linear(**options), linear(fuse_wgrad_accumulation=True, **options)
    late = linear(delay_wgrad_compute=True, **options)
    x, dy = data(plain)
    for name in fused.weight_names:
        weight = getattr(fused, name)
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    for layer in (plain, fused, late):
        step(layer, x, dy, recipe)
    assert all(getattr(late, name).grad is None for name in late.weight_names)
    late.backward_dw()
    for name in plain.weight_names:
        wanted = getattr(plain, name).grad
        assert torch.equal(getattr(late, name).grad, wanted)
        main = getattr(fused, name).main_grad
        assert getattr(fused, name).grad is None
        assert (main - 1 - wanted.float()).norm() < 4e-3 * wanted.float().norm()
    with pytest.raises(te_fast.TeFastError, match="backward_dw"):
        late.backward_dw()


@OVERRIDES
@pytest.mark.parametrize("split", [None, ("q", "k")], ids=["whole", "split"])
def test_torch_autocast_and_checkpoint(override, split):
    """Parameters are FP32, activations BF16; a recomputation outside of the region repeats the region."""
    recipe = recipe_of("current", override)
    gradients = []
    for remade in (False, True):
        layer = linear(torch.float32, parameters_split=split)
        x, dy = data(layer, dtype=torch.bfloat16)

        def run(layer, x):
            with torch.autocast("cpu", torch.bfloat16):
                return layer(x)

        with te.autocast(recipe=recipe):
            y = torch_checkpoint(run, layer, x, use_reentrant=False) if remade else run(layer, x)
        assert y.dtype == torch.bfloat16
        y.backward(dy)
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    weight = torch.cat([getattr(layer, name) for name in layer.weight_names])
    wide = operands(x, weight.bfloat16(), "current", "high_precision")[1]
    if override == "high_precision":
        check(x.grad, dy.double() @ wide, torch.bfloat16)
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


@pytest.mark.filterwarnings("ignore:.*Recipe type changed")
@OVERRIDES
def test_padded_rows_copies_and_recipes_in_turn(override):
    layer = linear()
    x, dy = data(layer, rows=13)
    te_fast.auto_pad(True)
    try:
        for scaling in RECIPES:
            for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                x.grad, each.weight.grad = None, None
                y = step(each, x, dy, recipe_of(scaling, override))
                assert y.shape == dy.shape
                assert torch.equal(y, step(linear(), x.detach(), dy, recipe_of(scaling)))
                xq, wq = operands(x, layer.weight, scaling, override)
                check(x.grad, dy.double() @ wq, torch.bfloat16)
                check(each.weight.grad, dy.double().t() @ xq, torch.bfloat16)
    finally:
        te_fast.auto_pad(False)


def test_save_original_input_goes_with_either():
    """As in Transformer Engine, ``high_precision`` implies the option and ``dequantized`` rules the option out."""
    for override in ("high_precision", "dequantized"):
        layer, plain = linear(save_original_input=True), linear()
        x, dy = data(layer)
        for each in (layer, plain):
            step(each, x, dy, recipe_of("current", override))
        assert torch.equal(layer.weight.grad, plain.weight.grad)
