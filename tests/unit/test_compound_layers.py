"""LayerNormLinear and LayerNormMLP on the host backend: common properties."""

import copy
import pickle

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import compound_reference as chain
import te_fast
import te_fast.pytorch as te
from compound_layers import (
    DTYPES,
    KINDS,
    PRECISE,
    QUANTIZED,
    RECIPES,
    assert_close,
    clear,
    data,
    features,
    gradients,
    make,
    step,
)
from linear_layers import casts
from selection import sampled
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling

pytestmark = pytest.mark.parametrize("kind", KINDS)


NORMS = [("LayerNorm", False), ("LayerNorm", True), ("RMSNorm", False), ("RMSNorm", True)]


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalization", "zero_centered", "bias", "dtype"),
    sampled([pytest.param(*case) for case in NORMS], [True, False], DTYPES),
    ids=str,
)
def test_high_precision_is_the_chain(kind, normalization, zero_centered, bias, dtype):
    layer = make(
        kind,
        dtype=dtype,
        normalization=normalization,
        zero_centered_gamma=zero_centered,
        bias=bias,
    )
    x, grad = data(layer, 5, dtype)
    wanted = chain.exact(layer, x, grad)
    y = step(layer, x, grad)
    assert y.dtype == dtype
    assert_close({"y": y, **gradients(layer, x)}, wanted, PRECISE[dtype])


@pytest.mark.parametrize(
    ("name", "normalization", "dtype"), sampled(RECIPES, ["LayerNorm", "RMSNorm"], DTYPES), ids=str
)
def test_fp8_is_the_chain_of_quantised_operands(kind, name, normalization, dtype):
    layer = make(kind, 144, 80, dtype, normalization=normalization)
    x, grad = data(layer, 136, dtype)
    wanted = chain.quantized(layer, x, grad, name)
    y = step(layer, x, grad, RECIPES[name]())
    assert y.dtype == dtype
    assert_close({"y": y, **gradients(layer, x)}, wanted, QUANTIZED[dtype])


def test_fp8_without_bias_and_with_zero_centred_gamma(kind, recipe):
    name = next(name for name, kind_ in RECIPES.items() if isinstance(recipe, kind_))
    layer = make(kind, bias=False, zero_centered_gamma=True)
    x, grad = data(layer)
    wanted = chain.quantized(layer, x, grad, name)
    y = step(layer, x, grad, recipe)
    assert_close({"y": y, **gradients(layer, x)}, wanted, QUANTIZED[torch.float32])


def test_leading_dimensions_and_layouts(kind, recipe):
    layer = make(kind, dtype=torch.bfloat16)
    x, _ = data(layer, 32, torch.bfloat16)
    ins, outs = features(layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        y = layer(x)
        assert torch.equal(layer(x.view(2, 4, 4, ins)), y.view(2, 4, 4, outs))
        assert torch.equal(layer(x.t().contiguous().t()), y)
        shifted = torch.empty(32 * ins + 1, dtype=x.dtype)[1:].view(32, ins).copy_(x)
        assert torch.equal(layer(shifted), y)
    assert torch.equal(layer(x[0]), layer(x)[0])


def test_eps_is_used(kind):
    layer, other = make(kind), make(kind, eps=3.0)
    x, grad = data(layer)
    assert_close({"y": step(other, x, grad)}, chain.exact(other, x, grad), 2e-6)
    assert not torch.allclose(layer(x), other(x))


@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_no_rows(kind, fp8, leading):
    layer = make(kind)
    ins, outs = features(layer)
    x = torch.empty(*leading, ins, requires_grad=True)
    with te.autocast(enabled=fp8):
        y = layer(x)
    assert y.shape == (*leading, outs)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in layer.parameters())


def test_any_number_of_rows_with_auto_pad(kind, recipe):
    name = next(name for name, kind_ in RECIPES.items() if isinstance(recipe, kind_))
    former = te_fast.auto_pad(True)
    try:
        for rows in (1, 7, 9):
            layer = make(kind)
            x, grad = data(layer, rows)
            y = step(layer, x, grad, recipe)
            wanted = chain.quantized(layer, x, grad, name)
            assert_close({"y": y, **gradients(layer, x)}, wanted, QUANTIZED[torch.float32])
    finally:
        te_fast.auto_pad(former)


