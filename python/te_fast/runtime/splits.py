"""Counts of experts' rows on a GPU, which the host reads only with ``TE_FAST_DEBUG=1``."""

from __future__ import annotations

import torch

from te_fast import _config
from te_fast.errors import ShapeError


def check_in_debug(name: str, counts: torch.Tensor, x: torch.Tensor) -> None:
    """With ``TE_FAST_DEBUG=1``, refuse counts that are negative or exceed the rows of `x` in sum.

    The check synchronises. Under capture a graph cannot raise an exception: a replay with such counts fails by a device
    assertion.

    Raises
    ------
    ShapeError
        If the counts do not fit the rows.
    """
    if not _config.DEBUG:
        return
    rows = x.shape[:-1].numel()
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        fits = (counts.min() >= 0) & (counts.sum() <= rows)
        torch._assert_async(fits, f"{name}: the experts' counts of rows do not fit {rows} rows")
        return
    listed = counts.tolist()
    if min(listed) >= 0 and sum(listed) <= rows:
        return
    message = (
        f"{name}: the counts of the experts' rows must not be negative nor exceed the {rows} rows of the input in sum, "
        f"got {listed}; without TE_FAST_DEBUG what exceeds them is cut off"
    )
    raise ShapeError(message)
