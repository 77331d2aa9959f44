"""Quantised tensors between layers, against independent quantisation and FP64 products, bit for bit where bytes are."""

from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import linear_layers
import te_fast
import te_fast.pytorch as te
from quantized_tensors import layout, parts, quantizer, scales_there
from recipes import RECIPES, name_of
from reference import quantize_per_tensor, reciprocal, to_fp8_bytes
from selection import sampled
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import QuantizedTensorError, StateError, UnsupportedError
from te_fast.tensor import operations

OPTIONS = {"params_dtype": torch.bfloat16, "device": "cpu"}
INPUT = {"delayed": "delayed", "current": "current", "block": "1d"}


def forbid_dispatch(monkeypatch):
    """Fails when torch's dispatch sees a quantised tensor."""

    def refuse(func, *_):
        raise AssertionError(func)

    monkeypatch.setattr(operations, "dispatch", refuse)
    monkeypatch.setattr("te_fast.tensor.tensor.dispatch", refuse)


@contextmanager
def auto_pad(rows):
    """Lets layers take this number of rows, with padding where needed."""
    te_fast.auto_pad(rows % 8 != 0)
    try:
        yield
    finally:
        te_fast.auto_pad(False)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16)


def as_of_input(x, name, **usage):
    """A tensor quantised as by the first forward of a layer, where delayed scaling begins with scale 1."""
    made = quantizer(INPUT[name], **usage)
    if name == "delayed":
        made.scale.fill_(1.0)
    return made(x)


def linear(inputs=128, outputs=96, **options):
    torch.manual_seed(inputs)
    layer = te.Linear(inputs, outputs, **(OPTIONS | options))
    if layer.use_bias and "parameters_split" not in options:
        torch.nn.init.normal_(layer.bias)
    return layer


def step(layer, x, grad, recipe, **options):
    """Result and gradients of one forward and backward; `x` has a gradient where `x` requires one."""
    for parameter in layer.parameters():
        parameter.grad = None
    with te.autocast(recipe=recipe):
        y = layer(x, **options)
    y.backward(grad)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def same(found, expected):
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one is None) == (other is None), index
        if one is not None:
            assert torch.equal(one, other), index


def _leaf(tensor):
    return tensor.detach().requires_grad_()


# Inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [32, 40])
@pytest.mark.parametrize("columnwise", [False, True])
def test_a_linear_layer_multiplies_the_bytes_that_it_is_given(
    rows, columnwise, recipe, monkeypatch
):
    name = name_of(recipe)
    layer, x, grad = linear(), randn(rows, 128), randn(rows, 96, seed=1)
    expected = linear_layers.expected(layer, x, grad, name)
    plain = step(layer, _leaf(x), grad, recipe)
    if name == "delayed":
        layer = linear()
    given = _leaf(as_of_input(x, name, columnwise=columnwise))
    before = [None if part is None else part.clone() for part in parts(given)]
    forbid_dispatch(monkeypatch)
    if name == "block" and not columnwise:
        with pytest.raises(StateError, match="rowwise and columnwise usage"):
            step(layer, given, grad, recipe)
        return
    found = step(layer, given, grad, recipe)
    monkeypatch.undo()
    same(found, plain)
    for result, key in zip(found, ("y", "dx", "dw", "db"), strict=True):
        error = (result.double() - expected[key]).abs().max()
        assert error <= 2**-7 * expected[key].abs().max(), key
    for part, was in zip(parts(given), before, strict=True):
        assert part is was or torch.equal(part, was)


@pytest.mark.parametrize("rows", [1, 24, 33])
def test_one_scale_takes_any_rows(rows):
    recipe = Float8CurrentScaling()
    layer, x, grad = linear(), randn(rows, 128), randn(rows, 96, seed=1)
    with auto_pad(rows):
        plain = step(layer, _leaf(x), grad, recipe)
        same(step(layer, _leaf(as_of_input(x, "current")), grad, recipe), plain)


