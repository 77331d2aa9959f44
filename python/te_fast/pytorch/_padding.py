"""Rows of zeros behind those of a call, for GEMMs that do not take every number of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

__all__ = ["Padding"]


class Padding(NamedTuple):
    """Leading dimensions of a call's tensors, their product, and the rows that are appended."""

    leading: torch.Size
    rows: int
    missing: int

    @classmethod
    def behind(cls, x: torch.Tensor, missing: int) -> Padding:
        """Return the padding of `missing` rows for ``(..., features)`` and what has its leading dimensions."""
        return cls(x.shape[:-1], x.shape[:-1].numel(), missing)

    def pad(self, tensor: Any) -> Any:
        """Append the rows to ``(*leading, ...)``, which becomes ``(rows + missing, ...)``.

        None stays None, and the call itself says what is wrong with a tensor of other dimensions.
        """
        count = len(self.leading)
        if tensor is None or tensor.shape[:count] != self.leading:
            return tensor
        flat = tensor.reshape(self.rows, *tensor.shape[count:])
        return functional.pad(flat, (0, 0) * (flat.dim() - 1) + (0, self.missing))

    def cut(self, tensor: Any) -> Any:
        """Take the rows away again."""
        if tensor is None:
            return None
        return tensor[: self.rows].view(*self.leading, *tensor.shape[1:])
