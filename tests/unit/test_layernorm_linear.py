"""LayerNormLinear on the host backend, beyond test_compound_layers.py."""

import threading

import pytest
import torch

import compound_reference as chain
import te_fast
import te_fast.pytorch as te
from compound_layers import RECIPES, assert_close, data, gradients, make, step
from te_fast.common.recipe import Float8CurrentScaling


def split(parts=("q", "k", "v"), **options):
    """Return a layer whose parameters are split, and a layer of the same values whose parameters are whole."""
    layer, plain = make("linear", parameters_split=parts, **options), make("linear", **options)
    with torch.no_grad():
        for kind, names in (("weight", layer.weight_names), ("bias", layer.bias_names)):
            getattr(plain, kind).copy_(torch.cat([getattr(layer, name) for name in names]))
    return layer, plain


def parts_of(layer, attribute, kind="weight"):
    names = layer.weight_names if kind == "weight" else layer.bias_names
    return torch.cat([getattr(getattr(layer, name), attribute) for name in names])


@pytest.mark.parametrize("parts", [("q", "k", "v"), {"q_": 16, "kv_": 32}], ids=str)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_parameters_split(parts, fp8):
    layer, plain = split(parts)
    names = [name.removesuffix("_") for name in parts]
    assert [name for name, _ in layer.named_parameters()] == [
        "layer_norm_weight",
        "layer_norm_bias",
        *(f"{name}_weight" for name in names),
        *(f"{name}_bias" for name in names),
    ]
    x, grad = data(layer)
    for _ in range(2):
        ys = []
        for each in (layer, plain):
            each.zero_grad()
            ys.append(step(each, x, grad, Float8CurrentScaling() if fp8 else None))
        assert torch.equal(*ys)
        assert torch.equal(parts_of(layer, "grad"), plain.weight.grad)
        assert torch.equal(parts_of(layer, "grad", "bias"), plain.bias.grad)
        assert torch.equal(layer.layer_norm_weight.grad, plain.layer_norm_weight.grad)
        with torch.no_grad():  # a part that changes is quantised anew
            part = getattr(layer, f"{names[0]}_weight")
            part.add_(0.25)
            plain.weight[: part.shape[0]].add_(0.25)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_unchanged_parts_are_quantised_once(fp8):
    layer, _ = split()
    x, _ = data(layer)
    with torch.no_grad(), te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        layer(x)
        before = te_fast.dispatch.counters()["weight_casts"]
        layer(x)
        layer(x)
        assert te_fast.dispatch.counters()["weight_casts"] == before