def test_edge_values_come_through(recipe):
    name = name_of(recipe)
    x = randn(32, 128)
    x[0, :8] = torch.tensor([0.0, -0.0, 2**-20, -(2**-133), 448.0, -448.0, 3e38, 1e-3])
    layer, grad = linear(), randn(32, 96, seed=1)
    plain = step(layer, _leaf(x), grad, recipe)
    if name == "delayed":
        layer = linear()
    same(step(layer, _leaf(as_of_input(x, name)), grad, recipe), plain)


@pytest.mark.parametrize("shape", [(4, 8, 128), (2, 2, 8, 128)])
def test_leading_dimensions_stay(shape, recipe):
    name = name_of(recipe)
    layer, x, grad = linear(), randn(*shape), randn(*shape[:-1], 96, seed=1)
    plain = step(layer, _leaf(x), grad, recipe)
    if name == "delayed":
        layer = linear()
    same(step(layer, _leaf(as_of_input(x, name)), grad, recipe), plain)


def test_no_amax_is_taken_of_an_input_that_is_quantised():
    layer, x = linear(), randn(32, 128)
    recipe = DelayedScaling(amax_history_len=4)
    step(layer, _leaf(as_of_input(x, "delayed")), randn(32, 96), recipe)
    # The update at the end of the region has rolled the history.
    history = layer.fp8_meta["scaling_fwd"].amax_history
    assert history[:, 0].eq(0).all()
    assert history[:, 1].max() == layer.weight.detach().abs().max().float()


def test_without_gradients(recipe, monkeypatch):
    name = name_of(recipe)
    layer, x = linear(), randn(32, 128)
    with torch.no_grad(), te.autocast(recipe=recipe):
        plain = layer(x)
        given = as_of_input(x, name, columnwise=False)
        if name == "delayed":
            given = quantizer("delayed", columnwise=False)(x)
            plain = None
        forbid_dispatch(monkeypatch)
        y = layer(given)
        monkeypatch.undo()
    if plain is None:
        data, _, spread = layout(x, "delayed")
        product = (data.view(torch.float8_e4m3fn).double() * spread.double()) @ (
            quantize_per_tensor(layer.weight.detach(), 1.0, "e4m3")
            .view(torch.float8_e4m3fn)
            .double()
            .t()
        )
        plain = product + layer.bias.double()
        assert (y.double() - plain).abs().max() <= 2**-7 * plain.abs().max()
    else:
        assert torch.equal(y, plain)


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_a_norm_reads_the_values(kind, recipe, monkeypatch):
    torch.manual_seed(3)
    layer = kind(128, 256, **OPTIONS)
    x = randn(32, 128)
    given = _leaf(as_of_input(x, name_of(recipe)))
    dense = _leaf(given.detach().dequantize())
    grad = randn(32, 256 if kind is te.LayerNormLinear else 128, seed=2)
    plain = step(layer, dense, grad, recipe)
    if isinstance(recipe, DelayedScaling):
        torch.manual_seed(3)
        layer = kind(128, 256, **OPTIONS)
    forbid_dispatch(monkeypatch)
    found = step(layer, given, grad, recipe)
    monkeypatch.undo()
    same(found, plain)


@pytest.mark.parametrize("kind", ["delayed", "current", "1d"])
@pytest.mark.parametrize("cls", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_outside_of_fp8_a_column_layout_alone_is_read(cls, kind):
    x = torch.randn(32, 128).bfloat16()
    q = quantizer(kind, rowwise=False)(x)
    layer = cls(128, 64, params_dtype=torch.bfloat16, device="cpu")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.equal(layer(q), layer(q.dequantize()))


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_outside_of_fp8_the_values_are_read(kind):
    torch.manual_seed(3)
    layer = kind(128, 256, **OPTIONS)
    given = _leaf(as_of_input(randn(32, 128), "current"))
    dense = _leaf(given.detach().dequantize())
    found, expected = [], []
    for x, into in ((given, found), (dense, expected)):
        layer.zero_grad()
        y = layer(x)
        y.backward(torch.ones_like(y))
        into += [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    same(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"save_original_input": True},
        {"delay_wgrad_compute": True},
        {"parameters_split": ("q", "k")},
    ],
)
def test_options_of_linear(options, recipe):
    name = name_of(recipe)
    if name == "delayed" and "save_original_input" in options:
        return
    layer, x, grad = linear(**options), randn(32, 128), randn(32, 96, seed=1)
    results = []
    for one in (x, as_of_input(x, name)):
        if name == "delayed":
            layer = linear(**options)
        leaf = _leaf(one)
        found = step(layer, leaf, grad, recipe)
        if "delay_wgrad_compute" in options:
            layer.backward_dw()
            found = [*found[:2], *(parameter.grad for parameter in layer.parameters())]
        results.append(found)
    same(*results)


