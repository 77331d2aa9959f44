"""Memory layouts of optimizers' tensors: torch's fused kernels read all tensors of one parameter as flat memory."""

from __future__ import annotations

import torch


def has_gaps(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory is not exactly that of its elements."""
    return not tensor.is_contiguous() and torch.empty_like(tensor).stride() != tensor.stride()


def without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself, or a copy if its memory has gaps."""
    return tensor.clone() if has_gaps(tensor) else tensor


def laid_out_as(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself if its shape and strides are another one's, and else a view or a copy with these.

    Parameters
    ----------
    tensor : torch.Tensor
        The tensor.
    model : torch.Tensor
        The other one, without gaps, of as many elements.
    """
    if tensor.shape != model.shape:
        tensor = tensor.reshape(model.shape)
    if tensor.stride() == model.stride():
        return tensor
    return torch.empty_like(model).copy_(tensor)
