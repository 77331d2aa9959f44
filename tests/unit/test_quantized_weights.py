"""Layers whose weights are quantised tensors, against the same layers with weights in high precision, bit for bit."""

import copy
import io
import warnings
from functools import partial

import pytest
import torch

import te_fast.pytorch as te
from quantized_tensors import forbid_dispatch, parts
from recipes import RECIPES
from selection import sampled
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.errors import DtypeError, StateError, UnsupportedError
from te_fast.pytorch.tensor.utils import post_all_gather_processing
from te_fast.tensor.primary import is_quantized

OPTIONS = {"params_dtype": torch.bfloat16, "device": "cpu"}


class Experts(torch.nn.Module):
    """Experts, one of them without rows."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        first = len(x) * 5 // 8
        return self.experts(x, torch.tensor([first, 0, len(x) - first]))


MAKERS = {
    "linear": lambda: te.Linear(128, 256, **OPTIONS),
    "layernorm_linear": lambda: te.LayerNormLinear(128, 256, **OPTIONS),
    "layernorm_mlp": lambda: te.LayerNormMLP(128, 256, **OPTIONS),
    "ops.linear": lambda: te.ops.Linear(128, 256, device="cpu", dtype=torch.bfloat16),
    "ops.sequential": lambda: te.ops.Sequential(
        te.ops.RMSNorm(128, device="cpu", dtype=torch.bfloat16),
        te.ops.Linear(128, 256, device="cpu", dtype=torch.bfloat16),
        te.ops.GELU(),
        te.ops.BasicLinear(256, 128, device="cpu", dtype=torch.bfloat16),
    ),
    "grouped_linear": lambda: Experts(te.GroupedLinear(3, 128, 256, **OPTIONS)),
    "grouped_linear.single": lambda: Experts(
        te.GroupedLinear(3, 128, 256, bias=False, single_grouped_weight=True, **OPTIONS)
    ),
    "ops.grouped_linear": lambda: Experts(
        te.ops.GroupedLinear(3, 128, 256, device="cpu", dtype=torch.bfloat16)
    ),
    "ops.grouped_linear.single": lambda: Experts(
        te.ops.GroupedLinear(
            *(3, 128, 256),
            bias=False,
            single_grouped_weight=True,
            device="cpu",
            dtype=torch.bfloat16,
        )
    ),
}
_LAYERS = te.Linear | te.LayerNormLinear | te.LayerNormMLP | te.GroupedLinear


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


EACH = pytest.mark.parametrize(("make", "recipe"), sampled(MAKERS, RECIPES), indirect=True)


def quantized(make, recipe, **options):
    with te.quantized_model_init(recipe=recipe, **options):
        return make()


def both(make, recipe):
    """A module with quantised weights and one with the values that they were initialised with."""
    mine, plain = quantized(make, recipe, preserve_high_precision_init_val=True), make()
    with torch.no_grad():
        for (name, parameter), other in zip(
            mine.named_parameters(), plain.parameters(), strict=True
        ):
            assert is_quantized(parameter) == (parameter.dim() >= 2), name
            values = getattr(parameter, "get_high_precision_init_val", parameter.clone)()
            other.copy_(values)
    return mine, plain


def step(module, x, recipe, grad):
    x = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        y = module(x)
    y.backward(grad(y))
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def _first_columns(noise, y):
    return noise[:, : y.shape[-1]]


@EACH
def test_steps_are_those_of_weights_in_high_precision(make, recipe):
    mine, plain = both(make, recipe)
    for seed in range(3):
        torch.manual_seed(seed)
        x, noise = torch.randn(32, 128).bfloat16(), torch.randn(32, 256).bfloat16()
        results = [
            step(module, x, recipe, partial(_first_columns, noise)) for module in (mine, plain)
        ]
        for got, expected in zip(*results, strict=True):
            assert type(got) is torch.Tensor
            assert torch.equal(got, expected)
        if isinstance(recipe, DelayedScaling):
            break  # a quantised weight keeps its scale until it is written
        with torch.no_grad():
            for parameter, other in zip(mine.parameters(), plain.parameters(), strict=True):
                fresh = torch.randn(other.shape).bfloat16()
                parameter.copy_(fresh)
                other.copy_(fresh)
                parameter.grad = other.grad = None


@EACH
def test_bytes_are_gathered_once_more_for_backward(make, recipe):
    """Megatron-FSDP gives each use memory of its own, and makes the column layouts before backward."""
    mine = quantized(make, recipe)
    plain = copy.deepcopy(mine)
    weights = [parameter for parameter in mine.parameters() if is_quantized(parameter)]

    def gather():
        for weight in weights:
            weight.update_usage(rowwise_usage=True, columnwise_usage=False)
            name = "_rowwise_data" if hasattr(weight, "_rowwise_data") else "_data"
            former = getattr(weight, name)
            setattr(weight, name, former.clone())
            former.zero_()

    def gathered(y):
        gather()
        post_all_gather_processing(weights)
        return torch.ones_like(y)

    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(32, 128).bfloat16()
        gather()
        results = step(mine, x, recipe, gathered), step(plain, x, recipe, torch.ones_like)
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)
    assert weights


@EACH
def test_a_step_never_enters_torch_dispatch(make, recipe, monkeypatch):
    module = quantized(make, recipe)
    x = torch.randn(32, 128).bfloat16()
    forbid_dispatch(monkeypatch)
    dispatch.reset_counters()
    for _ in range(2):
        step(module, x, recipe, torch.ones_like)
    with torch.no_grad(), te.autocast(recipe=recipe):
        module(x)
    assert dispatch.counters()["weight_casts"] == 0


@EACH
def test_layouts_and_memory(make, recipe):
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            module = quantized(make, recipe)
        for parameter in module.parameters():
            if is_quantized(parameter):
                assert parameter.get_usages() == {"rowwise": True, "columnwise": grads}
                assert not hasattr(parameter, "get_high_precision_init_val")
    with te.autocast(recipe=recipe), torch.no_grad():
        module(torch.randn(32, 128).bfloat16())
    sizes = [
        sum(part.nbytes for part in parts(parameter) if part is not None)
        for parameter in module.parameters()
        if is_quantized(parameter)
    ]
    whole = sum(p.numel() * 2 for p in module.parameters() if is_quantized(p))
    assert sum(sizes) <= 0.55 * whole


@EACH
def test_the_column_layout_is_made_where_backward_wants_it(make, recipe):
    torch.manual_seed(1)
    with torch.no_grad():
        rows = quantized(make, recipe)
    both_layouts = quantized(make, recipe)
    with torch.no_grad():
        for parameter, other in zip(both_layouts.parameters(), rows.parameters(), strict=True):
            parameter.copy_(other)
    x = torch.randn(32, 128).bfloat16()
    for got, expected in zip(
        *(step(module, x, recipe, torch.ones_like) for module in (rows, both_layouts)), strict=True
    ):
        assert torch.equal(got, expected)


def test_writes_reach_the_next_forward_and_the_next_backward(recipe):
    layer = quantized(MAKERS["linear"], recipe)
    x = torch.randn(32, 128).bfloat16()
    step(layer, x, recipe, torch.ones_like)
    fresh = torch.randn(256, 128).bfloat16()
    writes = (
        lambda w: w.copy_(fresh),
        lambda w: w.quantize_(fresh),
        lambda w: w._quantizer.update_quantized(fresh, w),
        lambda w: setattr(w, "data", fresh),
        lambda w: w.zero_().add_(fresh),
        lambda w: w.detach().quantize_(fresh),
    )
    for write in writes:
        with torch.no_grad():
            layer.weight.fill_(0.5)
            write(layer.weight)
        y, dx, *_ = step(layer, x, recipe, torch.ones_like)
        weight = layer.weight.dequantize().detach().float()
        for got, expected in (
            (y, x.float() @ weight.t() + layer.bias.detach().float()),
            (dx, torch.ones(32, 256) @ weight),
        ):
            assert float((got.float() - expected).norm() / expected.norm()) < 0.05


#: Writes that torch's versions of both layouts tell of.
FORMER_WRITES = {
    "none": lambda layer, other: None,
    "data": lambda layer, other: setattr(layer.weight, "data", torch.randn(256, 128).bfloat16()),
    "a checkpoint": lambda layer, other: layer.load_state_dict(other.state_dict()),
    "in place": lambda layer, other: layer.weight.detach().mul_(2),
}


@pytest.mark.parametrize("former", FORMER_WRITES)
def test_bytes_written_by_hand_make_the_transposed_ones_anew(recipe, former):
    layer = quantized(MAKERS["linear"], recipe)
    other = quantized(MAKERS["linear"], recipe)
    FORMER_WRITES[former](layer, quantized(MAKERS["linear"], recipe))
    x = torch.randn(32, 128).bfloat16()
    expected = step(other, x, recipe, torch.ones_like)
    step(layer, x, recipe, torch.ones_like)
    with torch.no_grad():
        layer.bias.copy_(other.bias)
    row, row_scale, *_ = parts(other.weight)
    layer.weight._value.row.copy_(row)
    layer.weight._value.row_scale.copy_(row_scale)
    dx = step(layer, x, recipe, torch.ones_like)[1]
    torch.testing.assert_close(dx, expected[1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("make", "recipe", "options"),
    sampled(MAKERS, RECIPES, [{}, {"foreach": True}, {"fused": True}]),
    indirect=["make", "recipe"],
)
def test_optimizers_step_on_the_weights(make, recipe, options):
    module = quantized(make, recipe)
    step(module, torch.randn(32, 128).bfloat16(), recipe, torch.randn_like)
    mine = list(module.parameters())
    plain = [
        torch.nn.Parameter(p.dequantize() if is_quantized(p) else p.detach().clone()) for p in mine
    ]
    for parameter, other in zip(mine, plain, strict=True):
        other.grad = parameter.grad.clone()
    torch.optim.Adam(plain, lr=0.01, **options).step()
    expected = [
        p._quantizer.copy()(other.detach()).dequantize() if is_quantized(p) else other
        for p, other in zip(mine, plain, strict=True)
    ]
    torch.optim.Adam(mine, lr=0.01, **options).step()
    for parameter, values in zip(mine, expected, strict=True):
        got = parameter.dequantize() if is_quantized(parameter) else parameter
        assert torch.equal(got, values)
    step(module, torch.randn(32, 128).bfloat16(), recipe, torch.ones_like)


def test_scales_of_delayed_scaling_follow_what_is_written():
    recipe = DelayedScaling(amax_history_len=4)
    layer = quantized(MAKERS["linear"], recipe)
    state = layer.fp8_meta["scaling_fwd"]
    assert torch.equal(state.scale[1], torch.ones(()))
    initial = layer.weight.get_usages() and state.amax_history[0, 1].clone()
    assert float(initial) > 0
    x = torch.randn(32, 128).bfloat16()
    step(layer, x, recipe, torch.ones_like)
    assert torch.equal(state.scale[1], 448.0 / initial)
    inverse = layer.weight._scale_inv.clone()
    step(layer, x, recipe, torch.ones_like)
    assert torch.equal(layer.weight._scale_inv, inverse)
    assert float(inverse) == 1.0
    values = torch.randn(256, 128).bfloat16()
    layer.weight.data.copy_(values)
    assert torch.equal(layer.weight._scale_inv[0], 1 / (448.0 / initial))
    assert torch.equal(state.amax_history[0, 1], values.abs().max().float())
    layer.adjust_amax_history_length(8)
    layer.weight.quantize_(values * 2)
    assert torch.equal(
        layer.fp8_meta["scaling_fwd"].amax_history[0, 1], (values * 2).abs().max().float()
    )


@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "layernorm_mlp", "grouped_linear"])
def test_another_length_of_history_is_told_once(name):
    module = quantized(MAKERS[name], DelayedScaling(amax_history_len=8))
    x, recipe = torch.randn(32, 128).bfloat16(), DelayedScaling(amax_history_len=2)
    with te.autocast(recipe=recipe):
        with pytest.warns(UserWarning, match="Quantizer is being updated") as warned:
            module(x)
        module(x)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    plain = MAKERS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (DelayedScaling(amax_history_len=8), recipe):
            with te.autocast(recipe=one):
                plain(x)


@EACH
def test_outside_of_regions_weights_are_dequantised(make, recipe):
    module, x = quantized(make, recipe), torch.randn(32, 128).bfloat16()
    plain = make()
    with torch.no_grad():
        for parameter, other in zip(plain.parameters(), module.parameters(), strict=True):
            parameter.copy_(other)
    results = []
    for one in (module, plain):
        inp = x.clone().requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = one(inp)
        y.sum().backward()
        results.append([y, inp.grad, *(p.grad for p in one.parameters())])
        is_layer = any(isinstance(layer, _LAYERS) for layer in one.modules())
        said = any("dequantised for each call" in str(entry.message) for entry in caught)
        assert said == (is_layer and one is module)
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@EACH
def test_state_dicts_load_both_ways(make, recipe):
    module, plain = quantized(make, recipe), make()
    x = torch.randn(32, 128).bfloat16()
    step(module, x, recipe, torch.ones_like)
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    again = quantized(make, recipe)
    again.load_state_dict(state)
    plain.load_state_dict(state, strict=False)
    for mine, loaded, dequantized in zip(
        module.parameters(), again.parameters(), plain.parameters(), strict=True
    ):
        assert type(dequantized) is torch.nn.Parameter
        values = mine.dequantize() if is_quantized(mine) else mine
        assert torch.equal(dequantized, values)
        assert torch.equal(loaded.dequantize() if is_quantized(mine) else loaded, values)
        if is_quantized(mine):
            assert is_quantized(loaded)
            assert torch.equal(parts(mine)[0], parts(loaded)[0])
    with te.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(module(x), again(x))


def test_checkpoints_in_high_precision_load_with_their_scales():
    recipe = DelayedScaling()
    plain = MAKERS["linear"]()
    for _ in range(2):
        step(plain, torch.randn(32, 128).bfloat16(), recipe, torch.ones_like)
    layer = quantized(MAKERS["linear"], recipe)
    layer.load_state_dict(plain.state_dict())
    scale = plain.fp8_meta["scaling_fwd"].scale[1]
    assert float(scale) != 1.0
    assert torch.equal(layer.weight._scale_inv[0], 1 / scale)
    x = torch.randn(32, 128).bfloat16()
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(layer(x), plain(x))


@EACH
def test_copies_and_moves(make, recipe):
    module, x = quantized(make, recipe), torch.randn(32, 128).bfloat16()
    weight = next(p for p in module.parameters() if is_quantized(p))
    weight.main_grad = marker = torch.ones(1)
    expected = step(module, x, recipe, torch.ones_like)
    copied = copy.deepcopy(module)
    for one in (module, copied):
        one.zero_grad()
        if not isinstance(recipe, DelayedScaling):
            assert torch.equal(step(one, x, recipe, torch.ones_like)[0], expected[0])
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert float(weight.detach().float().abs().sum()) > 0
    for change, dtype in (
        (lambda m: m.float(), torch.float32),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.to("cpu"), torch.bfloat16),
    ):
        data = parts(weight)[0]
        change(module)
        assert is_quantized(weight)
        assert weight.dtype is dtype
        assert weight.requires_grad
        assert weight.main_grad is marker
        assert parts(weight)[0] is data
        assert any(parameter is weight for parameter in module.parameters())
    module.zero_grad()
    step(module, x, recipe, torch.ones_like)


def test_deferred_construction(recipe):
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(128, 256, params_dtype=torch.bfloat16, device="meta")
    assert layer.weight.is_meta
    assert not is_quantized(layer.weight)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert is_quantized(layer.weight)
    first = layer.weight.dequantize().detach()
    layer.reset_parameters()
    assert is_quantized(layer.weight)
    assert not torch.equal(layer.weight.dequantize(), first)
    step(layer, torch.randn(32, 128).bfloat16(), recipe, torch.ones_like)


def test_init_values_are_kept_and_freed(recipe):
    torch.manual_seed(7)
    plain = MAKERS["linear"]()
    torch.manual_seed(7)
    layer = quantized(MAKERS["linear"], recipe, preserve_high_precision_init_val=True)
    assert layer.preserve_high_precision_init_val
    assert layer.primary_weights_in_fp8
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight)
    copied = copy.deepcopy(layer)
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None
    assert torch.equal(copied.weight.get_high_precision_init_val(), plain.weight)


def test_main_grads_and_delayed_weight_gradients(recipe):
    results = []
    for is_mine in (True, False):
        torch.manual_seed(3)
        options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, **OPTIONS}
        with te.quantized_model_init(enabled=is_mine, recipe=recipe):
            layer = te.Linear(128, 256, **options)
        layer.weight.main_grad = torch.ones(256, 128)
        x = torch.randn(32, 128).bfloat16().requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
        layer.backward_dw()
        results.append((y, x.grad, layer.weight.main_grad))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_recomputation(recipe):
    results = []
    for recomputes in (False, True):
        torch.manual_seed(3)
        layer = quantized(MAKERS["layernorm_mlp"], recipe)
        x = torch.randn(32, 128).bfloat16().requires_grad_()
        with te.autocast(recipe=recipe):
            y = te.checkpoint(layer, x) if recomputes else layer(x)
        y.sum().backward()
        results.append((y, x.grad, layer.fc1_weight.grad))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@EACH
def test_nothing_and_padding(make, recipe):
    module = quantized(make, recipe)
    former = dispatch.auto_pad()
    try:
        for rows in (0, 5):
            x = torch.randn(rows, 128).bfloat16()
            results = step(module, x, recipe, torch.ones_like)
            assert results[0].shape[0] == rows
            assert results[1].shape == x.shape
    finally:
        dispatch.auto_pad(former)


# Bad input ---------------------------------------------------------------------------------------


def test_regions_of_another_recipe_are_refused():
    x = torch.randn(32, 128).bfloat16()
    recipes = [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()]
    for mine in recipes:
        layer = quantized(MAKERS["linear"], mine)
        for other in recipes:
            if other is mine:
                continue
            with pytest.raises(StateError, match="was quantised for"), te.autocast(recipe=other):
                layer(x)
        step(layer, x, mine, torch.ones_like)
    chain = quantized(MAKERS["ops.linear"], recipes[2])
    with pytest.raises(StateError, match="was quantised with"), te.autocast(recipe=recipes[1]):
        chain(x)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling])
def test_a_backward_in_high_precision_reads_the_values(kind, override):
    layer = quantized(MAKERS["linear"], kind())
    x = torch.randn(32, 128).bfloat16().requires_grad_()
    grad = torch.randn(32, 256).bfloat16()
    with te.autocast(recipe=kind(backward_override=override)):
        y = layer(x)
    y.backward(grad)
    expected = grad.double() @ layer.weight.detach().dequantize().double()
    assert (x.grad.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert layer.weight.grad.isfinite().all()


def test_parts_are_refused():
    with (
        te.quantized_model_init(recipe=Float8CurrentScaling()),
        pytest.raises(RuntimeError, match="several parts"),
    ):
        te.Linear(128, 256, parameters_split=("a", "b"), **OPTIONS)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = te.Linear(128, 256, parameters_split=("a",), **OPTIONS)
    assert is_quantized(layer.a_weight)
    step(layer, torch.randn(32, 128).bfloat16(), Float8CurrentScaling(), torch.ones_like)


def test_memory_that_was_exchanged_for_another_is_refused(recipe):
    x = torch.randn(32, 128).bfloat16()
    for name, value in (
        ("row", torch.zeros(7, dtype=torch.uint8)),
        ("row", torch.zeros(256, 128)),
        ("row", None),
        ("row_scale", torch.zeros(3, 5)),
        ("row", torch.zeros(128, 256, dtype=torch.uint8).t()),
    ):
        layer = quantized(MAKERS["linear"], recipe)
        setattr(layer.weight._value, name, value)
        with pytest.raises((RuntimeError, ValueError, TypeError)), te.autocast(recipe=recipe):
            layer(x)


def test_a_weight_that_changes_before_its_backward_is_refused(recipe):
    layer, x = quantized(MAKERS["linear"], recipe), torch.randn(32, 128).bfloat16().requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_quantised_biases_are_refused(recipe):
    layer = MAKERS["linear"]()
    bias = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(layer.bias.detach())
    layer.bias = torch.nn.Parameter(bias)
    with pytest.raises(UnsupportedError, match="no weight"), te.autocast(recipe=recipe):
        layer(torch.randn(32, 128).bfloat16())


def test_recipes_that_do_not_run_are_refused():
    from te_fast.common.recipe import MXFP8BlockScaling

    with (
        pytest.raises((UnsupportedError, RuntimeError)),
        te.quantized_model_init(recipe=MXFP8BlockScaling()),
    ):
        pass
    with pytest.raises(DtypeError), te.quantized_model_init(recipe="current"):
        pass
    assert not te.FP8GlobalStateManager.with_fp8_parameters()


def test_the_context_is_left_as_it_was_entered():
    state = te.FP8GlobalStateManager
    with te.quantized_model_init():
        assert state.with_fp8_parameters()
        assert not state.with_high_precision_init_val()
        with te.quantized_model_init(enabled=False):
            assert not is_quantized(MAKERS["linear"]().weight)
        assert state.with_fp8_parameters()
    assert not state.with_fp8_parameters()
    with (
        pytest.warns(DeprecationWarning, match="quantized_model_init"),
        te.fp8_model_init(enabled=True),
    ):
        assert is_quantized(MAKERS["linear"]().weight)


@pytest.mark.parametrize("kind", [te.Linear, te.ops.Linear], ids=["layer", "operation"])
def test_views_in_inference_mode(kind, recipe):
    """A user may save or inspect a model in inference mode, which makes views of weights from outside of it."""
    with te.quantized_model_init(recipe=recipe):
        layer = kind(32, 48, device="cpu")
    x = torch.randn(32, 32)
    plain = layer.weight.dequantize().detach()
    with torch.inference_mode():
        weight = layer.weight.detach()
        assert type(weight) is type(layer.weight.data)
        assert torch.equal(weight.dequantize(), plain)
        assert torch.equal(layer.weight.view(48, 32).dequantize(), plain)
        assert torch.equal(layer.weight.t(), plain.t())
        assert torch.equal(layer.weight[:16].to(torch.float64), plain[:16].double())
        (saved,) = (v for name, v in layer.state_dict().items() if name.endswith("weight"))
        with te.autocast(recipe=recipe):
            y = layer(x)
    assert torch.equal(saved.dequantize(), plain)
    with te.autocast(recipe=recipe):
        again = layer(x)
    assert torch.equal(again, y)
    again.sum().backward()
    assert layer.weight.grad.any()
