"""Functions that torch fuses into few kernels when it compiles them: bias and GELU, L2 norms, bias and dropout.

A name that ends in an underscore is the compiled function alone; the name without it turns ``torch.autocast`` off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast.helpers.compiling import dropout_fuser, jit_fuser

# GELU by tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))).
_ROOT = 0.79788456
_CUBIC = 0.044715
_SLOPE = 0.1070322243  # 3 * _ROOT * _CUBIC


def _without_autocast(tensor: torch.Tensor) -> Any:
    return torch.autocast(tensor.device.type, enabled=False)


def _tanh_of(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(_ROOT * x * (1 + _CUBIC * x * x))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + _tanh_of(x))


def _dgelu(grad_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    tanh = _tanh_of(x)
    inner = (1 - tanh * tanh) * (_ROOT + _SLOPE * x * x)
    return (0.5 * x * inner + 0.5 * (1 + tanh)) * grad_output


@jit_fuser
def bias_gelu_fused_(inp: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(inp + bias)`` by tanh."""
    return _gelu(inp + bias)


@jit_fuser
def gelu_fused_(inp: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(inp)`` by tanh."""
    return _gelu(inp)


@jit_fuser
def bgrad_dgelu_fused_(
    grad_output: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the bias, summed over the first dimension, and of the input of ``gelu(inp + bias)``."""
    dgelu = _dgelu(grad_output, inp + bias)
    return dgelu.sum(dim=0), dgelu


@jit_fuser
def dgelu_fused_(grad_output: torch.Tensor, inp: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the input of ``gelu(inp)``."""
    return _dgelu(grad_output, inp)


def _l2(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).sum(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype), scale


@jit_fuser
def l2normalization_fused_(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(sum(x ** 2) + eps)`` over the last dimension, computed in FP32."""
    return _l2(x, eps)[0]


@jit_fuser
def l2normalization_fwd_fused_(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same and ``1 / sqrt(sum(x ** 2) + eps)`` ``(..., 1)`` in FP32, which backward reads."""
    return _l2(x, eps)


@jit_fuser
def l2normalization_backward_fused_(
    grad_output: torch.Tensor, x: torch.Tensor, rsqrt_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the gradient of `x`, from what forward has returned."""
    wide, grad = x.float(), grad_output.float()
    along = (wide * grad).sum(dim=-1, keepdim=True)
    squared = wide.pow(2).sum(dim=-1, keepdim=True) + eps
    return (rsqrt_norm * (grad - wide * along / squared)).to(x.dtype)


def bias_gelu_fused(inp: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``gelu(inp + bias)`` by tanh.

    Parameters
    ----------
    inp : torch.Tensor
        ``(..., hidden)``.
    bias : torch.Tensor, optional
        ``(hidden,)``; none if it is empty.
    """
    with _without_autocast(inp):
        if bias is None or bias.numel() == 0:
            return gelu_fused_(inp)
        return bias_gelu_fused_(inp, bias)


def bgrad_dgelu_fused(
    grad_output: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the gradients of the bias (None without one) and of the input of :func:`bias_gelu_fused`.

    Parameters
    ----------
    grad_output, inp : torch.Tensor
        ``(tokens, hidden)``.
    bias : torch.Tensor, optional
        ``(hidden,)``; none if it is empty.
    """
    with _without_autocast(inp):
        if bias is None or bias.numel() == 0:
            return None, dgelu_fused_(grad_output, inp)
        return bgrad_dgelu_fused_(grad_output, inp, bias)


def l2normalization_fused(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(sum(x ** 2) + eps)`` over the last dimension, for inference."""
    with _without_autocast(x):
        return l2normalization_fused_(x, eps)


def l2normalization_fwd_fused(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same, and what :func:`l2normalization_backward_fused` reads."""
    with _without_autocast(x):
        return l2normalization_fwd_fused_(x, eps)


def l2normalization_backward_fused(
    grad_output: torch.Tensor, x: torch.Tensor, rsqrt_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the gradient of `x`."""
    with _without_autocast(x):
        return l2normalization_backward_fused_(grad_output, x, rsqrt_norm, eps)


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float, training: bool
) -> torch.Tensor:
    """Return ``residual + dropout(x + bias)``.

    Parameters
    ----------
    x, residual : torch.Tensor
        ``(..., hidden)``.
    bias : torch.Tensor
        ``(hidden,)``.
    prob : float
        Probability that an element is dropped.
    training : bool
        Whether anything is dropped.
    """
    return residual + torch.nn.functional.dropout(x + bias, p=prob, training=training)


def get_bias_dropout_add(training: bool) -> Callable[..., torch.Tensor]:
    """Return :func:`bias_dropout_add` of ``(x, bias, residual, prob)``, for training or inference."""

    def add(
        x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
    ) -> torch.Tensor:
        return bias_dropout_add(x, bias, residual, prob, training)

    return add


@dropout_fuser
def bias_dropout_add_fused_train_(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Return ``residual + dropout(x + bias)``, for training."""
    return bias_dropout_add(x, bias, residual, prob, True)


def bias_dropout_add_fused_train(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Return ``residual + dropout(x + bias)`` with gradients, also under ``torch.no_grad()``."""
    with torch.enable_grad(), _without_autocast(x):
        return bias_dropout_add_fused_train_(x, bias, residual, prob)


@dropout_fuser
def bias_dropout_add_fused_inference_(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Return ``residual + x + bias``."""
    return bias_dropout_add(x, bias, residual, prob, False)


def bias_dropout_add_fused_inference(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Return ``residual + x + bias``."""
    with _without_autocast(x):
        return bias_dropout_add_fused_inference_(x, bias, residual, prob)
