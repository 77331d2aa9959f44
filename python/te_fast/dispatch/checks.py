"""Checks of arguments that native code would refuse without their names."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import DtypeError, ShapeError


def expect(op: str, kind: type, **values: Any) -> None:
    """Refuse arguments that are not of a class.

    Raises
    ------
    DtypeError
        With the argument's name.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            message = f"{op}: {name} must be a {kind.__name__}, got {type(value).__name__}"
            raise DtypeError(message)


def rows_and_cols(op: str, x: torch.Tensor) -> tuple[int, int]:
    """Return the sizes of a matrix.

    Raises
    ------
    DtypeError
        If `x` is no tensor.
    ShapeError
        If it has another number of dimensions.
    """
    expect(op, torch.Tensor, x=x)
    if x.dim() != 2:
        message = f"{op}: x must have 2 dimensions (rows, cols), got {x.dim()}; reshape it"
        raise ShapeError(message)
    rows, cols = x.shape
    return rows, cols