# Returned tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_return_layernorm_output(kind, fp8):
    layer, plain = make(kind, return_layernorm_output=True), make(kind)
    x, grad = data(layer)
    recipe = Float8CurrentScaling() if fp8 else None
    with te.autocast(enabled=fp8, recipe=recipe):
        y, ln = layer(x)
    step(plain, twin := x.detach().requires_grad_(), grad, recipe)
    wanted = chain.exact(layer, x, grad)
    assert_close({"ln": ln}, wanted, 2e-6)
    torch.autograd.backward([y, ln], [grad, torch.ones_like(ln)])
    # The norm gets the gradients of both results. The linear ops get the gradient of the first result alone.
    both = chain.exact(layer, x, grad, torch.ones_like(ln))
    only = chain.exact(layer, x, grad)
    got, former = gradients(layer, x), gradients(plain, twin)
    for name in got:
        gained = got[name].double() - former[name].double()
        assert torch.allclose(gained, both[name] - only[name], rtol=1e-4, atol=2e-4), name


@pytest.mark.parametrize("used", ["result", "norm"])
def test_a_result_that_is_not_used_has_no_gradient(kind, used):
    layer = make(kind, return_layernorm_output=True, return_layernorm_output_gathered=True)
    x, grad = data(layer)
    y, ln = layer(x)
    if used == "result":
        y.backward(grad)
        wanted = chain.exact(layer, x, grad)
    else:
        ln.sum().backward()
        wanted = chain.exact(layer, x, torch.zeros_like(grad), torch.ones_like(ln))
    assert_close({"dx": x.grad, "dlayer_norm_bias": layer.layer_norm_bias.grad}, wanted, 5e-6)


@pytest.mark.parametrize("norm_too", [True, False])
def test_return_bias(kind, norm_too):
    layer = make(kind, return_bias=True, return_layernorm_output=norm_too)
    x, grad = data(layer)
    out = layer(x)
    assert len(out) == 2 + norm_too
    last = chain.linears(layer)[-1][1]
    assert torch.equal(out[1], getattr(layer, last))
    wanted = chain.exact(layer, x, grad)
    out[0].backward(grad)
    assert getattr(layer, last).grad is None
    got = gradients(layer, x)
    del got[f"d{last}"]
    assert_close({"y": out[0], **got}, wanted, 2e-6)
    without = make(kind, return_bias=True, bias=False)
    assert without(x)[1].numel() == 0
    assert not any("bias" in key and "norm" not in key for key in without.state_dict())


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_no_rows_treat_main_grad_as_linear_does(kind, fp8):
    layers = [make(kind, fuse_wgrad_accumulation=True)]
    layers.append(te.Linear(64, 48, device="cpu", fuse_wgrad_accumulation=True))
    for first, attribute, left in (
        (None, False, 2.0),
        (False, False, 2.0),
        (True, False, 0.0),
        (None, True, 0.0),
    ):
        for layer in layers:
            taken = weights(layer).values() if layer is layers[0] else [layer.weight]
            for weight in taken:
                weight.main_grad = torch.full(weight.shape, 2.0)
                weight.overwrite_main_grad = attribute
                weight.grad_added_to_main_grad = False
            x = torch.empty(0, features(layer)[0], requires_grad=True)
            with te.autocast(enabled=fp8):
                y = layer(x, is_first_microbatch=first)
            y.sum().backward()
            for weight in taken:
                assert (weight.main_grad == left).all()
                assert weight.grad_added_to_main_grad
                assert weight.grad.shape == weight.shape
                weight.grad = None
                del weight.grad_added_to_main_grad
            layer(x).sum().backward()
            assert all(weight.grad is None for weight in taken)


@pytest.mark.parametrize("fuse", [False, True])
def test_no_rows_leave_a_weight_gradient_for_later(kind, fuse):
    layers = [make(kind, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)]
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": fuse}
    layers.append(te.Linear(64, 48, device="cpu", **options))
    for layer in layers:
        taken = weights(layer).values() if layer is layers[0] else [layer.weight]
        for weight in taken:
            weight.main_grad = torch.full(weight.shape, 2.0)
        for first in (None, True):
            x = torch.empty(0, features(layer)[0], requires_grad=True)
            layer(x, is_first_microbatch=first).sum().backward()
        assert all(weight.grad is None for weight in taken)
        for left in (2.0, 0.0):
            layer.backward_dw()
            if fuse:
                assert all((weight.main_grad == left).all() for weight in taken)
                assert all(weight.grad is None for weight in taken)
            else:
                assert not any(weight.grad.any() for weight in taken)
        with pytest.raises(te_fast.StateError, match="without a backward"):
            layer.backward_dw()


