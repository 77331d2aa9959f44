"""Quantile balancing of a router: histograms of the biases that experts lack, and the bounds of their bins.

An expert is just not chosen with a bias of the cutoff of a token less its own score. From the histogram of these values
over many tokens a caller reads the bias with which each expert gets its share.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from te_fast.errors import ArgumentError, DeviceError, DtypeError, HistogramError, StateError
from te_fast.runtime.compiling import is_watched
from te_fast.runtime.library import register

#: Attribute of bounds: their version when they were last found valid.
_CHECKED = "_te_fast_checked_version"


class QBHistogramMode(IntEnum):
    """How Transformer Engine makes the histogram of quantile balancing. In te_fast both modes are the same kernel.

    See Also
    --------
    fused_topk_with_score_function : Takes the name of a mode in lower case.

    Examples
    --------
    >>> from te_fast.pytorch.router import QBHistogramMode
    >>> [one.name for one in QBHistogramMode]
    ['TWO_KERNEL', 'FUSED_ATOMIC']
    """

    #: A launch of its own behind the router's.
    TWO_KERNEL = 0
    #: In the router's launch.
    FUSED_ATOMIC = 1


_MODES = tuple(member.name.lower() for member in QBHistogramMode)


class Balance(NamedTuple):
    """What a router adds to.

    Attributes
    ----------
    histogram : torch.Tensor
        int32 ``(experts, bins)``, contiguous.
    bounds : torch.Tensor
        float32 ``(2,)``: the lower and the upper bound of the bins.
    """

    histogram: torch.Tensor
    bounds: torch.Tensor


def check_request(
    arguments: tuple[Any, Any, Any],
    score_function: str,
    expert_bias: Any,
    groups: tuple[Any, Any],
) -> None:
    """Check that quantile balancing was asked for by all of its arguments, of a router that has it.

    Raises
    ------
    ArgumentError
        If an argument is missing or does not go with the others.
    """
    mode = arguments[2]
    message = None
    if any([value is None for value in arguments]):
        message = "qb_histogram, qb_bin_bounds and qb_histogram_mode must be provided together; give all three or none"
    elif score_function != "sigmoid":
        message = f"quantile balancing takes score_function='sigmoid', got {score_function!r}"
    elif expert_bias is None:
        message = "quantile balancing needs expert_bias, the bias that it balances by; got None"
    elif groups[0] is not None or groups[1] is not None:
        message = (
            "quantile balancing does not choose groups; leave num_groups and group_topk out, got "
            f"{groups[0]} and {groups[1]}"
        )
    elif not isinstance(mode, str) or mode not in _MODES:
        message = f"qb_histogram_mode must be 'two_kernel' or 'fused_atomic', got {mode!r}"
    if message is not None:
        raise ArgumentError("router: " + message)


def _check_tensor(name: str, value: Any, logits: torch.Tensor, dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor):
        message = f"router: {name} must be a torch.Tensor, got {type(value).__name__}"
        raise DtypeError(message)
    if value.device != logits.device:
        message = (
            f"router: {name} must be on {logits.device}, where the logits are, got {value.device}"
        )
        raise DeviceError(message)
    if value.dtype is not dtype:
        message = f"router: {name} must be {dtype}, got {value.dtype}"
        raise HistogramError(message)


def balance_of(histogram: Any, bounds: Any, logits: torch.Tensor, topk: int) -> Balance:
    """Check the tensors of quantile balancing, and return them.

    Raises
    ------
    ArgumentError, DtypeError, DeviceError, HistogramError
        If a tensor or `topk` does not fit.
    StateError
        If a graph is captured, and no eager call has read the bounds before.
    """
    experts = logits.shape[-1]
    _check_tensor("qb_histogram", histogram, logits, torch.int32)
    _check_tensor("qb_bin_bounds", bounds, logits, torch.float32)
    message = None
    if topk >= experts:
        message = (
            f"topk must be below the {experts} experts, since quantile balancing needs the score of one more; "
            f"got {topk}"
        )
    elif histogram.dim() != 2 or histogram.shape[0] != experts or histogram.shape[1] < 1:
        message = f"qb_histogram must be ({experts} experts, bins), got {list(histogram.shape)}"
    elif not histogram.is_contiguous():
        message = (
            "qb_histogram is written in place and must be contiguous, got strides "
            f"{list(histogram.stride())}"
        )
    elif bounds.dim() != 1 or bounds.shape[0] != 2:
        message = (
            f"qb_bin_bounds must be [lower, upper], got a tensor of shape {list(bounds.shape)}"
        )
    elif not bounds.is_contiguous():
        message = f"qb_bin_bounds must be contiguous, got strides {list(bounds.stride())}"
    if message is not None:
        raise HistogramError("router: " + message)
    if not is_watched(logits):
        check_bounds(bounds)
    return Balance(histogram, bounds)


def check_bounds(bounds: torch.Tensor) -> None:
    """Read the bounds of bins, which synchronises, unless they were read since they last changed.

    Raises
    ------
    ArgumentError
        If they are not finite, or not in order.
    StateError
        If they cannot be read because a graph is captured.
    """
    version = None if bounds.is_inference() else bounds._version
    if version is not None and getattr(bounds, _CHECKED, None) == version:
        return
    if bounds.is_cuda:
        with torch.cuda.device(bounds.device):
            is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing:
            message = (
                "router: qb_bin_bounds were not read before this capture; call the router once with them before the "
                "capture, and do not make them in torch.inference_mode, where changes leave no trace"
            )
            raise StateError(message)
    lower, upper = bounds.detach().tolist()
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        message = f"router: qb_bin_bounds must be finite with lower < upper, got [{lower}, {upper}]"
        raise ArgumentError(message)
    if version is not None:
        setattr(bounds, _CHECKED, version)


def _checked_run(bounds: torch.Tensor) -> torch.Tensor:
    check_bounds(bounds)
    return bounds.clone()


def _checked_fake(bounds: torch.Tensor) -> torch.Tensor:
    return bounds.new_empty(bounds.shape)


_checked = register("moe_checked_bounds(Tensor bounds) -> Tensor", _checked_run, _checked_fake)


def count_lacks(balance: Balance, scores: torch.Tensor, cutoff: torch.Tensor) -> None:
    """Add the biases that experts lack to the histogram, by torch operations.

    Parameters
    ----------
    balance : Balance
        The histogram and its bounds.
    scores : torch.Tensor
        float32 ``(..., experts)``, without the bias.
    cutoff : torch.Tensor
        float32 ``(..., 1)``, the largest score with its bias of those that were not chosen.
    """
    histogram, bounds = balance
    experts, bins = histogram.shape
    if is_watched(scores):
        bounds = _checked(bounds)
    lower, upper = bounds.detach().unbind()
    scale = torch.full_like(lower, bins) / (upper - lower)
    lacks = ((cutoff - scores.detach() - lower) * scale).floor()
    # Beyond these values integers cannot follow; the first bin takes NaN, as the kernel's conversion does.
    places = lacks.nan_to_num(nan=0.0).clamp(-1.0, 2.0**31).long().clamp(0, bins - 1)
    first = torch.arange(experts, device=places.device) * bins
    flat = (places + first).flatten()
    histogram.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
