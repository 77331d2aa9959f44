"""te_fast.pytorch.Linear on the host backend, against FP64 products of independently quantised operands."""

import pytest
import torch
import torch.nn.utils.prune

import te_fast
import te_fast.pytorch as te
from linear_layers import DTYPES, close, expected, inputs, make, step
from recipes import RECIPES, name_of
from selection import every_pair, sampled
from te_fast.common.recipe import Float8BlockScaling, Float8CurrentScaling


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    sampled(RECIPES, [(32, 64, 48), (8, 16, 16), (136, 272, 144)], DTYPES, quick=every_pair),
    ids=str,
)
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
        if not recipe.float8_current_scaling():  # current scaling takes its scale from these rows
            assert torch.equal(layer(x[::2].expand(2, 16, 64))[0], y[::2])
        assert layer(x[0].expand(8, 64)).shape == (8, 48)


def test_expanded_gradient(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.sum().backward()  # the gradient has stride 0
    first = x.grad.clone()
    x.grad = None
    layer = make()
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, first)


def test_return_bias(recipe):
    layer = make(return_bias=True)
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y, bias = layer(x)
    assert torch.equal(bias, layer.bias)
    (y + bias).backward(grad)
    wanted = expected(layer, x, grad, name_of(recipe))
    close(y, wanted["y"] - layer.bias.double(), torch.bfloat16)
    close(layer.weight.grad, wanted["dw"], torch.bfloat16)
    close(layer.bias.grad, wanted["db"], torch.bfloat16)
    without = make(return_bias=True, bias=False)
    with te.autocast(recipe=recipe):
        y, bias = without(x)
    assert bias.numel() == 0
    assert "bias" not in without.state_dict()


def test_a_pruned_bias_is_returned():
    layer = make(return_bias=True)
    torch.nn.utils.prune.l1_unstructured(layer, "bias", 0.5)
    x, _ = inputs(32, layer)
    for recipe in (None, Float8CurrentScaling()):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y, bias = layer(x)
        assert torch.equal(bias, layer.bias_orig * layer.bias_mask)
        y.sum().backward()
    assert bias.eq(0).sum() >= bias.numel() // 2


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


def test_any_number_of_rows_with_auto_pad(recipe):
    former = te_fast.auto_pad(True)
    try:
        for rows in (1, 3, 7, 9, 17):
            layer = make()
            x, grad = inputs(rows, layer)
            wanted = expected(layer, x, grad, name_of(recipe))
            y = step(layer, x, grad, recipe)
            results = {"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}
            for key, got in results.items():
                close(got, wanted[key], torch.bfloat16)
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


def test_special_values(recipe):
    layer = make()
    x, _ = inputs(32, layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(torch.zeros_like(x)), layer.bias.expand(32, 48))
        layer.weight[3, 5] = float("nan")
        y = layer(x)
        assert y[:, 3].isnan().all()
        assert torch.isfinite(y[:, 4:]).all()


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


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_attributes_that_change_after_a_forward(fp8):
    layer = make()
    x, grad = inputs(32, layer)
    wanted = expected(layer, x, grad, "current" if fp8 else None)

    def run():
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            return layer(x)

    run().backward(grad)
    layer.weight.grad = None
    layer.weight.main_grad = torch.zeros(48, 64)
    layer.fuse_wgrad_accumulation = True
    run().backward(grad)
    assert layer.weight.grad is None
    close(layer.weight.main_grad, wanted["dw"], torch.float32)
    layer.return_bias, layer.apply_bias = True, False
    y, bias = run()
    assert torch.equal(bias, layer.bias)
    close(y, wanted["y"] - bias.double(), torch.bfloat16)


@pytest.mark.parametrize(
    ("view", "dtype", "bias"),
    sampled(
        ["contiguous", "transposed", "strided", "three dimensions"],
        [torch.float32, torch.float64, torch.bfloat16],
        [True, False],
        quick=every_pair,
    ),
)
def test_outside_of_fp8_every_way_of_a_gradient_has_torchs_bits(view, dtype, bias):
    """The products are torch's own, delayed or not, from a strided input or from its contiguous copy."""
    base = {
        "contiguous": lambda: torch.randn(96, 64),
        "transposed": lambda: torch.randn(64, 96).t(),
        "strided": lambda: torch.randn(96, 128)[:, ::2],
        "three dimensions": lambda: torch.randn(2, 48, 64),
    }
    x = base[view]().to(dtype)
    grad = torch.randn(*x.shape[:-1], 48).to(dtype)
    found = []
    for delay in (None, False, True):
        torch.default_generator.manual_seed(0)
        options = {"bias": bias, "device": "cpu", "params_dtype": dtype}
        layer = te.Linear(64, 48, delay_wgrad_compute=bool(delay), **options)
        leaf = (x.contiguous() if delay is None else x).detach().requires_grad_()
        if delay is None:
            y = torch.nn.functional.linear(leaf, layer.weight, layer.bias if bias else None)
        else:
            y = layer(leaf)
        y.backward(grad)
        layer.backward_dw()
        assert not any(parameter.grad.requires_grad for parameter in layer.parameters())
        found.append([y, leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
