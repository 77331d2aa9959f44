"""Gradients of a Linear: in `grad` or in `main_grad`, now or later, or not wanted at all."""

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from linear_layers import close, expected, inputs, make, step
from products import Products, check_types
from recipes import RECIPES, name_of
from te_fast import dispatch
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.errors import DtypeError, ShapeError, StateError
from te_fast.pytorch.module.base import get_dummy_wgrad


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
        close(layer.bias.grad, grad.double().sum(0), torch.bfloat16)


@pytest.mark.parametrize("name", ["current", "block"])
@pytest.mark.parametrize("first", [None, True, False])
def test_main_grad(first, name):
    recipe = RECIPES[name]()
    layer = make(fuse_wgrad_accumulation=True)
    x, grad = inputs(32, layer)
    wanted = expected(layer, x, grad, name)["dw"]
    layer.weight.main_grad = torch.full((48, 64), 2.0)
    step(layer, x, grad, recipe, is_first_microbatch=first)
    assert layer.weight.grad is None
    base = 0 if first else 2
    close(layer.weight.main_grad, base + wanted, torch.float32)
    layer.weight.overwrite_main_grad = True
    layer.weight.grad_added_to_main_grad = False
    step(layer, x, grad, recipe)
    assert layer.weight.grad_added_to_main_grad
    assert layer.weight.grad.shape == layer.weight.shape
    close(layer.weight.main_grad, wanted, torch.float32)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_main_grad_is_missing(fp8):
    layer = make(fuse_wgrad_accumulation=True)
    x, grad = inputs(32, layer)
    with te.autocast(enabled=fp8):
        y = layer(x)
    with pytest.raises(RuntimeError, match=f"{layer.name}: linear: .*main_grad"):
        y.backward(grad)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
@pytest.mark.parametrize("split", [None, ("q", "k")], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (3, DtypeError),
        (lambda weight: torch.zeros(1, 64), ShapeError),
        (lambda weight: torch.zeros_like(weight, dtype=torch.int32), ShapeError),
        (lambda weight: torch.zeros(len(weight), 128)[:, ::2], ShapeError),
        (lambda weight: torch.zeros_like(weight, device="meta"), (ShapeError, DtypeError)),
    ],
    ids=["number", "shape", "integers", "strided", "meta"],
)
def test_main_grad_that_cannot_take_the_gradient(buffer, error, split, fp8):
    layer = make(fuse_wgrad_accumulation=True, parameters_split=split, name="proj")
    for name in layer.weight_names:
        weight = getattr(layer, name)
        weight.main_grad = buffer(weight) if callable(buffer) else buffer
    x, grad = inputs(32, layer)
    with te.autocast(enabled=fp8):
        y = layer(x)
    with pytest.raises(error, match="proj: .*main_grad must be"):
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
    wanted = 2 * expected(layer, x, grad, "current" if fp8 else None)["dw"]
    if fuse:
        close(layer.weight.main_grad, wanted, torch.float32)
    else:
        close(layer.weight.grad, wanted, torch.bfloat16)
    assert torch.equal(layer.bias.grad, plain.bias.grad)
    with pytest.raises(te_fast.TeFastError, match="without a backward"):
        layer.backward_dw()


@pytest.mark.parametrize("loss", [torch.sum, lambda y: (y * y.detach()).sum()])
def test_products_outside_of_fp8_have_the_operands_of_autograd(loss):
    """Torch's kernels for other strides sum in another order."""
    later, now = make(delay_wgrad_compute=True, bias=False), make(bias=False)
    x = torch.randn(4, 8, 64, dtype=later.weight.dtype, requires_grad=True)
    found = []
    for layer in (now, later):
        with Products() as products:
            loss(layer(x)).backward()
            if layer is later:
                layer.backward_dw()
        of_weight = [each for each in products.operands if each[1][0] == (32, 64)]
        found.append([of_weight, layer.weight.grad])
    assert len(found[0][0]) == 1
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)], ids=str
)
def test_delayed_gradients_of_other_types_than_cublas_writes(dtypes):
    weight, compute = dtypes
    recipe = Float8CurrentScaling(backward_override="high_precision")
    layers = [
        te.Linear(64, 48, params_dtype=weight, device="cpu", delay_wgrad_compute=delay)
        for delay in (True, False)
    ]
    layers[0].load_state_dict(layers[1].state_dict())
    x = torch.randn(32, 64, dtype=weight)
    for layer in layers:
        with te.autocast(recipe=recipe), torch.autocast("cpu", dtype=compute):
            y = layer(x)
        assert y.dtype == compute
        with dispatch.record() as launches:
            y.backward(torch.ones_like(y))
            if layer.delay_wgrad_compute:
                layer.backward_dw()
        check_types(launches)
    assert layers[0].weight.grad.dtype == weight
    assert torch.equal(*(layer.weight.grad for layer in layers))


def test_main_grad_of_a_type_that_no_product_writes():
    recipe = Float8CurrentScaling(backward_override="high_precision")
    layer = make(fuse_wgrad_accumulation=True, bias=False)
    layer.weight.main_grad = torch.zeros(48, 64, dtype=torch.float16)
    with te.autocast(recipe=recipe):
        y = layer(torch.randn(32, 64, dtype=torch.bfloat16))
    with pytest.raises(
        te_fast.errors.UnsupportedError,
        match="as torch.float16 while the layer computes in torch.bfloat16",
    ):
        y.backward(torch.ones_like(y))
    layer.weight.main_grad = torch.zeros(48, 64)
    y.backward(torch.ones_like(y))
    assert layer.weight.main_grad.any()


