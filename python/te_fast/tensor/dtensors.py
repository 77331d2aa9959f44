"""Parameters that ranks share as DTensors: the part of this rank, which optimizers step, and the way back."""

from __future__ import annotations

from typing import Any

import torch


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a ``DTensor``, and any other tensor as it is."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, "to_local"):
        return tensor
    return tensor.to_local()


def shared_as(grad: Any, parameter: Any) -> Any:
    """Return a gradient that ranks share in the same way as its parameter.

    Sequence parallelism leaves each rank a term of the gradient of a parameter that all ranks have whole. Its sum is
    what counts.

    Parameters
    ----------
    grad : torch.Tensor
        The gradient.
    parameter : torch.Tensor
        The parameter. If it is no ``DTensor``, the gradient is returned as it is.
    """
    placements = getattr(parameter, "placements", None)
    if placements is None or getattr(grad, "placements", placements) == placements:
        return grad
    return grad.redistribute(placements=placements)


def sharded_like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a rank's part as a ``DTensor`` if the parameter is one."""
    if local_part(parameter) is parameter:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.size(),
        stride=parameter.stride(),
    )