def test_gradients_go_into_main_grad(recipe):
    layer, x, grad = linear(fuse_wgrad_accumulation=True), randn(32, 128), randn(32, 96, seed=1)
    found = []
    for one in (x, as_of_input(x, name_of(recipe))):
        if isinstance(recipe, DelayedScaling):
            layer = linear(fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.ones(96, 128)
        step(layer, _leaf(one), grad, recipe)
        found.append(layer.weight.main_grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_a_backward_in_high_precision_reads_the_values(override, kind):
    recipe = kind(backward_override=override)
    layer, x, grad = linear(), randn(32, 128), randn(32, 96, seed=1)
    given = as_of_input(x, name_of(recipe), columnwise=False)
    values = given.dequantize()
    _, _, dw, _ = step(layer, _leaf(given), grad, recipe)
    expected = grad.double().t() @ values.double()
    assert (dw.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_recomputation_and_hooks_see_the_inner_tensors(recipe):
    name = name_of(recipe)
    layer, x, grad = linear(), randn(32, 128), randn(32, 96, seed=1)
    plain = step(layer, _leaf(x), grad, recipe)

    def again(call):
        if name == "delayed":
            fresh = linear()
            layer.load_state_dict(fresh.state_dict(), strict=False)
            layer.reset_fp8_meta_tensors()
        layer.zero_grad()
        leaf = _leaf(as_of_input(x, name))
        call(leaf).backward(grad)
        return [plain[0], leaf.grad, *(parameter.grad for parameter in layer.parameters())]

    def recomputed(leaf):
        with te.autocast(recipe=recipe):
            return checkpoint(layer, leaf, use_reentrant=False)

    def copied(leaf):
        packed = []

        def pack(tensor):
            packed.append(type(tensor))
            return tensor.clone()

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            te.autocast(recipe=recipe),
        ):
            y = layer(leaf)
        assert packed
        assert not any(issubclass(kind, te.QuantizedTensor) for kind in packed)
        return y

    def on_cpu(leaf):
        with torch.autograd.graph.save_on_cpu(), te.autocast(recipe=recipe):
            return layer(leaf)

    for call in (copied, on_cpu, recomputed):
        same(again(call), plain)


def test_a_backward_refuses_an_input_that_was_written_since(recipe):
    layer = linear()
    given = as_of_input(randn(32, 128), name_of(recipe))
    with te.autocast(recipe=recipe):
        y = layer(given)
    given.quantize_(randn(32, 128, seed=5))
    with pytest.raises(StateError, match="written between forward and backward"):
        y.sum().backward()


def test_inputs_of_another_recipe_are_refused(recipe):
    layer = linear()
    for name in RECIPES:
        given = as_of_input(randn(32, 128), name)
        fits = (name == "block") == isinstance(recipe, Float8BlockScaling)
        with te.autocast(recipe=recipe):
            if fits:
                layer(given)
                continue
            with pytest.raises(StateError, match="the recipe of the region asks for"):
                layer(given)
    with te.autocast(recipe=recipe), pytest.raises(StateError, match="E5m2"):
        layer(quantizer(INPUT[name_of(recipe)], fmt="e5m2")(randn(32, 128)))


def test_what_cannot_be_read_is_refused(recipe):
    layer, x = linear(), randn(32, 128)
    name = name_of(recipe)
    columns = as_of_input(x, name)
    columns.update_usage(rowwise_usage=False)
    short = as_of_input(x, name)
    short._value.row_scale = torch.ones(3)
    freed = as_of_input(x, name)
    freed._value.row = freed._value.col = None
    with te.autocast(recipe=recipe):
        for given, match in ((columns, "no row layout"), (short, "scales"), (freed, "freed")):
            with pytest.raises((StateError, ValueError, TypeError), match=match):
                layer(given)
        with pytest.raises(ValueError, match="in_features"):
            layer(as_of_input(randn(32, 64), name))
        layer(as_of_input(x, name))


def test_strided_and_unpadded_parts_are_copied(recipe):
    name = name_of(recipe)
    layer, x, grad = linear(), randn(40, 128), randn(40, 96, seed=1)
    plain = step(layer, _leaf(x), grad, recipe)
    if name == "delayed":
        layer = linear()
    given = as_of_input(x, name)
    value = given._value
    row = torch.zeros(40, 129, dtype=torch.uint8)[:, :128]
    row.copy_(value.row)
    valid = value.col
    value.row, value.col = row, valid
    if name == "block":
        value.row_scale = value.row_scale[:, :40].clone()
    same(step(layer, _leaf(given), grad, recipe), plain)


# Outputs -----------------------------------------------------------------------------------------


def test_an_output_is_what_the_next_layer_would_make_of_it(recipe, monkeypatch):
    name = name_of(recipe)
    layer, x = linear(), randn(32, 128)
    if name == "delayed":
        return
    with te.autocast(recipe=recipe):
        plain = layer(x)
        forbid_dispatch(monkeypatch)
        y = layer(x, fp8_output=True)
        monkeypatch.undo()
    assert isinstance(y, te.Float8BlockwiseQTensor if name == "block" else te.Float8Tensor)
    assert (y.shape, y.dtype, y.requires_grad) == (plain.shape, plain.dtype, True)
    for columnwise in (False, True):
        matrix = plain.detach().t() if columnwise else plain.detach()
        data, scales, _ = layout(matrix.contiguous(), INPUT[name])
        found, found_scales = parts(y)[2:] if columnwise else parts(y)[:2]
        assert torch.equal(found, data.view(found.shape))
        assert torch.equal(*scales_there(found_scales, scales))
    assert y._quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    y.detach().quantize_(plain.detach())


def test_delayed_scaling_stores_the_output_by_its_own_scale():
    layer, x = linear(), randn(32, 128)
    recipe = DelayedScaling(amax_history_len=4)
    for _ in range(3):
        scale = (
            layer.fp8_meta["scaling_fwd"].scale.clone() if layer.fp8_initialized else torch.ones(3)
        )
        with te.autocast(recipe=recipe):
            y = layer(x, fp8_output=True)
            live = layer.fp8_meta["scaling_fwd"].amax_history[0, 2].clone()
        assert y._data.dtype == torch.uint8
        assert y._transpose is None
        assert torch.equal(y._scale_inv, reciprocal(scale[2]).reshape(1))
        operands = [
            quantize_per_tensor(t.detach(), s, "e4m3").view(torch.float8_e4m3fn).double()
            / s.double()
            for t, s in ((x, scale[0]), (layer.weight, scale[1]))
        ]
        product = operands[0] @ operands[1].t() + layer.bias.double()
        assert abs(live - product.abs().max()) <= 1e-5 * live
        expected = to_fp8_bytes((product * scale[2].double()).float(), "e4m3")
        # Sums in another order may round to the next byte.
        assert (y._data != expected).float().mean() < 0.01
        near = (y._data.int() - expected.int()).abs()
        assert near.max() <= 1
        assert y._quantizer.scale.data_ptr() == layer.fp8_meta["scaling_fwd"].scale[2:].data_ptr()


def test_outputs_without_gradients_have_their_row_layout(recipe):
    layer, x = linear(), randn(32, 128)
    with torch.no_grad(), te.autocast(recipe=recipe):
        y = layer(x, fp8_output=True)
    assert y.get_usages() == {"rowwise": True, "columnwise": False}


def test_outside_of_fp8_results_are_plain():
    layer, x = linear(), randn(32, 128).requires_grad_()
    y = layer(x, fp8_output=True, fp8_grad=True)
    y.sum().backward()
    assert type(y) is type(x.grad) is torch.Tensor


@pytest.mark.parametrize("rows", [32, 40])
@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_layers_hand_fp8_on_with_the_bits_of_plain_tensors(kind, rows, monkeypatch):
    first, second = linear(128, 256), te.Linear(256, 128, **OPTIONS)
    x, grad = randn(rows, 128), randn(rows, 128, seed=1)

    def run(in_fp8):
        first.zero_grad()
        second.zero_grad()
        leaf = _leaf(x)
        with te.autocast(recipe=kind()):
            y = second(first(leaf, fp8_output=in_fp8))
        y.backward(grad)
        gradients = [
            parameter.grad for layer in (first, second) for parameter in layer.parameters()
        ]
        return [y.detach(), leaf.grad, *gradients]

    plain = run(False)
    forbid_dispatch(monkeypatch)
    found = run(True)
    monkeypatch.undo()
    same(found, plain)


@pytest.mark.parametrize("asked", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"delay_wgrad_compute": True}])
def test_gradients_are_the_same_whoever_asks_for_the_inner_tensors(options, asked, recipe):
    """Users may ask before the next layer reads the value, after it, or never."""

    def run(when):
        first, second = linear(128, 256), linear(256, 128, **options)
        leaf = _leaf(randn(32, 128))
        with te.autocast(recipe=recipe):
            h = first(leaf, fp8_output=True)
            if when == "before":
                parts(h)
            y = second(h)
        if when == "after":
            parts(h)
        y.backward(randn(32, 128, seed=1))
        if options:
            second.backward_dw()
        gradients = [weight.grad for layer in (first, second) for weight in layer.parameters()]
        return [y.detach(), leaf.grad, *gradients]

    same(run(asked), run("never"))


