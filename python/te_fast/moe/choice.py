"""Calls of the routers' kernels: one launch forward and one backward.

Eager calls go to the native module, inside of an autograd function if a gradient is needed; tracers see the same
calls as operators of ``torch.library``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from te_fast.moe.balancing import Balance, check_bounds
from te_fast.runtime import native
from te_fast.runtime.compiling import is_watched
from te_fast.runtime.library import register
from te_fast.runtime.second_order import no_forward_mode, refuse_second_order

#: Experts that a warp holds.
MOST_EXPERTS = 1024
#: Types of memory for the experts of tokens.
INDEX_TYPES = (torch.int16, torch.int32, torch.int64)


class Choice(NamedTuple):
    """How a router chooses.

    Attributes
    ----------
    topk : int
        Experts of a token.
    num_groups, group_topk : int
        Number of groups of experts, and number of groups that a token's experts come from; 0 without groups.
    score_function : {'softmax', 'sigmoid', 'sqrtsoftplus'}
        Scores of logits.
    over : {'chosen', 'before', 'all'}
        The experts whose scores are normalised: the chosen ones; all, before the choice; or all, for a balancing loss.
    factor : float
        Multiplies the probabilities.
    """

    topk: int
    num_groups: int
    group_topk: int
    score_function: str
    over: str
    factor: float

    @property
    def _keeps_result(self) -> bool:
        """Whether the scores that backward reads are the result."""
        return self.over == "all" and self.score_function == "softmax"


def takes(logits: torch.Tensor) -> bool:
    """Tell whether kernels take the logits: plain tensors, with at most as many experts as a warp holds."""
    if not 0 < logits.shape[-1] <= MOST_EXPERTS:
        return False
    if is_watched(logits):
        return True
    is_plain = type(logits) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and not torch._C._are_functorch_transforms_active()


def _backward(
    grad: torch.Tensor, scores: torch.Tensor, chosen: Any, choice: Choice, dtype: torch.dtype
) -> torch.Tensor:
    dlogits = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    native.router_backward(grad, scores, chosen, choice, dlogits)
    return dlogits


class _Route(torch.autograd.Function):
    """Arguments: logits, bias of the experts, how they are chosen, memory for indices, whether for bits, histogram."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        choice: Choice,
        indices: torch.Tensor | None,
        in_bits: bool,
        balance: Balance | None,
    ) -> Any:
        keeps = not choice._keeps_result
        probs, scores, chosen, bits = native.router_forward(
            logits, bias, choice, indices, (keeps, True, in_bits), balance
        )
        ctx.choice, ctx.dtype = choice, logits.dtype
        ctx.save_for_backward(scores if keeps else probs, None if choice.over == "all" else chosen)
        ctx.mark_non_differentiable(*[found for found in (chosen, bits) if found is not None])
        return probs, chosen, bits

    jvp = no_forward_mode("router")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        refuse_second_order("router")
        scores, chosen = ctx.saved_tensors
        return _backward(grad, scores, chosen, ctx.choice, ctx.dtype), *(None,) * 5


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    choice: Choice,
    *,
    in_bits: bool,
    indices: torch.Tensor | None = None,
    balance: Balance | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and the map of the chosen experts.

    Parameters
    ----------
    logits : torch.Tensor
        float32, float16 or bfloat16 ``(..., experts)``.
    bias : torch.Tensor, optional
        float32 ``(experts,)``, added only for the choice.
    choice : Choice
        How experts are chosen.
    in_bits : bool
        Return the map in bits, ``uint8 (..., ceil(experts / 8))``, and not in ``bool (..., experts)``.
    indices : torch.Tensor, optional
        One of :data:`INDEX_TYPES`, ``(..., topk)``; receives the experts of each token, best first.
    balance : Balance, optional
        A histogram to add the biases that experts lack to.

    Returns
    -------
    tuple of torch.Tensor
        ``(..., experts)``, and the map.
    """
    bias = None if bias is None else bias.detach()
    if is_watched(logits):
        bounds, bins = None, 0
        if balance is not None:
            bounds, bins = balance.bounds, balance.histogram.shape[1]
        counts = [choice.topk, choice.num_groups, choice.group_topk, bins]
        how = choice.score_function, choice.over, choice.factor
        wanted = [in_bits, indices is not None]
        made: Any = _TracedRoute.apply(logits, bias, bounds, counts, *how, wanted)
        probs, chosen, bits, found, added = made
        if balance is not None:
            balance.histogram.add_(added)
        if indices is not None:
            indices.copy_(found)
        return probs, bits if in_bits else chosen
    direct = indices
    if indices is not None and not indices.is_contiguous():
        direct = torch.empty(indices.shape, dtype=torch.int64, device=logits.device)
    if logits.requires_grad and torch.is_grad_enabled():
        probs, chosen, bits = _Route.apply(logits, bias, choice, direct, in_bits, balance)
    else:
        forms = (False, not in_bits and indices is None, in_bits)
        probs, _, chosen, bits = native.router_forward(logits, bias, choice, direct, forms, balance)
    if balance is not None and not balance.histogram.is_inference():
        increment_version(balance.histogram)
    if indices is not None and direct is not None and direct is not indices:
        indices.copy_(direct)
    return probs, bits if in_bits else chosen


# In graphs ----------------------------------------------------------------------------------------


def _router_run(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    bounds: torch.Tensor | None,
    counts: list[int],
    score_function: str,
    over: str,
    factor: float,
    wanted: list[bool],
) -> tuple[torch.Tensor, ...]:
    topk, num_groups, group_topk, bins = counts
    in_bits, with_indices = wanted
    choice = Choice(topk, num_groups, group_topk, score_function, over, factor)
    indices = _indices_of(logits, topk, with_indices)
    balance = None
    added = logits.new_zeros((logits.shape[-1] if bins else 0, bins), dtype=torch.int32)
    if bounds is not None:
        check_bounds(bounds)
        balance = added, bounds
    forms = True, True, in_bits
    made = native.router_forward(
        logits, bias, choice, indices if with_indices else None, forms, balance
    )
    return (*[logits.new_empty(0) if found is None else found for found in made], indices, added)


def _indices_of(logits: torch.Tensor, topk: int, wanted: bool) -> torch.Tensor:
    size = (*logits.shape[:-1], topk) if wanted else (0,)
    return logits.new_empty(size, dtype=torch.int64)


def _router_fake(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    bounds: torch.Tensor | None,
    counts: list[int],
    score_function: str,
    over: str,
    factor: float,
    wanted: list[bool],
) -> Any:
    del bias, bounds, score_function, factor
    in_bits, with_indices = wanted
    like, (*leading, experts) = logits.new_empty, logits.shape
    bits = like((*leading, -(-experts // 8)), dtype=torch.uint8) if in_bits else like(0)
    return (
        like(logits.shape, dtype=torch.float32 if over == "all" else logits.dtype),
        like(logits.shape, dtype=torch.float32),
        like(logits.shape, dtype=torch.bool),
        bits,
        _indices_of(logits, counts[0], with_indices),
        like((experts if counts[3] else 0, counts[3]), dtype=torch.int32),
    )


_router = register(
    "moe_router(Tensor logits, Tensor? bias, Tensor? bounds, SymInt[] counts, str score_function, str over, "
    "float factor, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _router_run,
    _router_fake,
)


def _router_bwd_run(
    grad: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    topk: int,
    score_function: str,
    over: str,
    factor: float,
    like: torch.Tensor,
) -> torch.Tensor:
    choice = Choice(topk, 0, 0, score_function, over, factor)
    return _backward(grad, scores, None if over == "all" else chosen, choice, like.dtype)


def _router_bwd_fake(
    grad: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    topk: int,
    score_function: str,
    over: str,
    factor: float,
    like: torch.Tensor,
) -> torch.Tensor:
    del grad, chosen, topk, score_function, over, factor
    return scores.new_empty(scores.shape, dtype=like.dtype)


_router_bwd = register(
    "moe_router_bwd(Tensor grad, Tensor scores, Tensor chosen, SymInt topk, str score_function, str over, "
    "float factor, Tensor like) -> Tensor",
    _router_bwd_run,
    _router_bwd_fake,
)


class _TracedRoute(torch.autograd.Function):
    """Arguments: those of the operator."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        logits, _, _, counts, score_function, over, factor, _ = arguments
        probs, scores, chosen, bits, indices, added = _router(*arguments)
        ctx.save_for_backward(scores, chosen, logits.new_empty(0))
        ctx.how = counts[0], score_function, over, factor
        ctx.mark_non_differentiable(chosen, bits, indices, added)
        return probs, chosen, bits, indices, added

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        scores, chosen, like = ctx.saved_tensors
        topk, score_function, over, factor = ctx.how
        dlogits = _router_bwd(
            grad.contiguous(), scores, chosen, topk, score_function, over, factor, like
        )
        return dlogits, None, None, None, None, None, None, None
