"""Helpers of the tests of LayerNormLinear and LayerNormMLP: layers, inputs, steps, bounds."""

from __future__ import annotations

import torch

import te_fast.pytorch as te
from compound_reference import relative
from recipes import RECIPES as RECIPES

KINDS = ("linear", "mlp")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative error in the Frobenius norm outside of FP8: a few roundings of each intermediate.
PRECISE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# In FP8, against operands quantised from FP32. FP32: a rare operand lies so close to the middle of two FP8 numbers
# that sums in another order decide. 16 bits: results of norms, activations and products are rounded to 16 bits before
# quantisation. This moves one operand in 30 (BF16) or 240 (FP16) to a neighbour, 2^-3 (E4M3) or 2^-2 (E5M2) away.
QUANTIZED = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 7e-2}


def make(kind, inputs=64, outputs=48, dtype=torch.float32, device="cpu", **options):
    """A layer whose norm and biases are not identities; their values are BF16 numbers."""
    torch.default_generator.manual_seed(inputs + outputs)
    options = {"device": device, "params_dtype": dtype} | options
    if kind == "linear":
        layer = te.LayerNormLinear(inputs, outputs, **options)
    else:
        layer = te.LayerNormMLP(inputs, 2 * outputs, **options)
    generator = torch.Generator().manual_seed(inputs)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            if name == "layer_norm_weight":
                parameter.add_((0.25 * value).bfloat16().to(parameter))
            elif name.endswith("bias"):
                parameter.copy_((0.25 * value).bfloat16())
            else:
                parameter.copy_((0.1 * value).bfloat16())
    return layer


def features(layer):
    """Sizes of input and output."""
    if isinstance(layer, te.LayerNormMLP):
        return layer.hidden_size, layer.hidden_size
    return layer.in_features, layer.out_features


def data(layer, rows=32, dtype=torch.float32, device="cpu"):
    """An input that requires a gradient, and a gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    ins, outs = features(layer)
    x = torch.randn(rows, ins, generator=generator).to(device, dtype).requires_grad_()
    return x, torch.randn(rows, outs, generator=generator).to(device, dtype)


def step(layer, x, grad, recipe=None, **options):
    """Forward and backward, in FP8 with a recipe; of a tuple of results, the first gets the gradient."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x, **options)
    (out[0] if isinstance(out, tuple) else out).backward(grad)
    return out


def gradients(layer, x):
    """The results of a step, under the references' names."""
    found = {f"d{name}": p.grad for name, p in layer.named_parameters() if p.requires_grad}
    return found | {"dx": x.grad}


def assert_close(got, wanted, bound):
    """Compare every tensor of a dict with the expected tensor of the same name."""
    errors = {name: relative(value, wanted[name]) for name, value in got.items()}
    assert max(errors.values()) <= bound, errors


def clear(layer, *tensors):
    """Forget gradients."""
    layer.zero_grad()
    for tensor in tensors:
        tensor.grad = None
