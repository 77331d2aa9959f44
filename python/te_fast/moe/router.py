"""Routers of mixtures of experts: scores, the experts of each token, and the loss that balances them.

Scores and choice are one launch. The loss is made of torch operations, which also replace the kernels for tensors that
these do not take. All functions compute in FP32, are deterministic, do not synchronise and have static shapes, so that
graphs can capture them. Only the bounds of quantile balancing are read, once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch.nn import functional

from te_fast.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from te_fast.moe import balancing
from te_fast.moe import choice as kernels
from te_fast.runtime.arguments import check_numbers, check_positive_sizes, check_sizes
from te_fast.runtime.second_order import differentiable_once

_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Types of the numbers of experts' tokens that a loss takes.
_COUNTS = (torch.int32, torch.int64, torch.float32, torch.bfloat16)
#: Added to sums of scores, so that they are not zero.
_EPS = 1e-20


class RoutingMapFormat(IntEnum):
    """The format of a routing map: a byte or a bit per expert.

    See Also
    --------
    fused_topk_with_score_function : Returns a map of either format.

    Examples
    --------
    >>> from te_fast.pytorch.router import RoutingMapFormat
    >>> [one.name for one in RoutingMapFormat]
    ['BYTEMAP', 'BITMAP_U8']
    """

    #: ``bool (..., experts)``.
    BYTEMAP = 0
    #: ``uint8 (..., ceil(experts / 8))``; expert ``e`` is bit ``e % 8`` of byte ``e // 8``.
    BITMAP_U8 = 1


_FORMATS = {member.name.lower(): member for member in RoutingMapFormat}


def _format_of(routing_map_format: Any) -> RoutingMapFormat:
    if isinstance(routing_map_format, str):
        if routing_map_format in _FORMATS:
            return _FORMATS[routing_map_format]
    elif isinstance(routing_map_format, int) and routing_map_format in (0, 1):
        return RoutingMapFormat(routing_map_format)
    elif not isinstance(routing_map_format, int):
        got = type(routing_map_format).__name__
        message = (
            f"router: routing_map_format must be a RoutingMapFormat, its name or number, got {got}"
        )
        raise DtypeError(message)
    message = (
        f"router: routing_map_format must be 'bytemap' or 'bitmap_u8', got {routing_map_format!r}"
    )
    raise ArgumentError(message)


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        message = f"router: {name} must be a torch.Tensor, got {type(value).__name__}"
        raise DtypeError(message)


def _check(logits: torch.Tensor) -> None:
    _check_tensor("logits", logits)
    if logits.dtype not in _FLOATS:
        message = f"router: logits must be float32, float16 or bfloat16, got {logits.dtype}"
        raise ArgumentError(message)
    if logits.dim() == 0:
        message = "router: logits must be (..., experts), got a scalar"
        raise ShapeError(message)


def _check_choice(experts: int, topk: int, score_function: str) -> None:
    if score_function not in _SCORES:
        known = ", ".join(map(repr, _SCORES))
        message = f"router: score_function must be one of {known}, got {score_function!r}"
        raise ArgumentError(message)
    if type(topk) is not int:
        check_sizes("router", topk=topk)
    if not 1 <= topk <= experts:
        message = f"router: topk must be 1 to the {experts} experts, got {topk}"
        raise ShapeError(message)


class _SqrtSoftplus(torch.autograd.Function):
    """``sqrt(softplus(x))``, whose gradient is finite where it underflows to zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = functional.softplus(x).sqrt()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    @differentiable_once("router")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return grad * torch.sigmoid(x) / (2 * y + _EPS)


def _scores(x: torch.Tensor, score_function: str) -> torch.Tensor:
    if score_function == "softmax":
        return torch.softmax(x, -1)
    if score_function == "sigmoid":
        return torch.sigmoid(x)
    scores: torch.Tensor = _SqrtSoftplus.apply(x)
    return scores


