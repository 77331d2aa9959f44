"""Linear layers outside FP8 whose weight gradient goes its own way: into ``main_grad``, or later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from te_fast.errors import StateError
from te_fast.pytorch import _ops

if TYPE_CHECKING:
    from te_fast.pytorch.linear import Linear

__all__ = ["after_main_grad", "give", "linear", "main_grad_of"]


def main_grad_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the buffer that a parameter's gradient is added to.

    Raises
    ------
    StateError
        If there is none.
    """
    if hasattr(parameter, "__fsdp_param__"):
        parameter.main_grad = parameter.get_main_grad()  # type: ignore[attr-defined]
    grad = getattr(parameter, "main_grad", None)
    if grad is None:
        message = (
            "linear: fuse_wgrad_accumulation=True needs weight.main_grad; set it before backward, or "
            "construct the layer without"
        )
        raise StateError(message)
    result: torch.Tensor = grad
    return result


def give(
    parameter: torch.Tensor, grad: torch.Tensor, *, fuse: bool, overwrite: bool
) -> torch.Tensor | None:
    """Give a computed gradient to a parameter.

    Into ``main_grad`` with `fuse`, else into ``.grad``. Returns what autograd is given.
    """
    if not fuse:
        if parameter.grad is None:
            parameter.grad = grad.to(parameter.dtype)
        else:
            parameter.grad += grad
        return None
    main_grad = main_grad_of(parameter)
    if overwrite or getattr(parameter, "overwrite_main_grad", False):
        main_grad.copy_(grad)
    else:
        main_grad.add_(grad)
    return after_main_grad(parameter)


def after_main_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what autograd is given for a parameter whose gradient goes into ``main_grad``.

    With ``grad_added_to_main_grad`` set on the parameter, it becomes true and autograd gets a dummy
    gradient, so that hooks fire; else it gets none.
    """
    from te_fast.pytorch.base import dummy_wgrad_for

    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return dummy_wgrad_for(parameter)


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
            _ops.weight_gradient(x, grad, out, not overwrite)
        elif needs_weight:
            # The parts of a split weight get their share where the concatenation is undone.
            dw = _ops.weight_gradient(x, grad)
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
