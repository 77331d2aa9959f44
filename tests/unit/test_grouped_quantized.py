"""Experts' weights that are quantised tensors, beyond test_quantized_weights.py."""

import copy
import io

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from grouped_layers import SPLITS, grads, inputs, stack, step
from quantized_tensors import forbid_dispatch
from recipes import RECIPES
from te_fast.pytorch.tensor.utils import quantize_master_weights
from te_fast.tensor.primary import is_quantized

KINDS = {"parts": {}, "single": {"single_grouped_weight": True}}


def make(recipe, kind="parts", outputs=48, *, bias=False, **options):
    torch.default_generator.manual_seed(7)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return te.GroupedLinear(
            *(len(SPLITS), 144, outputs),
            bias=bias,
            device="cpu",
            params_dtype=torch.bfloat16,
            **KINDS[kind],
            **options,
        )


def plain_like(layer):
    """A layer with the values that the weights were initialised with."""
    plain = te.GroupedLinear(
        *(len(SPLITS), 144, layer.out_features),
        bias=False,
        device="cpu",
        params_dtype=torch.bfloat16,
    )
    values = [
        getattr(layer, name).get_high_precision_init_val().view(-1, layer.out_features, 144)
        for name in layer.weight_names
    ]
    with torch.no_grad():
        for weight, value in zip(stack(plain), torch.cat(values), strict=True):
            weight.copy_(value)
    return plain


def weights(layer):
    return [getattr(layer, name) for name in layer.weight_names]


def bytes_of(layer):
    """Bytes of all experts in both layouts."""
    values = [weight._value for weight in weights(layer)]
    rows = torch.cat([value.row.view(-1, layer.out_features, 144) for value in values])
    return rows, torch.cat([value.col.view(-1, 144, layer.out_features) for value in values])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [48, 272])
def test_bytes_are_each_experts(recipe, kind, outputs):
    layer = make(recipe, kind, outputs)
    plain = plain_like(layer)
    rows, cols = bytes_of(layer)
    for number, weight in enumerate(stack(plain)):
        with te.quantized_model_init(recipe=recipe):
            one = te.Linear(144, outputs, bias=False, device="cpu", params_dtype=torch.bfloat16)
        with torch.no_grad():
            one.weight.copy_(weight)
        assert torch.equal(rows[number], one.weight._value.row)
        assert torch.equal(cols[number], one.weight._value.col)
    scales = [weight._value.row_scale for weight in weights(layer)]
    lines = 1 if recipe.float8_block_scaling() is False else -(-outputs // 128)
    assert sum(scale.numel() for scale in scales) == len(SPLITS) * lines * (
        4 if lines > 1 or (recipe.float8_block_scaling()) else 1
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}], ids=str)
def test_steps_have_the_bits_of_plain_weights(recipe, kind, options):
    layer = make(recipe, kind, **options)
    plain = plain_like(layer)
    plain.fuse_wgrad_accumulation = bool(options)
    x, grad = inputs(layer)
    found = []
    for one in (layer, plain):
        whole = torch.ones(len(SPLITS), 48, 144)
        for weight, part in zip(
            weights(one), whole if len(weights(one)) > 1 else [whole], strict=True
        ):
            weight.main_grad = part
        own = x.detach().clone().requires_grad_()
        y = step(one, own, grad, recipe)
        of = (lambda p: p.main_grad) if options else (lambda p: p.grad)
        found.append((y, own.grad, grads(one, of=of)))
    assert all(map(torch.equal, *found))


def test_parts_that_lie_apart_are_read_all_the_same(recipe):
    layer, other = make(recipe), make(recipe)
    first, second = (weight._value.row for weight in weights(layer)[:2])
    assert second.data_ptr() == first.data_ptr() + first.numel()
    for weight in weights(other):
        value = weight._value
        for name in ("row", "row_scale", "col", "col_scale"):
            if getattr(value, name) is not None and (value.block or name != "col_scale"):
                setattr(value, name, getattr(value, name).clone())
        value.col_is_valid = True
    x, grad = inputs(layer)
    own = x.detach().clone().requires_grad_()
    assert torch.equal(step(other, own, grad, recipe), step(layer, x, grad, recipe))
    assert torch.equal(own.grad, x.grad)
    assert torch.equal(grads(other), grads(layer))
    again = copy.deepcopy(other)  # the copy's parts are in one memory again
    first, second = (weight._value.row for weight in weights(again)[:2])
    assert second.data_ptr() == first.data_ptr() + first.numel()


def test_columns_are_made_where_some_are_missing(recipe):
    layer, other = make(recipe), make(recipe)
    other.weight4.update_usage(columnwise_usage=False)
    x, grad = inputs(layer)
    own = x.detach().clone().requires_grad_()
    step(layer, x, grad, recipe)
    step(other, own, grad, recipe)
    assert torch.equal(own.grad, x.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", [False, True], ids=["plain", "torch.autocast"])
def test_weights_that_change_before_their_backward_are_refused(recipe, kind, cast):
    layer = make(recipe, kind)
    x, grad = inputs(layer)
    with te.autocast(recipe=recipe), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y = layer(x, SPLITS)
    with torch.no_grad():
        weights(layer)[-1].mul_(2.0)
    with pytest.raises(te_fast.StateError, match="modified"):
        y.backward(grad)


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_with_masters_steps_on_the_bytes(recipe, kind, monkeypatch):
    layer = make(recipe, kind)
    x, grad = inputs(layer)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True)
    first = [weight._value.row.data_ptr() for weight in weights(layer)]
    before = bytes_of(layer)[0].clone()
    for _ in range(2):
        step(layer, x, grad, recipe)
        optimizer.step()
        optimizer.zero_grad()
    assert [weight._value.row.data_ptr() for weight in weights(layer)] == first
    changed = (bytes_of(layer)[0] != before).flatten(1).any(1)
    if not recipe.delayed():  # delayed scales move even where values do not
        assert torch.equal(changed, torch.tensor(SPLITS) != 0)
    forbid_dispatch(monkeypatch)
    step(layer, x, grad, recipe)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_either_kind_load_into_either(recipe, kind):
    layer = make(recipe, kind)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    state = torch.load(stream, weights_only=True)
    for other in KINDS:
        loaded = make(recipe, other)
        with torch.no_grad():
            for weight in weights(loaded):
                weight.zero_()
        loaded.load_state_dict(dict(state))
        assert all(map(is_quantized, weights(loaded)))
        if not recipe.delayed() or kind == other:  # a delayed scale is not made of the values
            assert all(map(torch.equal, bytes_of(loaded), bytes_of(layer)))


