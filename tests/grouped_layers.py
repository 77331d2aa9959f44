"""Helpers of the tests of GroupedLinear: layers, inputs, and FP64 products of each expert's quantised operands."""

from __future__ import annotations

import torch

import te_fast.pytorch as te
from linear_layers import expected

#: Rows of the experts: none first, in the middle and last; one, tails of blocks, and blocks that are full.
SPLITS = [0, 70, 1, 0, 129, 128, 16, 0]


class Expert:
    """One expert of a layer, as `expected` reads a `Linear`."""

    weight_names = ("weight",)
    bias_names = ("bias",)

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias


def make(groups=8, inputs=144, outputs=48, dtype=torch.bfloat16, **options):
    """A layer whose experts differ in size, and whose biases matter."""
    torch.default_generator.manual_seed(groups + inputs + outputs)
    layer = te.GroupedLinear(groups, inputs, outputs, device="cpu", params_dtype=dtype, **options)
    with torch.no_grad():
        for number, weight in enumerate(stack(layer)):
            weight.mul_(2.0 ** (number % 5))
        for bias in biases(layer) if layer.use_bias else ():
            bias.normal_()
    return layer


def with_biases(module):
    """Give biases values other than zero, so that they change results."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.rpartition(".")[-1].startswith("bias"):
                parameter.uniform_(-0.1, 0.1)
    return module


def stack(layer):
    """The experts' weights, stacked, from one parameter or several."""
    names = layer.weight_names
    return list(layer.weight) if names == ["weight"] else [getattr(layer, name) for name in names]


def biases(layer):
    names = layer.bias_names
    return list(layer.bias) if names == ["bias"] else [getattr(layer, name) for name in names]


def grads(layer, kind="weight", of=lambda parameter: parameter.grad):
    """Gradients of the experts' weights or biases, stacked."""
    names = getattr(layer, f"{kind}_names")
    found = [of(getattr(layer, name)) for name in names]
    return found[0] if names == [kind] else torch.stack(found)


def inputs(layer, splits=SPLITS, dtype=torch.bfloat16):
    """An input that requires a gradient, and a gradient of the output; experts of several magnitudes."""
    torch.default_generator.manual_seed(sum(splits))
    rows = sum(splits)
    size = torch.repeat_interleave(
        torch.tensor([4.0 ** -(number % 3) for number in range(len(splits))]), torch.tensor(splits)
    )
    x = (torch.randn(rows, layer.in_features) * size[:, None]).to(dtype).requires_grad_()
    return x, (torch.randn(rows, layer.out_features) * size.flip(0)[:, None]).to(dtype)


def step(layer, x, grad, recipe, splits=SPLITS, **options):
    """Forward and backward, in FP8 with a recipe."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, splits, **options)
    y.backward(grad)
    return y


def expected_step(layer, x, grad, name, splits=SPLITS):
    """Each expert's products in FP64, of operands that are quantised separately for the expert."""
    found = {key: [] for key in ("y", "dx", "dw", "db")}
    parts = zip(x.split(splits), grad.split(splits), stack(layer), biases(layer), strict=True)
    for own, dy, weight, bias in parts:
        bias = bias.detach() if layer.apply_bias else torch.zeros_like(weight[:, 0].detach())
        if not own.numel():
            for key, like in zip(found, (dy, own, weight, bias), strict=True):
                found[key].append(torch.zeros_like(like, dtype=torch.float64))
            continue
        for key, value in expected(Expert(weight, bias), own, dy, name).items():
            found[key].append(value)
    rows = {key: torch.cat(found[key]) for key in ("y", "dx")}
    return rows | {key: torch.stack(found[key]) for key in ("dw", "db")}