@pytest.mark.parametrize("use", [parts, lambda h: h.detach(), lambda h: h * 1])
@pytest.mark.parametrize("used", ["before", "after"])
def test_a_backward_refuses_an_output_whose_bytes_were_written_since(used, use, recipe):
    first, second = linear(128, 256), linear(256, 128)
    with te.autocast(recipe=recipe):
        h = first(randn(32, 128), fp8_output=True)
        if used == "before":
            use(h)
        y = second(h)
    if used == "after":
        use(h)
    row, _, col, _ = parts(h)
    (row if col is None else col).zero_()  # delayed scaling makes the column layout in backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_residual_around_a_checkpoint(recipe):
    """The recomputed forward saves what the first one saved, whatever was read between them."""
    first, second = linear(128, 128), linear(128, 128)
    results = []
    for recomputes in (False, True):
        if name_of(recipe) == "delayed":
            for layer in (first, second):
                layer.reset_fp8_meta_tensors()
        leaf = _leaf(randn(32, 128))
        with te.autocast(recipe=recipe):
            h = first(leaf, fp8_output=True)
            y = checkpoint(second, h, use_reentrant=False) if recomputes else second(h)
            y = y + h
        y.backward(randn(32, 128, seed=1))
        results.append([y.detach(), leaf.grad])
    same(*results)