def test_delayed_scaling_writes_with_each_experts_scale():
    recipe = RECIPES["delayed"]()
    for kind in KINDS:
        layer = make(recipe, kind)
        x, grad = inputs(layer)
        step(layer, x, grad, recipe)
        state = layer.fp8_meta["scaling_fwd"]
        scales = state.scale[1::3]
        assert len(scales.unique()) > 1
        values = [torch.randn(48, 144).bfloat16() * 2**number for number in range(len(SPLITS))]
        with torch.no_grad():
            for weight, own in zip(
                weights(layer), values if kind == "parts" else [torch.stack(values)], strict=True
            ):
                weight.copy_(own)
        found = torch.cat([weight._value.row_scale for weight in weights(layer)])
        assert torch.equal(found, 1 / scales)
        maxima = torch.stack([value.abs().amax().float() for value in values])
        assert torch.equal(state.amax_history[0, 1::3], maxima)


def test_a_backward_in_high_precision_reads_the_values():
    recipe = te_fast.recipe.Float8CurrentScaling(backward_override="high_precision")
    layer = make(recipe)
    x, grad = inputs(layer)
    step(layer, x, grad, recipe)
    dequantized = torch.stack([weight.dequantize().detach() for weight in weights(layer)])
    parts = [
        dy.double() @ w.double() for dy, w in zip(grad.split(SPLITS), dequantized, strict=True)
    ]
    torch.testing.assert_close(x.grad.double(), torch.cat(parts), rtol=1e-2, atol=1e-3)


def test_stacks_have_no_other_shape(recipe):
    weight = make(recipe, "single").weight
    assert weight.shape == (8, 48, 144)
    assert weight.detach().clone().shape == weight.shape
    assert is_quantized(torch.empty_like(weight))
    with pytest.raises(te_fast.TeFastError, match="dequantize"), torch.no_grad():
        torch.ops.aten.view.default(weight, (8 * 48, 144))
    assert type(weight[2].detach()) is torch.Tensor
    assert torch.equal(weight[2], weight.dequantize()[2])
    master = torch.randn(8, 48, 144)
    wanted = weight._quantizer.copy()(master.bfloat16()).dequantize()
    quantize_master_weights([weight], [master.view(-1)], [0], None)
    assert torch.equal(weight.dequantize(), wanted)
    with pytest.raises(NotImplementedError, match="single_grouped_weight"):
        quantize_master_weights([weight], [torch.zeros(9)], [5], None)
    with pytest.raises(NotImplementedError, match="FSDP2"):
        weight.fsdp_pre_all_gather(None, None, None, None, None)


def test_weights_that_are_no_stack_of_each_expert_are_refused():
    recipe = RECIPES["current"]()
    layer = te.GroupedLinear(
        *(8, 144, 48),
        bias=False,
        single_grouped_weight=True,
        device="cpu",
        params_dtype=torch.bfloat16,
    )
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    layer.weight = torch.nn.Parameter(quantizer(layer.weight.detach()))  # one scale for all
    x, _ = inputs(layer)
    with te.autocast(recipe=recipe), pytest.raises(te_fast.StateError, match="8 experts"):
        layer(x, SPLITS)
    split = te.Linear(64, 32, parameters_split={"a": 16, "b": 16}, bias=False, device="cpu")
    for name in ("a_weight", "b_weight"):
        part = quantizer(getattr(split, name).detach())
        setattr(split, name, torch.nn.Parameter(part))
    with te.autocast(recipe=recipe), pytest.raises(te_fast.TeFastError):
        split(torch.ones(16, 64))


@pytest.mark.parametrize("single", [False, True], ids=KINDS)
def test_whole_blocks(recipe, single):
    def block(**init):
        torch.default_generator.manual_seed(3)
        with te.quantized_model_init(recipe=recipe, **init):
            return te.MoE(
                *(64, 48),
                num_experts=4,
                topk=2,
                device="cpu",
                dtype=torch.bfloat16,
                single_grouped_weight=single,
            )

    mine, plain = block(), block(enabled=False)
    x = torch.randn(40, 64).bfloat16()
    found = []
    for one in (mine, plain):
        own = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            y = one(own)
        y.sum().backward()
        found.append((y, own.grad, *(p.grad for p in one.parameters())))
    assert sum(map(is_quantized, mine.parameters())) == (2 if single else 8)
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_were_made_in_inference_mode(recipe, kind, bias):
    """They have no version counter. A model that is built for serving has such weights."""
    layer = make(recipe, kind, bias=bias)
    with torch.inference_mode():
        served = copy.deepcopy(layer)
    x, _ = inputs(layer)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), te.autocast(recipe=recipe):
            assert torch.equal(served(x, SPLITS), layer(x, SPLITS))
