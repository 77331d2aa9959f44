"""The update of scales under delayed scaling by torch operations, in the order that Transformer Engine documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast.recipe import DelayedScaling

_F32_MAX = torch.finfo(torch.float32).max


def update_history(amax_history: torch.Tensor) -> torch.Tensor:
    """Move histories by a row, in place, and begin the next row with zeros.

    Parameters
    ----------
    amax_history : torch.Tensor
        FP32 ``(amax_history_len, tensors)``.

    Returns
    -------
    torch.Tensor
        `amax_history`.
    """
    if amax_history.shape[0] > 1:
        amax_history.copy_(torch.roll(amax_history, -1, 0))
    amax_history[0].zero_()
    return amax_history


def largest_of(
    amax_history: torch.Tensor, algorithm: str | Callable[[torch.Tensor], Any]
) -> torch.Tensor:
    """Return the maxima that scales follow from, before the history moves.

    Parameters
    ----------
    amax_history : torch.Tensor
        FP32 ``(amax_history_len, tensors)``.
    algorithm : str or callable
        ``max``, ``most_recent`` or a function of the history.

    Returns
    -------
    torch.Tensor
        ``(tensors,)``.
    """
    if not isinstance(algorithm, str):
        result: torch.Tensor = algorithm(amax_history)
        return result
    return amax_history.amax(dim=0) if algorithm == "max" else amax_history[0].clone()


def amax_and_updated_history(
    amax_history: torch.Tensor, amax_compute_algo: str | Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the history, moved in place, and the maxima before; see :func:`largest_of`."""
    amax = largest_of(amax_history, amax_compute_algo)
    return update_history(amax_history), amax


def default_scale(
    amax: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: float,
    margin: int,
    _fp32_max: float = _F32_MAX,
) -> torch.Tensor:
    """Write ``fp8_max / (amax * 2**margin)`` to scales, in place.

    Parameters
    ----------
    amax : torch.Tensor
        FP32 ``(tensors,)``. A scale stays as it is where the maximum is 0, infinite or NaN.
    scale : torch.Tensor
        FP32 ``(tensors,)``. A scale that would be infinite becomes the largest FP32 number.
    fp8_max : float
        The largest number of the FP8 type.
    margin : int
        Powers of two that the scale is made smaller by.

    Returns
    -------
    torch.Tensor
        `scale`.
    """
    fresh = (fp8_max / amax) / (2**margin)
    fresh = torch.where((amax > 0.0) & torch.isfinite(amax), fresh, scale)
    return scale.copy_(torch.where(torch.isinf(fresh), torch.full_like(fresh, _fp32_max), fresh))


def scaling_factor(
    amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> torch.Tensor:
    """Return new scales by the recipe's algorithm, or write them by :func:`default_scale`."""
    algorithm = recipe.scaling_factor_compute_algo
    if algorithm is None:
        return default_scale(amax, scale, fp8_max, recipe.margin)
    result: torch.Tensor = algorithm(amax, scale, fp8_max, recipe)
    return result


def update(
    amax_history: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> None:
    """Update histories and scales in place.

    Parameters
    ----------
    amax_history : torch.Tensor
        FP32 ``(amax_history_len, tensors)``.
    scale : torch.Tensor
        FP32 ``(tensors,)``.
    fp8_max : float
        The largest number of the FP8 type.
    recipe : DelayedScaling
        Has algorithms and margin.
    """
    _, amax = amax_and_updated_history(amax_history, recipe.amax_compute_algo)
    scale.copy_(scaling_factor(amax, scale, fp8_max, recipe))