def test_an_output_of_a_recomputed_forward_has_what_the_next_layer_needs(recipe):
    """Reentrant recomputation runs the first forward without gradients."""
    first, second = linear(128, 128), linear(128, 128)
    results = []
    for recomputes in (False, True):
        if name_of(recipe) == "delayed":
            for layer in (first, second):
                layer.reset_fp8_meta_tensors()
        leaf = _leaf(randn(32, 128))
        first.zero_grad()
        second.zero_grad()
        with te.autocast(recipe=recipe):
            h = (
                te.checkpoint(lambda x: first(x, fp8_output=True), leaf)
                if recomputes
                else first(leaf, fp8_output=True)
            )
            y = second(h)
        y.backward(randn(32, 128, seed=1))
        results.append(
            [y.detach(), leaf.grad, first.weight.grad.clone(), second.weight.grad.clone()]
        )
    same(*results)


def test_a_new_scale_makes_the_column_layout_old():
    h = linear(128, 256)
    with te.autocast(recipe=Float8CurrentScaling()):
        h = h(randn(32, 128), fp8_output=True)
    assert h._value.col_is_valid
    with torch.no_grad():
        h._data.copy_(h._data.flip(0))
        h._scale_inv.mul_(2)
    assert not h._value.col_is_valid


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_backward_keeps_the_column_layout_alone(kind):
    first, second = linear(128, 256), linear(256, 128)
    with te.autocast(recipe=kind()):
        h = first(randn(32, 128), fp8_output=True)
        y = second(h)
    row, col = (StorageWeakRef(data.untyped_storage()) for data in parts(h)[::2])
    del h
    assert row.expired()
    assert not col.expired()
    y.sum().backward()
    assert col.expired()