# main_grad and delayed gradients -----------------------------------------------------------------


def weights(layer):
    return {name: getattr(layer, name) for name, _ in chain.linears(layer)}


@pytest.mark.parametrize("first", [None, True, False])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_main_grad(kind, fp8, first):
    recipe = Float8CurrentScaling() if fp8 else None
    layer, plain = make(kind, fuse_wgrad_accumulation=True), make(kind)
    x, grad = data(layer)
    step(plain, x, grad, recipe)
    for weight in weights(layer).values():
        weight.main_grad = torch.full(weight.shape, 2.0)
    step(layer, x, grad, recipe, is_first_microbatch=first)
    for name, weight in weights(layer).items():
        assert weight.grad is None
        base = 0 if first else 2
        wanted = weights(plain)[name].grad
        assert torch.allclose(weight.main_grad - base, wanted, rtol=1e-5, atol=1e-5)
        weight.grad_added_to_main_grad = False
        weight.overwrite_main_grad = True
    step(layer, x, grad, recipe)
    for name, weight in weights(layer).items():
        assert weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape
        assert torch.allclose(weight.main_grad, weights(plain)[name].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_main_grad_is_missing(kind, fp8):
    layer = make(kind, fuse_wgrad_accumulation=True)
    x, grad = data(layer)
    with te.autocast(enabled=fp8):
        y = layer(x)
    with pytest.raises(te_fast.StateError, match="main_grad"):
        y.backward(grad)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_delayed_weight_gradients(kind, fp8, fuse):
    recipe = Float8CurrentScaling() if fp8 else None
    layer = make(kind, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    plain = make(kind)
    fired = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))
    assert layer.need_backward_dw()
    assert not plain.need_backward_dw()
    x, grad = data(layer)
    for weight in weights(layer).values():
        weight.main_grad = torch.zeros(weight.shape)
        assert weight.skip_backward_post_hook
    for _ in range(2):
        for each in (layer, plain):
            step(each, x, grad, recipe)
    assert all(weight.grad is None for weight in weights(layer).values())
    layer.backward_dw()
    layer.backward_dw()
    assert fired == [1, 1]
    for name, weight in weights(layer).items():
        got = weight.main_grad if fuse else weight.grad
        assert torch.allclose(got, weights(plain)[name].grad, rtol=1e-5, atol=1e-5)
    others = {name for name, _ in layer.named_parameters()} - set(weights(layer))
    for name in others:
        assert torch.equal(getattr(layer, name).grad, getattr(plain, name).grad)
    with pytest.raises(te_fast.StateError, match="without a backward"):
        layer.backward_dw()
    plain.backward_dw()  # nothing to do


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_a_delayed_weight_gradient_outlives_a_main_grad_that_is_missing(kind, fp8):
    layer = make(kind, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    plain = make(kind)
    x, grad = data(layer)
    for each in (layer, plain):
        step(each, x, grad, Float8CurrentScaling() if fp8 else None)
    for weight in weights(layer).values():
        with pytest.raises(RuntimeError, match="main_grad"):
            layer.backward_dw()
        weight.main_grad = torch.zeros(weight.shape)
    layer.backward_dw()
    for name, weight in weights(layer).items():
        assert torch.allclose(weight.main_grad, weights(plain)[name].grad, rtol=1e-5, atol=1e-5)


def subsets(layer):
    names = [name for name, _ in layer.named_parameters()]
    yield from ([name] for name in names)
    yield [name for name in names if "norm" in name]
    yield names


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", [32, 0])
def test_delayed_weight_gradients_mark_their_parameters(kind, fp8, split, rows):
    """Megatron-LM's hook after `backward_dw` asserts `.grad`, and adds it unless `grad_added_to_main_grad` is set."""
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True, "device": "cpu"}
    parts = {"parameters_split": ("a", "b")} if split else {}
    layers = [te.Linear(64, 48, **options, **parts)]
    if kind == "linear":
        layers.append(make(kind, **options, **parts))
    elif not split:
        layers.append(make(kind, **options))
    for layer in layers:
        taken = [p for p in layer.parameters() if p.dim() == 2]
        for weight in taken:
            weight.main_grad = torch.zeros(weight.shape)
            weight.grad_added_to_main_grad = False
            weight.zero_out_wgrad = True
        with te.autocast(enabled=fp8):
            y = layer(torch.randn(rows, 64))
        y.sum().backward()
        layer.backward_dw()
        for weight in taken:
            assert weight.grad_added_to_main_grad
            assert not weight.grad.any()
            assert bool(weight.main_grad.any()) == bool(rows)


