"""Helpers of the tests of Linear: layers, inputs, steps, and FP64 products of independently quantised operands."""

from __future__ import annotations

import torch

import reference as ref
import te_fast.pytorch as te
from te_fast import dispatch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place of the result, and room for FP32 sums in another order.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 3e-6}


def make(inputs=64, outputs=48, dtype=torch.bfloat16, **options):
    """A layer whose bias is not zero, unless its parameters are split."""
    torch.default_generator.manual_seed(inputs + outputs)
    layer = te.Linear(inputs, outputs, device="cpu", params_dtype=dtype, **options)
    if layer.use_bias and options.get("parameters_split") is None:
        torch.nn.init.normal_(layer.bias)
    return layer


def inputs(rows, layer, dtype=torch.bfloat16):
    """An input that requires a gradient, and a gradient of the output."""
    torch.default_generator.manual_seed(rows)
    x = torch.randn(rows, layer.in_features, dtype=dtype, requires_grad=True)
    return x, torch.randn(rows, layer.out_features, dtype=dtype)


def step(layer, x, grad, recipe, **options):
    """Forward and backward, in FP8 with a recipe."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **options)
    y.backward(grad)
    return y


def expected(layer, x, grad, name, scale=None):
    """Products of quantised operands under the named recipe, or of the operands themselves if the name is None.

    Delayed scaling is in its first step, at scale 1; ``scale`` is the gradient's scale in a later step.
    """
    w = torch.cat([getattr(layer, weight).detach() for weight in layer.weight_names])
    bias = torch.cat([getattr(layer, bias).detach() for bias in layer.bias_names])
    if name is None:
        x, w, g = x.detach().double(), w.double(), grad.double()
        return {"y": x @ w.t() + bias.double(), "dx": g @ w, "dw": g.t() @ x, "db": g.sum(0)}
    if w.dtype == torch.float32:
        bias = bias.bfloat16()  # no FP8 GEMM adds an FP32 bias
    if name == "block":
        kinds, grad_format, first = ("1d", "2d", "1d"), "e4m3", None
    else:
        kinds, grad_format = ("t", "t", "t"), "e5m2"
        first = torch.tensor(1.0) if name == "delayed" else None
    scale = first if scale is None else scale
    quantised = {
        "x": ref.quantized_values(x, "e4m3", kinds[0], scale=first),
        "xt": ref.quantized_values(x, "e4m3", kinds[0], transposed=True, scale=first),
        "w": ref.quantized_values(w, "e4m3", kinds[1], scale=first),
        "g": ref.quantized_values(grad, grad_format, kinds[2], scale=scale),
        "gt": ref.quantized_values(grad, grad_format, kinds[2], transposed=True, scale=scale),
    }
    return {
        "y": quantised["x"] @ quantised["w"].t() + bias.double(),
        "dx": quantised["g"] @ quantised["w"],
        "dw": quantised["gt"] @ quantised["xt"].t(),
        "db": grad.double().sum(0),
    }


def close(got, wanted, dtype):
    """Compare with FP64 to a rounding of ``dtype``, relative to the largest magnitude."""
    scale = wanted.abs().amax().clamp_min(1e-30)
    error = ((got.double() - wanted).abs() / scale).max().item()
    assert error <= 2 * ROUNDING[dtype], error


def casts(function):
    """Count the weights that are quantised meanwhile."""
    before = dispatch.counters()["weight_casts"]
    function()
    return dispatch.counters()["weight_casts"] - before