def test_no_layer_but_those_with_one_gemm_takes_the_arguments():
    mlp = te.LayerNormMLP(128, 256, **OPTIONS)
    with pytest.raises(TypeError, match="fp8_output"):
        mlp(randn(32, 128), fp8_output=True)


def test_rows_that_are_padded_have_no_output_in_fp8():
    layer = linear()
    refused = pytest.raises(UnsupportedError, match="pad the input")
    with te.autocast(recipe=Float8BlockScaling()), auto_pad(3), refused:
        layer(randn(3, 128), fp8_output=True)


# Gradients ---------------------------------------------------------------------------------------


def test_a_gradient_is_what_the_layer_before_would_make_of_it(recipe):
    name = name_of(recipe)
    layer, x, grad = linear(), randn(32, 128), randn(32, 96, seed=1)
    plain = step(layer, _leaf(x), grad, recipe)[1]
    if name == "delayed":
        layer = linear()
    found = step(layer, _leaf(x), grad, recipe, fp8_grad=True)[1]
    assert isinstance(found, te.QuantizedTensor)
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    fmt = "e4m3" if name == "block" else "e5m2"
    if name == "delayed":
        expected = quantize_per_tensor(plain, 1.0, fmt)
        assert found._transpose is None
        assert (found._data.int() - expected.int()).abs().max() <= 1
        assert layer.fp8_meta["scaling_bwd"].amax_history.amax(0)[1] > 0
        return
    for columnwise in (False, True):
        matrix = plain.t() if columnwise else plain
        data, scales, _ = layout(matrix.contiguous(), INPUT[name], fmt)
        bytes_, found_scales = parts(found)[2:] if columnwise else parts(found)[:2]
        assert torch.equal(bytes_, data)
        assert torch.equal(*scales_there(found_scales, scales))