@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_frozen_parts(kind, fp8, input_grad):
    recipe = Float8CurrentScaling() if fp8 else None
    plain = make(kind)
    x, grad = data(plain)
    wanted_y = step(plain, x, grad, recipe)
    wanted = gradients(plain, x)
    for frozen in subsets(plain):
        layer = make(kind)
        for name in frozen:
            getattr(layer, name).requires_grad_(False)
        leaf = x.detach().requires_grad_(input_grad)
        with te.autocast(enabled=fp8, recipe=recipe):
            y = layer(leaf)
        # Where nothing needs a gradient, the activation may be fused into the product.
        assert chain.relative(y, wanted_y) <= 1e-6
        everything = len(frozen) == len(list(layer.parameters())) and not input_grad
        assert y.requires_grad != everything
        if everything:
            continue
        y.backward(grad)
        assert (leaf.grad is not None) == input_grad
        for name, parameter in layer.named_parameters():
            assert (parameter.grad is None) == (name in frozen), name
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, wanted[f"d{name}"]), (frozen, name)


# Weight cache ------------------------------------------------------------------------------------


def test_a_cached_weight_outlives_what_others_do_to_its_tensor(kind, recipe):
    layer = make(kind)
    x, _ = data(layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        wanted = layer(x, is_first_microbatch=True)
        cached = list(layer._fp8_workspaces.values())
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in cached]
        for tensor in cached:
            tensor.data = torch.empty(0, dtype=torch.uint8)
        assert not any(reference.expired() for reference in memory)
        assert torch.equal(layer(x, is_first_microbatch=False), wanted)
        layer._fp8_workspaces.clear()
        assert all(reference.expired() for reference in memory)


def test_unchanged_weights_are_quantised_once(kind, recipe):
    layer = make(kind)
    count = len(weights(layer))
    x, _ = data(layer)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert casts(lambda: layer(x)) == count
        assert casts(lambda: [layer(x) for _ in range(3)]) == 0
        assert casts(lambda: layer(x, is_first_microbatch=True)) == count
        assert casts(lambda: layer(x, is_first_microbatch=False)) == 0
        assert set(layer._fp8_workspaces) == set(weights(layer))
        dispatch.drop_weight_cache(layer)
        assert layer._fp8_workspaces == {}
        assert casts(lambda: layer(x)) == count


CHANGES = {
    "in place": lambda layer, name: getattr(layer, name).mul_(2),
    "data": lambda layer, name: setattr(getattr(layer, name), "data", getattr(layer, name) * 2),
    "parameter": lambda layer, name: setattr(
        layer, name, torch.nn.Parameter(getattr(layer, name) * 2)
    ),
    "load_state_dict": lambda layer, name: layer.load_state_dict(
        layer.state_dict() | {name: getattr(layer, name) * 2}
    ),
}


@pytest.mark.parametrize(("change", "first"), sampled(CHANGES, [None, False]))
def test_stale_parameters_are_never_used(kind, change, first):
    recipe = Float8CurrentScaling()
    for name, _ in make(kind).named_parameters():
        layer = make(kind)
        x, _ = data(layer)
        with torch.no_grad(), te.autocast(recipe=recipe):
            before = layer(x, is_first_microbatch=None if first is None else True)
            CHANGES[change](layer, name)
            got = layer(x, is_first_microbatch=first)
            fresh = make(kind)
            fresh.load_state_dict(layer.state_dict())
            assert torch.equal(got, fresh(x))
            assert not torch.equal(got, before)


def test_optimizer_steps_are_seen(kind, recipe):
    layer = make(kind)
    x, grad = data(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        outputs.append(step(layer, x, grad, recipe).detach())
        optimizer.step()
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


def test_change_between_forward_and_backward_is_an_error(kind, recipe):
    for name in weights(make(kind)):
        layer = make(kind)
        x, grad = data(layer)
        with te.autocast(recipe=recipe):
            y = layer(x)
        with torch.no_grad():
            getattr(layer, name).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(grad)


# Autograd ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_retain_graph_and_second_backward(kind, fp8):
    layer = make(kind)
    x, grad = data(layer)
    with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
        y = layer(x)
    y.backward(grad, retain_graph=True)
    once = {name: value.clone() for name, value in gradients(layer, x).items()}
    y.backward(grad)
    assert_close(gradients(layer, x), {name: 2 * value for name, value in once.items()}, 1e-6)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(grad)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "high precision"])