def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest values, and the first ones among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _check_groups(experts: int, topk: int, num_groups: int, group_topk: int) -> None:
    if type(num_groups) is not int or type(group_topk) is not int:
        check_sizes("router", num_groups=num_groups, group_topk=group_topk)
    fits = experts % num_groups == 0 and 1 <= group_topk <= num_groups and topk % group_topk == 0
    if not fits or topk > group_topk * (experts // num_groups):
        message = (
            f"router: num_groups must divide the {experts} experts, and group_topk, at most num_groups, must divide "
            f"topk = {topk} and leave as many experts; got num_groups={num_groups}, group_topk={group_topk}"
        )
        raise ShapeError(message)


def _in_best_groups(
    scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
) -> torch.Tensor:
    """Return the scores, with minus infinity for experts outside of the best groups."""
    experts = scores.shape[-1]
    grouped = scores.unflatten(-1, (num_groups, experts // num_groups))
    best = grouped.sort(dim=-1, descending=True).values[..., : topk // group_topk].sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _top(best, group_topk), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


def _map_of(indices: torch.Tensor, experts: int, form: RoutingMapFormat) -> torch.Tensor:
    shape = (*indices.shape[:-1], experts)
    chosen = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(-1, indices, True)
    if form is RoutingMapFormat.BYTEMAP:
        return chosen
    bits = functional.pad(chosen, (0, -experts % 8)).unflatten(-1, (-1, 8))
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bits.device)
    return (bits.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def _check_bias(experts: int, expert_bias: Any) -> None:
    _check_tensor("expert_bias", expert_bias)
    if expert_bias.shape != (experts,):
        message = (
            f"router: expert_bias must be one value for each of the {experts} experts, got a tensor of shape "
            f"{list(expert_bias.shape)}"
        )
        raise ShapeError(message)
    if expert_bias.dtype is not torch.float32:
        message = (
            f"router: expert_bias must be float32, got {expert_bias.dtype}; cast it by .float()"
        )
        raise DtypeError(message)


def _check_indices(logits: torch.Tensor, topk: int, indices: Any, form: RoutingMapFormat) -> None:
    _check_tensor("topk_indices", indices)
    if indices.dtype not in kernels.INDEX_TYPES:
        message = f"router: topk_indices must be int16, int32 or int64, got {indices.dtype}"
        raise DtypeError(message)
    if indices.shape != (*logits.shape[:-1], topk):
        message = f"router: topk_indices must be of shape {[*logits.shape[:-1], topk]}, got {list(indices.shape)}"
        raise ShapeError(message)
    if form is not RoutingMapFormat.BYTEMAP:
        message = (
            "router: topk_indices take the place of the map; leave routing_map_format at its default, got "
            f"{form.name.lower()!r}"
        )
        raise ArgumentError(message)


def choice_of(
    experts: int,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> kernels.Choice:
    """Check the arguments of :func:`fused_topk_with_score_function`, and return how experts are chosen.

    Raises
    ------
    ArgumentError, ShapeError, DtypeError
        If an argument does not fit.
    """
    _check_choice(experts, topk, score_function)
    if expert_bias is not None and score_function == "softmax":
        message = "router: expert_bias goes with sigmoid and sqrtsoftplus scores; leave it out with softmax"
        raise ArgumentError(message)
    if expert_bias is not None:
        _check_bias(experts, expert_bias)
    groups = 0, 0
    if num_groups is not None or group_topk is not None:
        groups = num_groups or 1, group_topk or 1
        _check_groups(experts, topk, *groups)
    over = "before" if score_function == "softmax" and use_pre_softmax else "chosen"
    factor = 1.0 if scaling_factor is None else scaling_factor
    if type(factor) is not float:
        check_numbers("router", scaling_factor=factor)
    return kernels.Choice(topk, *groups, score_function, over, float(factor))


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: str | RoutingMapFormat | int = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token, and the probabilities of their results.

    Parameters
    ----------
    logits : torch.Tensor
        float32, float16 or bfloat16 ``(..., experts)``; all arithmetic is in FP32.
    topk : int
        Experts of a token.
    use_pre_softmax : bool
        True: take the softmax over all experts before the choice, and do not normalise afterwards. False: take it over
        the chosen experts.
    num_groups, group_topk : int, optional
        Divide the experts into `num_groups` groups, and choose only from the `group_topk` best groups: those with the
        largest sums of their ``topk / group_topk`` best scores.
    scaling_factor : float, optional
        Multiplies the probabilities.
    score_function : {'softmax', 'sigmoid', 'sqrtsoftplus'}
        Scores of logits. Scores of the last two functions are divided by their sum over the chosen experts if `topk` is
        above 1.
    expert_bias : torch.Tensor, optional
        float32 ``(experts,)``, added to sigmoid or sqrtsoftplus scores only for the choice.
    routing_map_format : {'bytemap', 'bitmap_u8'} or RoutingMapFormat
        Format of the map.
    topk_indices : torch.Tensor, optional
        int16, int32 or int64 ``(..., topk)`` that receives the experts of each token, and is returned in place of the
        map, whose format then stays at its default.
    qb_histogram : torch.Tensor, optional
        Quantile balancing of sigmoid scores with `expert_bias`, without groups, and with `topk` below the number of
        experts: contiguous int32 ``(experts, bins)``, to which the call adds one per token and expert, in place. The
        value that it counts is the bias that the expert lacks, ``cutoff - score``. `cutoff` is the largest score with
        its bias among the experts of the token that were not chosen. A forward that checkpoints repeat counts again.
    qb_bin_bounds : torch.Tensor, optional
        Contiguous float32 ``(2,)``, the finite lower and upper bound of the bins, which have equal widths. Values
        outside of them count in the first and in the last bin, NaN in the first. The call reads the bounds once, which
        synchronises, and again whenever they have changed; so call once before a capture into a CUDA graph.
    qb_histogram_mode : {'two_kernel', 'fused_atomic'}, optional
        Goes with the two tensors. Both modes count in the router's own launch, by the same kernel, with equal results.

    Returns
    -------
    torch.Tensor
        Probabilities ``(..., experts)``, zero for experts that were not chosen, in the type of the logits.
    torch.Tensor
        The routing map, or `topk_indices`.

    Raises
    ------
    ArgumentError, ShapeError, DtypeError
        If an argument does not fit.
    HistogramError, DeviceError
        If a tensor of quantile balancing, or `topk` with it, does not fit.
    StateError
        If a graph is captured with bounds that no call has read before.

    See Also
    --------
    te_fast.pytorch.MoE : A whole mixture of experts.
    te_fast.pytorch.moe_permute_with_probs : Takes map and probabilities.

    Notes
    -----
    Among experts with equal scores, the first ones are chosen. NaN counts as the largest score.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.router import fused_topk_with_score_function
    >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
    >>> probs, chosen = fused_topk_with_score_function(
    ...     logits, 1, True, None, None, None, "softmax", None
    ... )
    >>> chosen.tolist(), round(probs.sum().item(), 4)
    ([[False, True, False]], 0.6652)
    """
    _check(logits)
    form = _format_of(routing_map_format)
    balances = (
        qb_histogram is not None or qb_bin_bounds is not None or qb_histogram_mode is not None
    )
    if balances:
        given = qb_histogram, qb_bin_bounds, qb_histogram_mode
        balancing.check_request(given, score_function, expert_bias, (num_groups, group_topk))
    choice = choice_of(
        logits.shape[-1],
        topk,
        use_pre_softmax,
        num_groups,
        group_topk,
        scaling_factor,
        score_function,
        expert_bias,
    )
    if topk_indices is not None:
        _check_indices(logits, topk, topk_indices, form)
    balance = None
    if balances:
        balance = balancing.balance_of(qb_histogram, qb_bin_bounds, logits, topk)
    if kernels.takes(logits):
        in_bits = form is RoutingMapFormat.BITMAP_U8
        probs, chosen = kernels.route(
            logits, expert_bias, choice, in_bits=in_bits, indices=topk_indices, balance=balance
        )
    else:
        probs, indices = _route_by_torch(logits, expert_bias, choice, balance)
        if topk_indices is None:
            chosen = _map_of(indices, logits.shape[-1], form)
        else:
            topk_indices.copy_(indices)
    return probs, chosen if topk_indices is None else topk_indices


def _route_by_torch(
    logits: torch.Tensor,
    expert_bias: torch.Tensor | None,
    how: kernels.Choice,
    balance: balancing.Balance | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities, and the experts of each token, best first."""
    topk, num_groups, group_topk, score_function, over, factor = how
    x = logits.float()
    is_softmax, use_pre_softmax = score_function == "softmax", over == "before"
    scores = x if is_softmax and not use_pre_softmax else _scores(x, score_function)
    biased = scores if expert_bias is None else scores + expert_bias.detach().float()
    choice = biased.detach()
    if num_groups:
        choice = _in_best_groups(choice, topk, num_groups, group_topk)
    indices = _top(choice, topk if balance is None else topk + 1)
    if balance is not None:
        balancing.count_lacks(balance, scores, choice.gather(-1, indices[..., topk:]))
        indices = indices[..., :topk]
    chosen = biased.gather(-1, indices)
    if expert_bias is not None:
        chosen = chosen - expert_bias.detach().float()[indices]
    if is_softmax and not use_pre_softmax:
        chosen = torch.softmax(chosen, -1)
    elif not is_softmax and topk > 1:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _EPS)
    chosen = chosen * factor
    return torch.zeros_like(x).scatter(-1, indices, chosen).to(logits.dtype), indices


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: str | RoutingMapFormat | int = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the map of the largest scores and the scores of all experts, from which the balancing loss is computed.

    Parameters
    ----------
    logits : torch.Tensor
        float32, float16 or bfloat16 ``(..., experts)``.
    topk : int
        Experts of a token.
    score_function : {'softmax', 'sigmoid', 'sqrtsoftplus'}
        Scores of logits. Scores of the last two functions are divided by their sum over all experts.
    routing_map_format : {'bytemap', 'bitmap_u8'} or RoutingMapFormat
        Format of the map.

    Returns
    -------
    torch.Tensor
        The routing map.
    torch.Tensor
        FP32 scores ``(..., experts)``, with gradients for all experts.

    Raises
    ------
    ArgumentError, ShapeError, DtypeError
        If an argument does not fit.

    See Also
    --------
    fused_moe_aux_loss : The loss of these scores.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.router import fused_compute_score_for_moe_aux_loss
    >>> chosen, scores = fused_compute_score_for_moe_aux_loss(torch.zeros(1, 4), 2, "sigmoid")
    >>> chosen.tolist(), scores.tolist()
    ([[True, True, False, False]], [[0.25, 0.25, 0.25, 0.25]])
    """
    _check(logits)
    _check_choice(logits.shape[-1], topk, score_function)
    form = _format_of(routing_map_format)
    if kernels.takes(logits):
        choice = kernels.Choice(topk, 0, 0, score_function, "all", 1.0)
        in_bits = form is RoutingMapFormat.BITMAP_U8
        scores, chosen = kernels.route(logits, None, choice, in_bits=in_bits)
        return chosen, scores
    x = logits.float()
    scores = _scores(x, score_function)
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + _EPS)
    return _map_of(_top(scores.detach(), topk), logits.shape[-1], form), scores


def _check_scores(probs: Any, tokens_per_expert: Any, num_experts: int) -> None:
    _check_tensor("probs", probs)
    _check_tensor("tokens_per_expert", tokens_per_expert)
    if probs.dtype not in _FLOATS:
        message = f"router: probs must be float32, float16 or bfloat16, got {probs.dtype}"
        raise DtypeError(message)
    if tokens_per_expert.dtype not in _COUNTS:
        message = (
            "router: tokens_per_expert must be int32, int64, float32 or bfloat16, got "
            f"{tokens_per_expert.dtype}"
        )
        raise DtypeError(message)
    if probs.dim() != 2 or tokens_per_expert.shape != probs.shape[1:]:
        message = (
            f"router: probs must be (tokens, experts) and tokens_per_expert (experts,), got {list(probs.shape)} and "
            f"{list(tokens_per_expert.shape)}"
        )
        raise ShapeError(message)
    if tokens_per_expert.device != probs.device:
        message = (
            f"router: tokens_per_expert must be on {probs.device}, where probs is, got "
            f"{tokens_per_expert.device}"
        )
        raise DeviceError(message)
    check_positive_sizes("router", num_experts=num_experts)
    if probs.shape[1] % num_experts:
        message = f"router: num_experts must divide the {probs.shape[1]} columns of probs, got {num_experts}"
        raise ShapeError(message)


def _check_numbers_of_loss(total: Any, topk: int, coeff: float) -> None:
    check_numbers("router", coeff=coeff)
    numbers = {"topk": topk}
    if isinstance(total, torch.Tensor):
        if total.numel() != 1:
            message = (
                "router: total_num_tokens must be an integer or a tensor of one element, got a tensor of shape "
                f"{list(total.shape)}"
            )
            raise ShapeError(message)
    elif not isinstance(total, torch.SymInt) and not torch.compiler.is_compiling():
        numbers["total_num_tokens"] = (
            total  # a number that a trace keeps open has no value to check
        )
    check_positive_sizes("router", **numbers)


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Return the loss that balances experts.

    It is ``coeff · num_experts / (topk · T²) · Σ_e (Σ_t probs[t, e]) · tokens_per_expert[e]`` of T tokens.

    Parameters
    ----------
    probs : torch.Tensor
        Scores ``(tokens, columns)`` in float32, float16 or bfloat16. The number of columns is a multiple of
        `num_experts`.
    tokens_per_expert : torch.Tensor
        Tokens that each column of `probs` has received, int32, int64, float32 or bfloat16 ``(columns,)``.
    total_num_tokens : int or torch.Tensor
        The number of tokens, an int or a tensor of one element, which is not read on the host.
    num_experts, topk : int
        Experts, and experts of a token.
    coeff : float
        Weight of the loss.

    Returns
    -------
    torch.Tensor
        A scalar in the type of `probs`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If an argument does not fit.

    See Also
    --------
    fused_compute_score_for_moe_aux_loss : Computes the scores.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.router import fused_moe_aux_loss
    >>> fused_moe_aux_loss(torch.full((4, 2), 0.5), torch.tensor([2, 2]), 4, 2, 1, 0.1).item()
    0.10000000149011612
    """
    _check_scores(probs, tokens_per_expert, num_experts)
    _check_numbers_of_loss(total_num_tokens, topk, coeff)
    factor, total = num_experts * coeff / topk, total_num_tokens
    sums = probs.float().sum(0)
    loss = (sums * tokens_per_expert.detach().float()).sum()
    if isinstance(total, torch.Tensor):
        loss = loss * (factor / total.float().square()).reshape(())
    else:
        wide: Any = torch.sym_float(total)  # float() would bind an export to the number
        loss = loss * (factor / wide**2)
    return loss.to(probs.dtype)
