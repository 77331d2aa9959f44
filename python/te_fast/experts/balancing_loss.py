"""The loss that balances the experts of a block, in one autograd node."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.moe.choice import Choice
from te_fast.runtime import native
from te_fast.runtime.second_order import refuse_second_order


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


class _BalancingLoss(torch.autograd.Function):
    """Arguments: logits, how scores are computed, weight of the loss.

    ``factor · Σ_e (Σ_t scores[t, e]) · counts[e]``, so that the scores of all tokens have the same gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, choice: Choice, factor: float) -> torch.Tensor:
        keeps = not choice._keeps_result
        made: Any = native.router_forward(logits, None, choice, None, (keeps, True, False))
        scores, kept, chosen, _ = made
        counts = _by_rows(chosen).sum(0, dtype=torch.float32)
        ctx.save_for_backward(kept if keeps else scores, counts)
        ctx.choice, ctx.factor = choice, factor
        return (_by_rows(scores).sum(0) * counts).sum() * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_second_order("MoE's loss")
        scores, counts = ctx.saved_tensors
        row = counts * (grad * ctx.factor)
        dlogits = torch.empty_like(scores)
        native.router_backward(row.expand(scores.shape), scores, None, ctx.choice, dlogits)
        return dlogits, None, None


#: ``Function.apply`` without its Python frame.
_apply: Any = super(torch.autograd.Function, _BalancingLoss).apply


def balancing_loss(
    logits: torch.Tensor, topk: int, score_function: str, coeff: float
) -> torch.Tensor:
    """Return the loss of :func:`te_fast.pytorch.router.fused_moe_aux_loss` for scores and choice of the same logits.

    Parameters
    ----------
    logits : torch.Tensor
        float32 ``(..., experts)``, at least one token, a tensor without hooks or tracing; as many experts as kernels
        take.
    topk : int
        Experts of a token.
    score_function : {'softmax', 'sigmoid', 'sqrtsoftplus'}
        Scores of logits.
    coeff : float
        Weight of the loss.
    """
    experts = logits.shape[-1]
    tokens = logits.numel() // experts
    choice = Choice(topk, 0, 0, score_function, "all", 1.0)
    loss: torch.Tensor = _apply(logits, choice, experts * coeff / topk / tokens**2)
    return loss
