"""Linear layers outside of FP8: torch's own products, whose bits are those of ``torch.nn.Linear``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from te_fast.runtime import native
from te_fast.runtime.main_grad import after_main_grad, main_grad_of
from te_fast.runtime.second_order import differentiable_once, no_forward_mode


class _Linear(torch.autograd.Function):
    """A product whose weight gradient goes into ``main_grad``, or is computed later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        handle: native.WeightHandle,
        parameter: torch.Tensor | None,
        overwrite: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.handle, ctx.parameter, ctx.overwrite = handle, parameter, overwrite
        return functional.linear(x, weight.to(x.dtype), bias)

    jvp = no_forward_mode(lambda ctx: ctx.handle.name)

    @staticmethod
    @differentiable_once(lambda ctx: ctx.handle.name)
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        handle: native.WeightHandle = ctx.handle
        fuses = handle.fuse_wgrad_accumulation and ctx.parameter is not None
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = grad @ weight.to(grad.dtype) if needs_x else None
        db = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
        dw = None
        if needs_weight and handle.delay_wgrad_compute:
            handle.defer(x, grad, ctx.overwrite)
        elif needs_weight and fuses:
            out = main_grad_of(ctx.parameter, handle.name)
            overwrite = ctx.overwrite or getattr(ctx.parameter, "overwrite_main_grad", False)
            native.weight_gradient(x, grad, out, not overwrite)
        elif needs_weight:
            # The parts of a split weight get their share where the concatenation is undone.
            dw = native.weight_gradient(x, grad)
        if needs_weight and fuses:
            dw = after_main_grad(ctx.parameter)
        return dx, dw, db, None, None, None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    handle: native.WeightHandle,
    *,
    parameter: torch.Tensor | None,
    overwrite: bool,
) -> torch.Tensor:
    """Apply ``x Wᵀ + b`` with the handle's way of taking the weight's gradient.

    Parameters
    ----------
    x : torch.Tensor
        ``(..., in_features)``.
    weight : torch.Tensor
        ``(out_features, in_features)``, not quantised.
    bias : torch.Tensor, optional
        ``(out_features,)``.
    handle : WeightHandle
        Says whether the gradient is added to ``main_grad``, and whether it waits.
    parameter : torch.Tensor, optional
        The parameter that has the ``main_grad``: `weight`, or the quantised tensor whose values `weight` has. None if
        the weight is joined from several parameters.
    overwrite : bool
        The gradient replaces ``main_grad``.
    """
    # torch's products may sum a strided input, and its gradient, in another order than the contiguous copy.
    x = x.contiguous()
    if not (handle.fuse_wgrad_accumulation or handle.delay_wgrad_compute):
        return functional.linear(x, weight, bias)
    bias = None if bias is None else bias.to(x.dtype)
    result: torch.Tensor = _Linear.apply(x, weight, bias, handle, parameter, overwrite)
    return result
