"""Activation functions in plain torch, written from their formulas, as references of both backends."""

from __future__ import annotations

import torch

import reference

UNARY = ["gelu", "qgelu", "relu", "srelu", "silu"]
GATED = ["geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "situ_glu"]
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Bounds relative to the FP64 result: half a unit in the last place of 8, 11 and 24 bits, and for the FP32 arithmetic
# the errors of 2^x, 1/x and five roundings.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
ARITHMETIC = 2e-6
# The same bound where sigmoid(u) is as small as exp(-88): rounding u changes sigmoid(u) by |u| 2^-24 of it, twice.
TAIL = 2e-5
# Absolute bounds. FLUSHED is for tests of that tail: below it a result may be 0, since the sigmoid's reciprocal is
# flushed just before expf overflows in Transformer Engine's kernels.
ABSOLUTE = {torch.bfloat16: 1e-35, torch.float16: 2.0**-24, torch.float32: 1e-9}
FLUSHED = 1e-35


def split(x, interleave):
    """Activated and linear halves of the last dimension."""
    if not interleave:
        return x.chunk(2, dim=-1)
    blocks = x.unflatten(-1, (-1, 2, interleave))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def _gelu(x):
    # sigmoid(2 v) is (1 + tanh(v)) / 2 without its cancellation.
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


_CURVES = {
    "gelu": _gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x) ** 2,
    "silu": lambda x: x * torch.sigmoid(x),
    "sigmoid": torch.sigmoid,
}
_HALVES = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}


def clamped(x, low, high):
    """``x.clamp``, with the slope 1 of Transformer Engine at the limits; torch's depends on its version."""
    x = torch.where(x > high, high, x)
    return torch.where(x < low, low, x)


def activate(x, function):
    """The function of a tensor, computed in the tensor's type."""
    if function.name in _CURVES:
        return _CURVES[function.name](x)
    g, linear = split(x, function.interleave)
    if function.name in _HALVES:
        return _CURVES[_HALVES[function.name]](g) * linear
    if function.name == "clamped_swiglu":
        g = clamped(g, -torch.inf, function.limit)
        linear = clamped(linear, -function.limit, function.limit) + function.offset
        return g * torch.sigmoid(function.alpha * g) * linear
    assert function.name == "situ_glu"
    bounded = function.beta1 * torch.tanh(g / function.beta1) * torch.sigmoid(g)
    return bounded * function.beta2 * torch.tanh(linear / function.beta2)


def differentiate(dy, x, function, row_scale=None):
    """FP64 gradients of x and of the row scale, by autograd."""
    x = x.double().requires_grad_()
    y = activate(x, function)
    factor = None
    if row_scale is not None:
        factor = row_scale.double().requires_grad_()
        y = y * factor[:, None]
    inputs = [x] if factor is None else [x, factor]
    grads = torch.autograd.grad(y, inputs, dy.double())
    return grads[0], grads[1] if factor is not None else None


def assert_near(got, expected, magnitude=None, share=ARITHMETIC):
    """`got` is the FP64 `expected` up to arithmetic in FP32 and one rounding to its type.

    `magnitude` is what the arithmetic's error is relative to, where terms cancel.
    """
    dtype = got.dtype
    largest = torch.finfo(dtype).max
    expected = torch.where(expected.abs() > largest, expected.sign() * torch.inf, expected)
    magnitude = expected.abs() if magnitude is None else torch.maximum(magnitude, expected.abs())
    finite = expected.isfinite()
    assert torch.equal(got.isnan(), expected.isnan())
    # What overflows FP32 or the type may lie on either side of its last number.
    near_largest = magnitude > largest * 0.99
    bound = (
        expected.abs() * ROUNDING[dtype]
        + magnitude * share
        + (FLUSHED if share == TAIL and dtype.itemsize == 4 else ABSOLUTE[dtype])
    )
    wrong = ((got.double() - expected).abs() > bound) & finite & ~near_largest
    wrong |= expected.isinf() & (got.double().abs() < largest * 0.99)
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        message = (
            f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {where}: "
            f"{got[tuple(where)].item()!r} for {expected[tuple(where)].item()!r}"
        )
        raise AssertionError(message)


def assert_fp8_near(got, expected, scale, fmt, magnitude=None):
    """FP8 `got` lies between the casts of the FP64 `expected` lowered and raised by the arithmetic's error."""
    magnitude = expected.abs() if magnitude is None else torch.maximum(magnitude, expected.abs())
    slack = (magnitude * ARITHMETIC + ABSOLUTE[torch.float32]) * scale.double()
    exact = expected * scale.double()
    low, high = (
        reference.to_fp8_bytes(bound.float(), fmt).view(FP8[fmt]).float()
        for bound in (exact - slack, exact + slack)
    )
    value = got.float()
    assert torch.equal(value.isnan(), exact.isnan())
    wrong = ((value < low) | (value > high)) & ~exact.isnan()
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} FP8 values wrong"


def edge_values(dtype, count, seed=0):
    """`count` values: special values first, then numbers of all sizes."""
    info = torch.finfo(dtype)
    special = [
        0.0,
        -0.0,
        info.tiny,
        -info.tiny,
        info.smallest_normal / 2,
        7.0,
        -7.0,
        0.6,
        -0.6,
        1e4,
        -1e4,
    ]
    special += [
        torch.inf,
        -torch.inf,
        torch.nan,
        info.max / 4,
        info.min / 4,
        88.0,
        -88.0,
        20.0,
        -20.0,
        1e-4,
    ]
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([1e-3, 0.3, 1.0, 1.0, 4.0, 12.0])
    pick = sizes[torch.randint(0, len(sizes), (count,), generator=generator)]
    values = torch.randn(count, generator=generator) * pick
    values[: min(count, len(special))] = torch.tensor(special)[:count]
    return values.to(dtype)
