"""The quantizers that layers and operations show, which quantise the operands of their GEMMs."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from te_fast.pytorch import ops

LAYERS = {
    "Linear": (lambda: te.Linear(32, 32, device="cpu"), 1),
    "LayerNormLinear": (lambda: te.LayerNormLinear(32, 32, device="cpu"), 1),
    "LayerNormMLP": (lambda: te.LayerNormMLP(32, 32, device="cpu"), 2),
}
KINDS = {
    DelayedScaling: te.Float8Quantizer,
    Float8CurrentScaling: te.Float8CurrentScalingQuantizer,
    Float8BlockScaling: te.Float8BlockQuantizer,
}


def _step(module, recipe, seed=0):
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    with te.autocast(recipe=recipe):
        y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + 1)))
    return x


@pytest.mark.parametrize("recipe", KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_have_quantizers_of_the_recipe_that_they_ran_in(layer, recipe):
    make, gemms = LAYERS[layer]
    module = make()
    assert module.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    _step(module, recipe())
    forward, backward = module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"]
    assert (len(forward), len(backward)) == (3 * gemms, 2 * gemms)
    assert {type(quantizer) for quantizer in forward + backward} == {KINDS[recipe]}
    assert {quantizer.dtype for quantizer in forward} == {te.DType.kFloat8E4M3}
    gradient = te.DType.kFloat8E4M3 if recipe is Float8BlockScaling else te.DType.kFloat8E5M2
    assert {quantizer.dtype for quantizer in backward} == {gradient}


def test_grouped_layers_have_quantizers_of_every_expert():
    module = te.GroupedLinear(2, 32, 32, device="cpu")
    with te.autocast(recipe=DelayedScaling()):
        module(torch.ones(32, 32), [16, 16])
    assert [len(side) for side in module.quantizers.values()] == [6, 4]


def test_quantizers_follow_a_change_of_recipe():
    module = te.Linear(32, 32, device="cpu")
    _step(module, DelayedScaling())
    with pytest.warns(UserWarning, match="Recipe type changed"):
        _step(module, Float8BlockScaling())
    first, weight, _ = module.quantizers["scaling_fwd"]
    assert (first.block_scaling_dim, weight.block_scaling_dim) == (1, 2)


def test_quantizers_of_delayed_scaling_have_the_layers_scales():
    module = te.Linear(32, 32, bias=False, device="cpu")
    x = _step(module, DelayedScaling(amax_history_len=1))
    quantizer = module.quantizers["scaling_fwd"][0]
    assert quantizer.scale.item() == pytest.approx(448 / x.abs().max().item(), rel=1e-6)
    exponents = {"scaling_fwd": (4.0, 8.0, 1.0), "scaling_bwd": (16.0, 1.0)}
    for key, scales in exponents.items():
        for quantizer, scale in zip(module.quantizers[key], scales, strict=True):
            quantizer.scale.fill_(scale)
        assert module.fp8_meta[key].scale.tolist() == list(scales)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(7))
    with te.autocast(recipe=DelayedScaling(amax_history_len=1)):
        y = module(x)
    a, b = (
        (value.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() / scale
        for value, scale in ((x, 4.0), (module.weight, 8.0))
    )
    torch.testing.assert_close(y.double(), a @ b.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", KINDS)
def test_operations_return_what_quantises_an_operand(recipe):
    op = ops.BasicLinear(32, 32, device="cpu")
    assert op.get_quantizer("forward", 0) is None
    assert op.get_input_quantizer() is None
    with te.autocast(recipe=recipe()):
        op(torch.ones(32, 32, requires_grad=True)).sum().backward()
        made = [op.get_quantizer("forward", 0), op.get_quantizer("forward", 1)]
        made += [op.get_quantizer("backward", 0), op.get_input_quantizer()]
        made += [op.get_grad_output_quantizer()]
    assert {type(quantizer) for quantizer in made} == {KINDS[recipe]}


def test_scales_of_operations_are_read_through_their_quantizers():
    op = ops.BasicLinear(16, 16, device="cpu")
    recipe = DelayedScaling(margin=2, amax_history_len=31, fp8_format=Format.HYBRID)
    for step in range(3):
        with torch.no_grad():
            op.weight.fill_(step + 0.5)
        x = torch.full((16, 16), step + 0.25, requires_grad=True)
        with te.autocast(recipe=recipe):
            y = op(x)
        y.backward(torch.full((16, 16), step + 0.75))
        scales = (
            op.get_quantizer("forward", 0).scale.item(),
            op.get_quantizer("forward", 1).scale.item(),
            op.get_quantizer("backward", 0).scale.item(),
        )
        maxima = step + 0.25, step + 0.5, step + 0.75
        expected = [top / most / 4 for top, most in zip((448, 448, 57344), maxima, strict=True)]
        assert scales == pytest.approx(expected, rel=1e-6)


def test_a_fused_operation_has_the_quantizers_of_its_ends():
    linear = ops.BasicLinear(32, 32, device="cpu")
    fused = ops.FusedOperation((linear, ops.Bias(32, device="cpu")))
    with te.autocast(recipe=Float8CurrentScaling()):
        assert isinstance(fused.get_input_quantizer(), te.Float8CurrentScalingQuantizer)
        assert fused.get_grad_output_quantizer() is None


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("views", lambda tensor: tensor.view(-1)),
        ("dequantize", lambda tensor: tensor.dequantize()),
        ("quantize_", lambda tensor: tensor.quantize_(torch.zeros(8, 8))),
    ],
)
def test_the_base_class_of_quantised_tensors_says_what_it_lacks(name, call):
    tensor = te.QuantizedTensor((8, 8), torch.bfloat16, device=torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=f"QuantizedTensor class does not .*{name}"):
        call(tensor)
