"""Checks of numbers that a layer or a function is given."""

from __future__ import annotations

import math
import operator
from typing import Any

from te_fast.errors import DtypeError, ShapeError


def check_sizes(layer: str, **sizes: Any) -> None:
    """Raise unless sizes are integers of 0 or more; a bool is none.

    Raises
    ------
    DtypeError, ShapeError
        With the name of the first wrong size.
    """
    for name, size in sizes.items():
        try:
            is_negative = operator.index(size) < 0
        except TypeError:
            is_negative = None
        if is_negative is None or isinstance(size, bool):
            message = f"{layer}: {name} must be an integer, got {type(size).__name__} {size!r}"
            raise DtypeError(message)
        if is_negative:
            message = f"{layer}: {name} must not be negative, got {size}"
            raise ShapeError(message)


def check_positive_sizes(layer: str, **sizes: Any) -> None:
    """Raise unless sizes are integers of 1 or more.

    Raises
    ------
    DtypeError, ShapeError
        With the name of the first wrong size.
    """
    check_sizes(layer, **sizes)
    for name, size in sizes.items():
        if size == 0:
            message = f"{layer}: {name} must be 1 or more, got 0"
            raise ShapeError(message)


def check_number(layer: str, name: str, value: Any) -> None:
    """Raise unless a value is a real number; numpy's numbers and a tensor of one element are.

    Raises
    ------
    DtypeError
        With the name of the value.
    """
    try:
        math.fabs(value)
    except (TypeError, ValueError, RuntimeError):
        message = f"{layer}: {name} must be a number, got {type(value).__name__} {value!r}"
        raise DtypeError(message) from None