@pytest.mark.parametrize(
    "calls",
    [((False, 32), (True, 32)), ((True, 32), (False, 32)), ((True, 0), (True, 32))],
    ids=["high precision first", "fp8 first", "no rows first"],
)
@pytest.mark.parametrize("override", [None, "high_precision"])
def test_delayed_weight_gradients_are_computed_oldest_first(calls, override):
    """The first microbatch sets main_grad and later ones add to it, whatever kind of forward each microbatch had."""
    recipe = Float8CurrentScaling(backward_override=override)
    layer = make(delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((48, 64), 100.0)
    wanted = 0
    for index, (fp8, rows) in enumerate(calls):
        x, grad = inputs(rows, layer)
        with te.autocast(enabled=fp8, recipe=recipe):
            y = layer(x, is_first_microbatch=index == 0)
        y.backward(grad)
        if rows:
            name = "current" if fp8 and override is None else None
            wanted += expected(layer, x, grad, name)["dw"]
    layer.backward_dw()
    layer.backward_dw()
    close(layer.weight.main_grad, wanted, torch.float32)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
@pytest.mark.parametrize("override", [None, "high_precision"])
@pytest.mark.parametrize("split", [None, ("a", "b")], ids=str)
def test_a_delayed_weight_gradient_outlives_a_main_grad_that_is_missing(fp8, override, split):
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
    layer = make(parameters_split=split, **options)
    recipe = Float8CurrentScaling(backward_override=override)
    x, grad = inputs(32, layer)
    with te.autocast(enabled=fp8, recipe=recipe):
        y = layer(x)
    y.backward(grad)
    with pytest.raises(RuntimeError, match="main_grad"):
        layer.backward_dw()
    parts = [getattr(layer, name) for name in layer.weight_names]
    for part in parts:
        part.main_grad = torch.zeros_like(part, dtype=torch.float32)
    layer.backward_dw()
    wanted = expected(layer, x, grad, "current" if fp8 and override is None else None)["dw"]
    # Parts are cut from a gradient of the weight's type.
    dtype = torch.float32 if split is None else torch.bfloat16
    close(torch.cat([part.main_grad for part in parts]), wanted, dtype)


def test_retain_graph_and_second_backward(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(grad, retain_graph=True)
    once = x.grad.clone()
    name = name_of(recipe)
    wanted = expected(layer, x, grad, name)["dx"]
    close(once, wanted, torch.bfloat16)
    y.backward(grad)
    if name == "delayed":  # the second backward has the scale that the first one led to
        scale = layer.fp8_meta["scaling_bwd"].scale[0]
        wanted += expected(layer, x, grad, name, scale)["dx"]
        close(x.grad, wanted, torch.bfloat16)
    else:
        assert torch.equal(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(grad)


def test_double_backward_is_an_error(recipe):
    layer = make()
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    (dx,) = torch.autograd.grad(y, x, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


def test_gradients_of_another_shape_are_refused(recipe):
    layer = make(64, 48)
    x, grad = inputs(32, layer)
    with te.autocast(recipe=recipe):
        y = layer(x)
    for wrong in (grad[:, :16], grad[:16], grad.view(16, 96), grad.float()):
        expected = "gradient of the output must be .* 32 rows of 48"
        with pytest.raises((ShapeError, DtypeError), match=expected):
            y.grad_fn.apply(wrong)
    y.backward(grad)
    assert x.grad.shape == x.shape


def test_no_rows_leave_main_grad_alone_in_high_precision():
    layer = make(fuse_wgrad_accumulation=True)
    for first, left in ((None, 2.0), (True, 0.0)):
        layer.weight.main_grad = torch.full((48, 64), 2.0)
        x = torch.empty(0, 64, dtype=torch.bfloat16, requires_grad=True)
        layer(x, is_first_microbatch=first).sum().backward()
        assert layer.weight.grad is None
        assert (layer.weight.main_grad == left).all()


def test_a_dummy_gradient_is_where_weights_are():
    dummy = get_dummy_wgrad([3, 5], torch.bfloat16, zero=True)
    assert (dummy.dtype, dummy.tolist()) == (torch.bfloat16, [[0.0] * 5] * 3)
    assert dummy.is_cuda == torch.cuda.is_available()
    assert dummy.data_ptr() == get_dummy_wgrad([3, 5], torch.bfloat16).data_ptr()


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_the_store_of_delayed_gradients(fp8):
    layer = make()
    store = layer.wgrad_store
    assert not store.delay_wgrad_compute()
    store.enable_delay_wgrad_compute()
    assert layer.delay_wgrad_compute
    assert store.delay_wgrad_compute()
    assert layer.need_backward_dw()
    x, grad = inputs(32, layer)
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        y = layer(x)
    store.assert_empty()
    y.backward(grad)
    assert layer.weight.grad is None
    for call in (store.assert_empty, store.disable_delay_wgrad_compute):
        with pytest.raises(
            StateError, match=r"gradients of 1 backwards wait; call backward_dw\(\)"
        ):
            call()
    layer.backward_dw()
    close(layer.weight.grad, expected(layer, x, grad, "current" if fp8 else None)["dw"], y.dtype)
    store.assert_empty()
    store.disable_delay_wgrad_compute()
    assert not layer.need_backward_dw()
