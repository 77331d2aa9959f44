"""The order of a gated activation's weights: halves, or blocks of gates and linear units in turn."""

from __future__ import annotations

import torch

from te_fast.errors import ArgumentError, ShapeError

__all__ = ["deinterleave_glu_tensor", "interleave_glu_tensor"]


def _pairs(tensor: torch.Tensor, interleave_size: int, of: str) -> int:
    """Return the number of pairs of blocks: one of gates and one of linear units."""
    if not isinstance(interleave_size, int) or interleave_size < 1:
        message = f"{of}: interleave_size must be a positive integer, got {interleave_size!r}"
        raise ArgumentError(message)
    if tensor.dim() == 0 or tensor.shape[0] % (2 * interleave_size):
        message = (
            f"{of}: expected a first dimension that is a multiple of 2 * interleave_size = {2 * interleave_size}, got "
            f"{tuple(tensor.shape)}"
        )
        raise ShapeError(message)
    return tensor.shape[0] // (2 * interleave_size)


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Bring the weight or bias of a gated activation from halves into blocks.

    Parameters
    ----------
    tensor : torch.Tensor
        All gates, then all linear units, along the first dimension; a multiple of ``2 * interleave_size``.
    interleave_size : int
        Rows of a block: the ``glu_interleave_size`` of the activation behind it.

    Returns
    -------
    torch.Tensor
        A copy of the same shape: a block of gates, its block of linear units, the next block of gates.

    Raises
    ------
    ArgumentError
        If `interleave_size` is no positive integer.
    ShapeError
        If the first dimension is no multiple of ``2 * interleave_size``.

    See Also
    --------
    deinterleave_glu_tensor : The way back.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> te.interleave_glu_tensor(torch.arange(8), 2)
    tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    pairs = _pairs(tensor, interleave_size, "interleave_glu_tensor")
    blocks = tensor.unflatten(0, (2, pairs, interleave_size))
    return blocks.transpose(0, 1).clone(memory_format=torch.contiguous_format).view(tensor.shape)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Bring the weight or bias of a gated activation from blocks into halves.

    Parameters
    ----------
    tensor : torch.Tensor
        Blocks of gates and of linear units in turn, along the first dimension.
    interleave_size : int
        Rows of a block.

    Returns
    -------
    torch.Tensor
        A copy of the same shape: all gates, then all linear units.

    Raises
    ------
    ArgumentError
        If `interleave_size` is no positive integer.
    ShapeError
        If the first dimension is no multiple of ``2 * interleave_size``.

    See Also
    --------
    interleave_glu_tensor : The way back.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> te.deinterleave_glu_tensor(torch.tensor([0, 1, 4, 5, 2, 3, 6, 7]), 2)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    pairs = _pairs(tensor, interleave_size, "deinterleave_glu_tensor")
    blocks = tensor.unflatten(0, (pairs, 2, interleave_size))
    return blocks.transpose(0, 1).clone(memory_format=torch.contiguous_format).view(tensor.shape)
