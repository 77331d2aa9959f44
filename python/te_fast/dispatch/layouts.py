"""The layouts of a quantised result."""

from __future__ import annotations

import torch

_TRANSPOSED_ALIGN = 16


def quantized_layouts(
    x: torch.Tensor, cols: int, dtype: torch.dtype, *, rowwise: bool, columnwise: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Allocate ``(rows, cols)`` of an FP8 type beside `x`, the same transposed, and an inverse scale.

    Rows are padded to a multiple of 16 in the transposed layout.
    """
    rows = x.shape[0]
    padded = -(-rows // _TRANSPOSED_ALIGN) * _TRANSPOSED_ALIGN
    return (
        x.new_empty(rows, cols, dtype=dtype) if rowwise else None,
        x.new_empty(cols, padded, dtype=dtype) if columnwise else None,
        x.new_empty(1, dtype=torch.float32),
    )