def test_saved_tensor_hooks_see_what_is_kept(kind, fp8):
    recipe = Float8CurrentScaling() if fp8 else None
    layer, plain = make(kind), make(kind)
    x, grad = data(layer)
    step(plain, x, grad, recipe)
    wanted = gradients(plain, x)
    x.grad = None
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(layer, x, grad, recipe)
    assert packed
    assert_close(gradients(layer, x), wanted, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_gives_the_same_gradients(kind, recipe, reentrant):
    # A forward that needs no gradient may fuse GELU into the product, which rounds differently.
    options = {"activation": "silu"} if kind == "mlp" else {}
    layer, plain = make(kind, **options), make(kind, **options)
    x, grad = data(layer)
    y = step(plain, x, grad, recipe)
    wanted = gradients(plain, x)
    x.grad = None
    with te.autocast(recipe=recipe):
        again = checkpoint(layer, x, use_reentrant=reentrant)
    if recipe.delayed():
        # The recomputation uses the scales of the next step, because te_fast keeps no scales for torch's checkpoint.
        following, leaf = copy.deepcopy(layer), x.detach().requires_grad_()
        step(following, leaf, grad, recipe)
        wanted = gradients(following, leaf)
    again.backward(grad)  # recomputation runs outside of the region
    assert torch.equal(y, again)
    found = gradients(layer, x)
    if recipe.delayed() and not reentrant:
        # torch gives recomputed tensors to the first run's own node, whose weights keep their scales. A gradient that
        # has passed through a weight differs by the weight's rounding errors, each at most 2^-4.
        last, _ = chain.linears(layer)[-1]
        assert torch.equal(found.pop(f"d{last}"), wanted[f"d{last}"])
        assert_close(found, wanted, 2**-3)
    else:
        assert_close(found, wanted, 0)


def test_double_backward_is_an_error(kind):
    layer = make(kind)
    x, grad = data(layer)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


def test_module_hooks_and_overrides_run(kind):
    layer = make(kind)
    x, _ = data(layer)
    seen = []
    handle = layer.register_forward_hook(lambda _m, _a, out: seen.append(out.shape))
    wanted = layer(x)
    handle.remove()
    assert len(seen) == 1

    class Doubled(type(layer)):
        def forward(self, inp, **options):
            return 2 * super().forward(inp, **options)

    layer.__class__ = Doubled
    assert torch.equal(layer(x), 2 * wanted)
    layer.forward = lambda inp: inp.sum()
    assert layer(x) == x.sum()


def test_inference_mode(kind, recipe):
    layer = make(kind)
    x, _ = data(layer)
    with torch.inference_mode(), te.autocast(recipe=recipe):
        y = layer(x)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), y)


def test_functorch_is_refused(kind):
    layer = make(kind)
    x = torch.randn(3, 8, features(layer)[0])
    with pytest.raises(te_fast.UnsupportedError, match="vmap"):
        torch.func.vmap(layer)(x)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:Graph break due to unsupported builtin")
def test_torch_compile_is_right_where_it_may_break_the_graph(kind):
    layer = make(kind)
    x, _ = data(layer)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(layer(x)) * 2, backend="eager")
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(compiled(x), torch.relu(layer(x)) * 2)


# Precision regions -------------------------------------------------------------------------------


