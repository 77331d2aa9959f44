"""The router of a block: scores and experts of its tokens, in one autograd node."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from te_fast.moe import choice as kernels
from te_fast.runtime import native
from te_fast.runtime.second_order import refuse_second_order


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float32 else tensor.float()


class _RouteTokens(torch.autograd.Function):
    """Arguments: tokens, weight of the router, bias of the experts, how they are chosen.

    One node replaces torch's nodes of cast, product and choice, whose calls cost the host more than their launches.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        choice: kernels.Choice,
    ) -> Any:
        ctx.shape, ctx.dtype, ctx.choice = tokens.shape, tokens.dtype, choice
        x = tokens if tokens.dim() == 2 else tokens.reshape(-1, tokens.shape[-1])
        x = _in_fp32(x)
        logits = functional.linear(x, _in_fp32(weight))
        biases = None if bias is None else _in_fp32(bias)
        probs, scores, chosen, _ = native.router_forward(
            logits, biases, choice, None, (True, True, False)
        )
        ctx.save_for_backward(x, weight, scores, chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return probs, chosen, logits

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any, grad_logits: Any) -> Any:
        refuse_second_order("MoE")
        x, weight, scores, chosen = ctx.saved_tensors
        dlogits = grad_logits
        if grad is not None:
            dlogits = torch.empty_like(scores)
            native.router_backward(grad, scores, chosen, ctx.choice, dlogits)
            if grad_logits is not None:
                dlogits += grad_logits
        dtokens = dweight = None
        if dlogits is not None and ctx.needs_input_grad[0]:
            dtokens = torch.mm(dlogits, _in_fp32(weight)).to(ctx.dtype).view(ctx.shape)
        if dlogits is not None and ctx.needs_input_grad[1]:
            dweight = torch.mm(dlogits.t(), x).to(weight.dtype)
        return dtokens, dweight, None, None


#: ``Function.apply`` without its Python frame.
_apply: Any = super(torch.autograd.Function, _RouteTokens).apply


def route_tokens(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    choice: kernels.Choice,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return probabilities, the map of the chosen experts, and logits, each ``(tokens, experts)``.

    Parameters
    ----------
    tokens : torch.Tensor
        ``(..., hidden)``, without hooks or tracing (`is_unseen`), outside of ``torch.autocast``.
    weight : torch.Tensor
        Of the router, ``(experts, hidden)``; as many experts as kernels take.
    bias : torch.Tensor, optional
        ``(experts,)``, added only for the choice.
    choice : Choice
        How experts are chosen.
    """
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _apply(tokens, weight, bias, choice)
    return routed
