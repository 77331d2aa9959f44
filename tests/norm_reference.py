"""LayerNorm and RMSNorm in FP64, and how far te_fast's may be from it."""

from __future__ import annotations

import torch

EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


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
    """What FP32 arithmetic may be off by: roundings of the mean against the deviation, then of y."""
    x = x.double()
    layer_norm = function.normalization == "LayerNorm"
    mean = x.mean(1, keepdim=True) if layer_norm else torch.zeros_like(x[:, :1])
    rstd = ((x - mean).square().mean(1, keepdim=True) + function.eps).rsqrt()
    factor = (gamma.double() + (1 if function.zero_centered_gamma else 0)).abs()
    size = (x.abs() + mean.abs() + x.abs().mean(1, keepdim=True)) * rstd * factor
    if beta is not None:
        size = size + beta.double().abs()
    return 8 * 2.0**-24 * size