def test_parts_that_do_not_adjoin():
    layer, plain = split()
    x, grad = data(layer)
    layer.k_weight = torch.nn.Parameter(layer.k_weight.detach().clone())
    for _ in range(2):
        ys = [step(each, x, grad, Float8CurrentScaling()) for each in (layer, plain)]
        assert torch.equal(*ys)
    assert torch.equal(parts_of(layer, "grad"), plain.weight.grad)


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_main_grad_of_parts(fp8, first):
    recipe = Float8CurrentScaling() if fp8 else None
    layer, plain = split(fuse_wgrad_accumulation=True)
    plain.fuse_wgrad_accumulation = False
    plain._make_native()
    x, grad = data(layer)
    step(plain, x, grad, recipe)
    for name in layer.weight_names:
        part = getattr(layer, name)
        part.main_grad = torch.full(part.shape, 2.0)
    step(layer, x, grad, recipe, is_first_microbatch=first)
    base = 0.0 if first else 2.0
    got = parts_of(layer, "main_grad") - base
    assert torch.allclose(got, plain.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_delayed_weight_gradient_of_parts(fp8):
    recipe = Float8CurrentScaling() if fp8 else None
    layer, plain = split(delay_wgrad_compute=True)
    plain.delay_wgrad_compute = False
    plain._make_native()
    x, grad = data(layer)
    for each in (layer, plain):
        step(each, x, grad, recipe)
    assert layer.q_weight.grad is None
    layer.backward_dw()
    assert torch.equal(parts_of(layer, "grad"), plain.weight.grad)


@pytest.mark.parametrize("parts", [None, ("q", "k", "v")], ids=str)
def test_threads_share_a_layer(parts):
    layer = make("linear", parameters_split=parts)
    x, _ = data(layer)
    failures = []
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        wanted = layer(x)

        def work():
            with torch.no_grad():
                for _ in range(30):
                    failures.extend([] if torch.equal(layer(x), wanted) else [1])

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_a_norm_and_a_linear_layer(name):
    layer = make("linear")
    norm, linear = torch.nn.LayerNorm(64), te.Linear(64, 48, device="cpu")
    with torch.no_grad():
        norm.weight.copy_(layer.layer_norm_weight)
        norm.bias.copy_(layer.layer_norm_bias)
        linear.weight.copy_(layer.weight)
        linear.bias.copy_(layer.bias)
    x, grad = data(layer)
    y = step(layer, x, grad, RECIPES[name]())
    got = gradients(layer, x)
    x.grad = None
    wanted_y = step(torch.nn.Sequential(norm, linear), x, grad, RECIPES[name]())
    wanted = {
        "y": wanted_y,
        "dx": x.grad,
        "dweight": linear.weight.grad,
        "dbias": linear.bias.grad,
        "dlayer_norm_weight": norm.weight.grad,
        "dlayer_norm_bias": norm.bias.grad,
    }
    assert_close({"y": y, **got}, wanted, 2e-3)


def test_arguments_that_are_not_supported():
    with pytest.raises(NotImplementedError, match="row"):
        make("linear", parallel_mode="row")
    with pytest.raises(te_fast.UnsupportedError, match="ub_bulk_wgrad"):
        make("linear", ub_bulk_wgrad=True)
    with pytest.raises(te_fast.ShapeError, match="parallel_mode"):
        make("linear", parallel_mode="diagonal")
    with pytest.raises(te_fast.ShapeError, match="normalization"):
        make("linear", normalization=None)


def test_marks_of_column_parallel_parameters():
    layer = make("linear", parallel_mode="column")
    for name in ("weight", "bias"):
        parameter = getattr(layer, name)
        assert parameter.tensor_model_parallel
        assert parameter.partition_dim == 0
    assert layer.layer_norm_weight.sequence_parallel is False
    assert layer.layer_norm_bias.sequence_parallel is False


def test_initialisation():
    layer = te.LayerNormLinear(256, 256, device="cpu")
    assert layer.weight.dtype == torch.float32
    assert abs(layer.weight.std().item() - 0.023) < 1e-3
    assert (layer.layer_norm_weight == 1).all()
    centred = te.LayerNormLinear(16, 16, device="cpu", zero_centered_gamma=True)
    assert (centred.layer_norm_weight == 0).all()
    with torch.no_grad():
        centred.layer_norm_weight.fill_(3)
    centred.reset_parameters()
    assert (centred.layer_norm_weight == 0).all()
    ones = te.LayerNormLinear(16, 16, device="cpu", init_method=torch.nn.init.ones_)
    assert (ones.weight == 1).all()
    rms = te.LayerNormLinear(16, 16, device="cpu", normalization="RMSNorm")
    assert rms.layer_norm_bias is None
    assert "layer_norm_bias" not in rms.state_dict()


def test_load_torch_linear():
    parts = [torch.nn.Linear(64, rows) for rows in (16, 16, 16)]
    whole = make("linear")
    layer = make("linear", parameters_split=("q", "k", "v"))
    for each in (whole, layer):
        each.load_torch(linear=parts)
    assert torch.equal(whole.weight, torch.cat([part.weight for part in parts]))
    assert torch.equal(layer.k_weight, parts[1].weight)
    assert torch.equal(layer.v_bias, parts[2].bias)
    with pytest.raises(ValueError, match="linear needs exactly"):
        make("linear", bias=False).load_torch(linear=parts)
    before = whole.weight.clone()
    with pytest.raises(ValueError, match="linear.weight must have shape"):
        whole.load_torch(linear=parts[:2])
    assert torch.equal(whole.weight, before)


def test_what_it_prints():
    text = repr(make("linear", normalization="RMSNorm"))
    assert "in_features=64, out_features=48, bias=True, normalization=RMSNorm" in text


def test_reference_itself():
    """The references agree with torch.nn, so that layer and reference cannot share a mistake."""
    layer = make("linear")
    x, grad = data(layer)
    norm = torch.nn.functional.layer_norm(
        x, (64,), layer.layer_norm_weight, layer.layer_norm_bias, 1e-5
    )
    y = torch.nn.functional.linear(norm, layer.weight, layer.bias)
    assert_close({"y": y}, chain.exact(layer, x, grad), 2e-6)


@pytest.mark.parametrize("layer", [te.Linear, te.LayerNormLinear])
def test_unknown_parallel_mode(layer):
    with pytest.raises(AssertionError, match="parallel_mode must be"):
        layer(64, 48, device="cpu", parallel_mode="diagonal")