@pytest.mark.parametrize(
    ("rows", "options", "columnwise", "recipe"),
    sampled([32, 40], [{}, {"delay_wgrad_compute": True}], [False, True], RECIPES),
    indirect=["recipe"],
)
def test_backward_multiplies_a_gradient_as_it_comes(rows, options, columnwise, recipe, monkeypatch):
    name = name_of(recipe)
    if name == "block" and (not columnwise or options):
        return
    layer, x, grad = linear(**options), randn(rows, 128), randn(rows, 96, seed=1)
    plain = step(layer, _leaf(x), grad, recipe)
    if options:
        layer.backward_dw()
        plain = [*plain[:2], *(parameter.grad for parameter in layer.parameters())]
    if name == "delayed":
        layer = linear(**options)
    fmt = "e4m3" if name == "block" else "e5m2"
    made = quantizer(INPUT[name], fmt=fmt, columnwise=columnwise)
    if name == "delayed":
        made.scale.fill_(1.0)
    given = made(grad)
    forbid_dispatch(monkeypatch)
    found = step(layer, _leaf(x), given, recipe)
    if options:
        layer.backward_dw()
        found = [*found[:2], *(parameter.grad for parameter in layer.parameters())]
    monkeypatch.undo()
    same(found[:-1], plain[:-1])
    expected = given.dequantize().double().sum(0)
    assert (found[-1].double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_a_gradient_of_another_kind_is_dequantised(recipe):
    layer, x, grad = linear(), randn(32, 128), randn(32, 96, seed=1)
    given = quantizer("2d", fmt="e4m3")(grad)
    found = step(layer, _leaf(x), given, recipe)
    if isinstance(recipe, DelayedScaling):
        layer = linear()
    same(found, step(layer, _leaf(x), given.dequantize(), recipe))


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_gradients_come_to_and_leave_other_layers(kind, recipe):
    torch.manual_seed(1)
    layer = kind(128, 256, **OPTIONS)
    width = 256 if kind is te.LayerNormLinear else 128
    given = quantizer("current", fmt="e5m2")(randn(32, width, seed=1))
    options = {"fp8_grad": True} if kind is te.LayerNormLinear else {}
    found = step(layer, _leaf(randn(32, 128)), given, recipe, **options)
    for tensor in found:
        values = tensor.dequantize() if isinstance(tensor, te.QuantizedTensor) else tensor
        assert values.isfinite().all()
        assert values.abs().max() > 0
    assert isinstance(found[1], te.QuantizedTensor) == bool(options)


def test_a_graph_that_is_kept_runs_twice(recipe):
    layer, x, grad = linear(), randn(32, 128), randn(32, 96, seed=1)
    given = _leaf(as_of_input(x, name_of(recipe)))
    with te.autocast(recipe=recipe):
        y = layer(given)
    y.backward(grad, retain_graph=True)
    once = [given.grad.clone(), layer.bias.grad.clone()]
    y.backward(grad)
    if not isinstance(recipe, DelayedScaling):  # the delayed scale has changed meanwhile
        assert torch.equal(given.grad, 2 * once[0])
    assert torch.equal(layer.bias.grad, 2 * once[1])


def test_the_transposed_layout_is_that_of_the_bytes():
    for rows, cols in ((1, 16), (33, 48), (128, 128), (200, 264)):
        given = quantizer("2d", columnwise=False)(randn(rows, cols))
        row, scale, *_ = parts(given)
        given.update_usage(columnwise_usage=True)
        _, _, col, col_scale = parts(given)
        assert torch.equal(col, row.t())
        blocks = -(-rows // 128)
        assert torch.equal(col_scale[:, :blocks], scale[:, : -(-cols // 128)].t())
        assert col_scale[:, blocks:].eq(0).all()


def test_the_dispatcher_alone_knows_no_quantised_tensors():
    with pytest.raises((QuantizedTensorError, UnsupportedError, TypeError)):
        dispatch.quantize(as_of_input(randn(32, 128), "current"), Float8CurrentScaling())


# Operations --------------------------------------------------------------------------------------


def chain(kind="linear"):
    torch.manual_seed(4)
    options = {"device": "cpu", "dtype": torch.bfloat16}
    makers = {
        "linear": lambda: te.ops.Linear(128, 128, **options),
        "norm": lambda: te.ops.Sequential(
            te.ops.RMSNorm(128, **options), te.ops.Linear(128, 128, **options)
        ),
        "gelu": lambda: te.ops.Sequential(te.ops.GELU(), te.ops.BasicLinear(128, 128, **options)),
        "dropout": lambda: te.ops.Sequential(
            te.ops.Dropout(0.0), te.ops.Linear(128, 128, **options)
        ),
        "bias": lambda: te.ops.Bias(128, **options),
    }
    return makers[kind]()


@pytest.mark.parametrize("kind", ["linear", "norm", "gelu", "dropout", "bias"])
def test_operations_read_quantised_inputs(kind, recipe):
    module, x, grad = chain(kind), randn(32, 128), randn(32, 128, seed=1)
    given = as_of_input(x, name_of(recipe))
    dense = x if kind == "linear" else given.dequantize()
    plain = step(module, _leaf(dense), grad, recipe)
    if isinstance(recipe, DelayedScaling):
        module = chain(kind)
    same(step(module, _leaf(given), grad, recipe), plain)


def test_an_extra_input_is_dequantised(recipe):
    module = te.ops.Sequential(te.ops.AddExtraInput(), te.ops.Identity())
    x, extra = randn(32, 128), as_of_input(randn(32, 128, seed=2), name_of(recipe))
    with te.autocast(recipe=recipe):
        y = module(x, extra)
    assert torch.equal(y, x + extra.dequantize())


@pytest.mark.parametrize("backward", [False, True])
def test_quantize_returns_what_the_recipe_makes(backward, recipe):
    name = name_of(recipe)

    def linear_op():
        torch.manual_seed(4)
        return te.ops.Linear(128, 96, device="cpu", dtype=torch.bfloat16)

    module = te.ops.Sequential(
        te.ops.Quantize(forward=False, backward=backward),
        te.ops.GELU(),
        linear_op(),
        te.ops.Quantize(forward=True),
    )
    x = randn(32, 128).requires_grad_()
    with te.autocast(recipe=recipe):
        y = module(x)
        if name == "delayed":
            live = module[3]._delayed_state("forward").amax_history[0].clone()
    plain = te.ops.Sequential(te.ops.GELU(), linear_op())
    with te.autocast(recipe=recipe):
        expected = plain(x.detach())
    if name == "delayed":
        assert live == expected.abs().max()
    kind = INPUT[name]
    data, scales, _ = layout(expected.detach(), kind)
    if name == "delayed":
        data, scales = quantize_per_tensor(expected.detach(), 1.0, "e4m3"), torch.ones(1)
    assert y.requires_grad
    assert torch.equal(parts(y)[0], data)
    assert torch.equal(*scales_there(parts(y)[1], scales))
    assert y.get_usages() == {"rowwise": True, "columnwise": True}
    y.backward(randn(32, 96, seed=1))
    assert isinstance(x.grad, te.QuantizedTensor) == backward
    gradient = x.grad.dequantize() if backward else x.grad
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def test_quantize_leaves_what_is_quantised(recipe):
    given = as_of_input(randn(32, 128), name_of(recipe))
    with te.autocast(recipe=recipe):
        y = te.ops.Quantize()(given)
    for one, other in zip(parts(y), parts(given), strict=True):
        assert one is other or torch.equal(one, other)
    x = randn(32, 128)
    assert type(te.ops.Quantize()(x)) is torch.Tensor


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_a_chain_hands_fp8_on_to_a_layer(kind):
    torch.manual_seed(4)
    first = te.ops.Linear(128, 128, device="cpu", dtype=torch.bfloat16)
    second, x, grad = linear(), randn(32, 128), randn(32, 96, seed=1)
    found = []
    for module in (first, te.ops.Sequential(first, te.ops.Quantize())):
        first.zero_grad()
        second.zero_grad()
        leaf = _leaf(x)
        with te.autocast(recipe=kind()):
            y = second(module(leaf))
        y.backward(grad)
        gradients = [p.grad for layer in (first, second) for p in layer.parameters()]
        found.append([y.detach(), leaf.grad, *gradients])
    same(*found)


def test_another_nominal_type_of_an_output_is_seen():
    layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cpu")
    with te.autocast(recipe=Float8CurrentScaling()), torch.no_grad():
        y = layer(torch.randn(32, 64).bfloat16(), fp8_output=True)
    y._dtype = torch.float32
    out = te.ops.Sequential(te.ops.GELU())(y)
    assert out.dtype == torch.float32
    assert torch.equal(out, te.ops.Sequential(te.ops.GELU())(y.detach()))