def test_torch_autocast(kind, recipe):
    layer = make(kind)
    x, grad = data(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        with te.autocast(recipe=recipe):
            y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(grad.bfloat16())
    assert all(p.grad.dtype == torch.float32 for p in (x, *layer.parameters()))
    low = make(kind, dtype=torch.bfloat16)
    low_x = x.detach().bfloat16().requires_grad_()
    step(low, low_x, grad.bfloat16(), recipe)
    assert_close(gradients(layer, x), gradients(low, low_x), 0.06)
    with pytest.raises(te_fast.DtypeError, match="torch.autocast"):
        layer(x.bfloat16())


def test_calibration_takes_the_maxima_of_fp8(kind):
    layer, quantising = make(kind), make(kind)
    x, grad = data(layer)
    recipe = DelayedScaling()
    with torch.no_grad(), te.autocast(recipe=recipe):
        quantising(x)
        wanted = quantising.fp8_meta["scaling_fwd"].amax_history[0].clone()
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=recipe):
        y = layer(x)
        found = layer.fp8_meta["scaling_fwd"].amax_history[0].clone()
    assert chain.relative(y, make(kind)(x)) <= 1e-6
    assert found.numel() == 3 * len(weights(layer))
    # fc2's input differs by the FP8 rounding of fc1.
    assert torch.allclose(found[:2], wanted[:2], rtol=1e-5)
    assert torch.allclose(found, wanted, rtol=0.1)
    assert (found.view(-1, 3)[:, :2] > 0).all()


# Copies and checkpoints --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent(kind, recipe, how):
    layer = make(kind)
    x, grad = data(layer)
    step(layer, x, grad, recipe)
    other = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), other(x))
        next(iter(weights(other).values())).mul_(2)
        assert not torch.equal(layer(x), other(x))


def test_delayed_scaling_survives_a_checkpoint(kind, tmp_path):
    layer = make(kind)
    x, grad = data(layer)
    recipe = DelayedScaling()
    for _ in range(3):
        step(layer, x, grad, recipe)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    restored = make(kind)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    count = len(weights(layer))
    for key, slots in (("scaling_fwd", 3 * count), ("scaling_bwd", 2 * count)):
        assert layer.fp8_meta[key].scale.numel() == slots
        assert torch.equal(restored.fp8_meta[key].scale, layer.fp8_meta[key].scale)
        assert torch.equal(restored.fp8_meta[key].amax_history, layer.fp8_meta[key].amax_history)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), restored(x))


def test_state_dict_is_made_of_the_parameters_alone(kind):
    layer = make(kind)
    assert set(layer.state_dict()) == {name for name, _ in layer.named_parameters()}
    layer.load_state_dict(make(kind).state_dict())


