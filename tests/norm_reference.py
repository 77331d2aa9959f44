"""LayerNorm and RMSNorm in FP64, and bounds on te_fast's distance from them."""

from __future__ import annotations

import torch

EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# The step of subnormal numbers; BF16 has FP32's results rounded, whose own step counts.
SUBNORMAL = {torch.float16: 2.0**-24, torch.float32: 2.0**-149, torch.bfloat16: 2.0**-149}


def normalise(x, gamma, function, beta=None):
    """The norm of `x` in FP64; also the mean and the inverse deviation."""
    x = x.double()
    layer_norm = function.normalization == "LayerNorm"
    mean = x.mean(1, keepdim=True) if layer_norm else torch.zeros_like(x[:, :1])
    centred = x - mean
    rstd = (centred.square().mean(1, keepdim=True) + function.eps).rsqrt()
    factor = gamma.double() + (1 if function.zero_centered_gamma else 0)
    y = centred * rstd * factor
    if beta is not None:
        y = y + beta.double()
    return y, mean[:, 0], rstd[:, 0]


def tolerance(x, gamma, function, beta=None):
    """The largest error of FP32 arithmetic: roundings of the mean against the deviation, then of y."""
    x = x.double()
    layer_norm = function.normalization == "LayerNorm"
    mean = x.mean(1, keepdim=True) if layer_norm else torch.zeros_like(x[:, :1])
    rstd = ((x - mean).square().mean(1, keepdim=True) + function.eps).rsqrt()
    factor = (gamma.double() + (1 if function.zero_centered_gamma else 0)).abs()
    size = (x.abs() + mean.abs() + x.abs().mean(1, keepdim=True)) * rstd * factor
    if beta is not None:
        size = size + beta.double().abs()
    return 8 * 2.0**-24 * size


def differentiate(dy, x, gamma, function, add=None):
    """FP64 gradients of x, gamma and beta, by autograd."""
    x, gamma = x.double().requires_grad_(), gamma.double().requires_grad_()
    beta = torch.zeros_like(gamma, requires_grad=True)
    y, _, _ = normalise(x, gamma, function, beta)
    dx, dgamma, dbeta = torch.autograd.grad(y, [x, gamma, beta], dy.double())
    return dx if add is None else dx + add.double(), dgamma, dbeta


def differentiate_saved(dy, x, gamma, stats, add=None):
    """FP64 gradients of x, gamma and beta of LayerNorm, from the statistics that the forward saved."""
    mean, rstd = (stat.double()[:, None] for stat in stats)
    dy, normed = dy.double(), (x.double() - mean) * rstd
    up = dy * gamma.double()
    dx = rstd * (up - up.mean(1, keepdim=True) - normed * (up * normed).mean(1, keepdim=True))
    return dx if add is None else dx + add.double(), (dy * normed).sum(0), dy.sum(0)


def gradient_tolerances(dy, x, gamma, function, add=None):
    """The largest errors of FP32 arithmetic in the gradients of x, gamma and beta: shares of their terms' sizes."""
    _, mean, rstd = (
        stat if i == 0 else stat[:, None] for i, stat in enumerate(normalise(x, gamma, function))
    )
    dy = dy.double().abs()
    factor = (gamma.double() + (1 if function.zero_centered_gamma else 0)).abs()
    up, normed = dy * factor, (x.double().abs() + mean.abs()) * rstd
    size = rstd * (up + up.mean(1, keepdim=True) + normed * (up * normed).mean(1, keepdim=True))
    if add is not None:
        size = size + add.double().abs()
    return 16 * 2.0**-24 * size, 16 * 2.0**-24 * (dy * normed).sum(0), 16 * 2.0**-24 * dy.sum(0)


def near(got, expected, bound):
    """Whether `got` is `expected` within `bound` and the rounding to its type; NaN and infinities in equal places."""
    expected, got_double = expected.cpu(), got.double().cpu()
    finite = expected.abs() <= torch.finfo(got.dtype).max
    error = torch.where(finite, (got_double - expected).abs(), 0.0)
    rounding = 1.01 * EPSILON[got.dtype] * expected.abs() + SUBNORMAL[got.dtype]
    same = torch.where(finite, got_double.isfinite(), ~got_double.isfinite())
    return got.shape == expected.shape and bool(
        (same & ((error <= bound.cpu() + rounding) | ~finite)).all()
    )
