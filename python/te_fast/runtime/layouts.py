"""The column layout of quantised values, made of the row layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_fast.errors import QuantizedTensorError
from te_fast.runtime import native


def columnwise_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a column layout: the last dimension comes first."""
    return (*shape[-1:], *shape[:-1])


def make_columnwise(value: native.QuantizedValue, owner: str) -> None:
    """Make the column layout from the row layout, in the memory that is there.

    Raises
    ------
    QuantizedTensorError
        If there is no row layout, or scales of 1x128 blocks, which column blocks have not.
    """
    row, scale = value.row, value.row_scale
    if row is None or scale is None:
        message = f"{owner}: the column layout is made from the row layout, which is gone"
        raise QuantizedTensorError(message)
    if value.block == 1:
        message = (
            f"{owner}: the column layout has 1x128 blocks of its own, which follow from the original values "
            "alone; quantise with rowwise and columnwise usage"
        )
        raise QuantizedTensorError(message)
    shape = columnwise_shape(row.shape)
    col = value.col
    if col is None or tuple(col.shape) != shape or col.device != row.device:
        col = torch.empty(shape, dtype=torch.uint8, device=row.device)
    cols = row.shape[-1] if row.dim() else 1
    flat = row.detach().contiguous().view(torch.uint8).reshape(row.numel() // max(cols, 1), cols)
    col.detach().view(torch.uint8).view(flat.t().shape).copy_(flat.t())
    if value.block == 2:
        value.col_scale = _transposed_scales(scale, flat.shape, value.col_scale)
    value.col = col


def _transposed_scales(
    scale: torch.Tensor, shape: Sequence[int], former: torch.Tensor | None
) -> torch.Tensor:
    """Scales of 128x128 blocks, transposed; rows are padded to four with zeros."""
    rows, cols = (-(-size // 128) for size in shape)
    padded = (cols, -(-rows // 4) * 4)
    fits = former is not None and tuple(former.shape) == padded and former.device == scale.device
    out = former.detach() if fits and former is not None else scale.new_zeros(padded)
    out[:, :rows].copy_(scale.detach()[:, :cols].t())
    return former if fits and former is not None else out