def test_meta_device_then_reset(kind):
    layer = make(kind, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    direct = copy.deepcopy(layer)
    direct.reset_parameters()  # this makes the parameters real without to_empty
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    for each in (layer, direct):
        each.to("cpu")
        assert (each.layer_norm_weight == 1).all()
        assert (each.layer_norm_bias == 0).all()
        for weight, bias in chain.linears(each):
            assert 0.015 < getattr(each, weight).std() < 0.03
            assert (getattr(each, bias) == 0).all()
        x, _ = data(each)
        with torch.no_grad(), te.autocast():
            assert torch.isfinite(each(x)).all()


def test_moving_the_layer(kind):
    layer = make(kind)
    x, grad = data(layer)
    step(layer, x, grad, Float8CurrentScaling())
    layer.to(torch.bfloat16)
    y = step(layer, x.detach().bfloat16(), grad.bfloat16(), Float8CurrentScaling())
    assert y.dtype == torch.bfloat16


def test_parameters_under_other_hands(kind):
    """Fully sharded data parallelism keeps views of its own as attributes in place of parameters."""
    layer = make(kind)
    x, grad = data(layer)
    wanted = step(layer, x, grad, Float8CurrentScaling())
    flat = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    for name, tensor in flat.items():
        del layer._parameters[name]
        setattr(layer, name, tensor.requires_grad_())
    leaf = x.detach().requires_grad_()
    assert torch.equal(step(layer, leaf, grad, Float8CurrentScaling()), wanted)
    assert torch.equal(leaf.grad, x.grad)
    assert all(tensor.grad is not None for tensor in flat.values())


# Bad input ---------------------------------------------------------------------------------------


def test_bad_input_is_named(kind, recipe):
    layer = make(kind, dtype=torch.bfloat16, name="proj")
    x, _ = data(layer, 32, torch.bfloat16)
    cases = [
        (lambda: layer(x[:, :32]), ValueError, "proj: .*64"),
        (lambda: layer(x[:3]), ValueError, "proj: .*append 5 rows"),
        (lambda: layer(x.float()), TypeError, "proj: .*bfloat16"),
        (lambda: layer(x.to("meta")), RuntimeError, "proj: .*cpu"),
        (lambda: layer("x"), TypeError, "proj: .*str"),
        (lambda: layer(torch.tensor(1.0, dtype=torch.bfloat16)), ValueError, "proj: .*64"),
    ]
    for call, error, message in cases:
        with te.autocast(recipe=recipe), pytest.raises(error, match=message) as raised:
            call()
        assert isinstance(raised.value, te_fast.TeFastError)


def test_a_failed_forward_leaves_scales_as_they_were(kind):
    layer = make(kind)
    x, grad = data(layer)
    recipe = DelayedScaling()
    step(layer, x, grad, recipe)
    state = layer.fp8_meta["scaling_fwd"]
    before = state.scale.clone(), state.amax_history.clone()
    with te.autocast(recipe=recipe), pytest.raises(ValueError, match="append"):
        layer(x[:3])
    assert torch.equal(state.scale, before[0])
    assert torch.equal(state.amax_history, before[1])


@pytest.mark.parametrize(
    "options",
    [
        {"ub_overlap_ag": True},
        {"ub_overlap_rs": True},
        {"ub_overlap_rs_dgrad": True},
        {"ub_bulk_dgrad": True},
        {"ub_bulk_wgrad": True},
        {"symmetric_ar_type": "multimem_all_reduce"},
    ],
    ids=str,
)
def test_unsupported_arguments_are_named(kind, options):
    with pytest.raises(te_fast.UnsupportedError, match=next(iter(options))):
        make(kind, **options)


def test_unknown_norm(kind):
    with pytest.raises(ValueError, match="normalization must be one of") as caught:
        make(kind, normalization="BatchNorm")
    assert isinstance(caught.value, AssertionError)  # Transformer Engine raises an AssertionError


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    sampled(
        RECIPES,
        [
            pytest.param("eps", 10.0),
            pytest.param("zero_centered_gamma", True),
            pytest.param("return_layernorm_output", True),
            pytest.param("return_bias", True),
        ],
    ),
    indirect=["recipe"],
)
def test_attributes_that_change_after_a_forward(kind, recipe, name, value):
    layer, other = make(kind), make(kind, **{name: value})
    other.load_state_dict(layer.state_dict())
    x, _ = data(layer)
    with torch.no_grad(), te.autocast(recipe=recipe):  # the scales do not change
        layer(x)
        other(x)
    setattr(layer, name, value)
    layer.apply_bias = other.apply_bias
    with torch.no_grad(), te.autocast(recipe=recipe):
        got, wanted = layer(x), other(x)
    got, wanted = (y if isinstance(y, tuple) else (y,) for y in (got, wanted))
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_unaligned_features(kind):
    for layer in (make(kind, 40, 48), make(kind, 64, 44)):
        x, grad = data(layer)
        with te.autocast(), pytest.raises(ValueError, match="multiple of"):
            layer(x).backward(grad)


# torch.nn's parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize("zero_centered", [False, True])
def test_reset_layer_norm_parameters(kind, zero_centered):
    layer = make(kind, zero_centered_gamma=zero_centered)
    weight = layer.state_dict()[chain.linears(layer)[0][0]].clone()
    with pytest.warns(DeprecationWarning, match="reset_parameters"):
        layer.reset_layer_norm_parameters()
    assert (layer.layer_norm_weight == 1 - zero_centered).all()
    assert (layer.layer_norm_bias == 0).all()
    assert torch.equal(layer.state_dict()[chain.linears(layer)[0][0]], weight)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_load_torch_norm(kind, norm, zero_centered):
    name = norm.__name__
    layer = make(kind, normalization=name, zero_centered_gamma=zero_centered)
    plain = norm(64, eps=1e-5)
    torch.nn.init.normal_(plain.weight)
    before = clear(layer), copy.deepcopy(layer.state_dict())
    layer.load_torch(plain)
    x = torch.randn(8, 64)
    own = dict(layer.named_parameters())
    assert torch.allclose(chain.norm(layer, own, x), plain(x), atol=1e-6)
    layer.load_torch(layer_norm=plain.state_dict())
    changed = {
        key for key, value in layer.state_dict().items() if not torch.equal(value, before[1][key])
    }
    assert changed <= {"layer_norm_weight", "layer_norm_bias"}
    with pytest.raises(ValueError, match="layer_norm needs exactly"):
        layer.load_torch(torch.nn.Linear(64, 64, bias=name == "RMSNorm"))
    with pytest.raises(ValueError, match="must have shape"):
        layer.load_torch(norm(32))
    with pytest.raises(TypeError, match="state dict"):
        layer.load_torch(3)
