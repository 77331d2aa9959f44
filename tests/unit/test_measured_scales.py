"""Under current scaling, the kernel that computes a tensor also finds the scale that quantises the tensor."""

import pytest
import torch

import te_fast.pytorch as te
from measured_scales import ACTIVATIONS, NORMS, SPECIAL, check, check_backward, launches, searches
from reference import FP8_MAX, amax_of, amax_to_scale, quantized_values
from selection import sampled
from te_fast.common.recipe import Float8CurrentScaling


@pytest.mark.parametrize(
    ("kind", "dtype", "special"),
    sampled([*NORMS, *ACTIVATIONS], [torch.bfloat16, torch.float16, torch.float32], SPECIAL),
)
def test_a_chain_has_the_bits_of_its_ops(kind, dtype, special):
    check(kind, dtype, "cpu", 40, 96, special)


@pytest.mark.parametrize("rows", [0, 8, 136])
@pytest.mark.parametrize("kind", ["LayerNorm", "swiglu"])
def test_rows(kind, rows):
    if rows:
        check(kind, torch.bfloat16, "cpu", rows, 288, "plain")
        return
    with te.autocast(recipe=Float8CurrentScaling()):
        layer = te.LayerNormMLP(64, 64, device="cpu")
        assert layer(torch.ones(0, 64)).shape == (0, 64)


def test_the_scale_is_that_of_the_rounded_value():
    """The reference is torch's: a norm of known result, whose maximum changes when the result is rounded."""
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = 1.0, -1.0
    layer = te.LayerNormLinear(
        64, 64, eps=0.0, bias=False, params_dtype=torch.bfloat16, device="cpu"
    )
    with torch.no_grad():
        layer.layer_norm_weight.fill_(1.2345)
        layer.weight.copy_(torch.eye(64))
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        y = layer(x)
    high = (x.float() * (64 / 2) ** 0.5 * layer.layer_norm_weight.float()).bfloat16()
    assert high.abs().max() != (x.float() * (64 / 2) ** 0.5 * 1.2345).abs().max()
    scale = amax_to_scale(amax_of(high), FP8_MAX["e4m3"])
    wanted = quantized_values(high, "e4m3", "t", scale=scale)
    assert torch.equal(y, wanted.to(torch.bfloat16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.LayerNormLinear(64, 64, device="cpu"),
        lambda: te.LayerNormMLP(64, 96, activation="swiglu", device="cpu"),
        lambda: te.LayerNormMLP(64, 96, activation="gelu", normalization="RMSNorm", device="cpu"),
    ],
)
def test_no_layer_reads_its_norm_or_activation_for_a_maximum(make):
    layer, x = make(), torch.randn(32, 64, requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        layer(x, is_first_microbatch=True)
        names, y = launches(lambda: layer(x, is_first_microbatch=False))
    assert not searches(names), names
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "dtype", "rows"),
    sampled(ACTIVATIONS, [torch.bfloat16, torch.float16, torch.float32], [16, 136]),
)
def test_gradients_have_the_bits_of_ops_apart(kind, dtype, rows):
    check_backward(kind, dtype, "cpu", rows)
