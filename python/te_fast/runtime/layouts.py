"""Makes the column layout of quantised values from the row layout."""

from __future__ import annotations

from collections.abc import Sequence

from te_fast.errors import QuantizedTensorError
from te_fast.runtime import native

#: Length of a block of scales.
BLOCK = 128


def columnwise_shape(shape: Sequence[int], *, stack: bool = False) -> tuple[int, ...]:
    """Return the shape of a column layout: the last dimension comes first, for a `stack` in each value."""
    if stack:
        return (shape[0], *columnwise_shape(shape[1:]))
    return (*shape[-1:], *shape[:-1])


def make_columnwise(value: native.QuantizedValue, owner: str) -> None:
    """Make the column layout from the row layout, in existing memory.

    Raises
    ------
    QuantizedTensorError
        If there is no row layout, or the scales are of 1x128 blocks, which differ from those of column blocks.
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
    value.transpose()
