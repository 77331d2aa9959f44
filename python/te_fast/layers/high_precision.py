"""Linear layers outside of FP8 whose weight gradient goes into ``main_grad`` or is computed later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from te_fast.runtime import native
from te_fast.runtime.main_grad import after_main_grad, main_grad_of

if TYPE_CHECKING:
    from te_fast.layers.linear import Linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Linear,
        overwrite: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.overwrite, ctx.weight = layer, overwrite, weight
        return functional.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: Linear = ctx.layer
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = grad @ weight.to(grad.dtype) if needs_x else None
        db = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
        dw = None
        is_whole = layer._parts is None
        if needs_weight and layer.delay_wgrad_compute:
            layer._handles["weight"].defer(x, grad, ctx.overwrite)
        elif needs_weight and layer.fuse_wgrad_accumulation and is_whole:
            out = main_grad_of(ctx.weight)
            overwrite = ctx.overwrite or getattr(ctx.weight, "overwrite_main_grad", False)
            native.weight_gradient(x, grad, out, not overwrite)
        elif needs_weight:
            # The parts of a split weight get their share where the concatenation is undone.
            dw = native.weight_gradient(x, grad)
        if needs_weight and layer.fuse_wgrad_accumulation and is_whole:
            dw = after_main_grad(ctx.weight)
        return dx, dw, db, None, None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layer: Linear,
    overwrite: bool,
) -> torch.Tensor:
    """Apply ``x Wᵀ + b`` with the layer's way of taking the weight's gradient."""
    result: torch.Tensor = _Linear.apply(x, weight, bias, layer, overwrite)
    return result
