"""Division of whole numbers."""

from __future__ import annotations

from te_fast.errors import ArgumentError


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise unless a number is a multiple of another.

    Parameters
    ----------
    numerator, denominator : int
        The number, and what divides it.

    Raises
    ------
    ArgumentError
        If it is not a multiple.

    See Also
    --------
    divide : Returns the quotient, too.

    Examples
    --------
    >>> from te_fast.pytorch.utils import ensure_divisibility
    >>> ensure_divisibility(12, 4)
    """
    if numerator % denominator != 0:
        message = f"ensure_divisibility: {numerator} is not divisible by {denominator}"
        raise ArgumentError(message)


def divide(numerator: int, denominator: int) -> int:
    """Divide without a remainder.

    Parameters
    ----------
    numerator, denominator : int
        The number, and what divides it.

    Raises
    ------
    ArgumentError
        If there is a remainder.

    See Also
    --------
    ceil_div : Rounds up instead.

    Examples
    --------
    >>> from te_fast.pytorch.utils import divide
    >>> divide(12, 4)
    3
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up.

    Parameters
    ----------
    numerator, denominator : int
        The number, and what divides it.

    Raises
    ------
    ArgumentError
        If the denominator is 0.

    See Also
    --------
    round_up_to_nearest_multiple : The quotient times the denominator.

    Examples
    --------
    >>> from te_fast.pytorch.utils import ceil_div
    >>> ceil_div(13, 4)
    4
    """
    if denominator == 0:
        message = "ceil_div: denominator must not be 0"
        raise ArgumentError(message)
    return (numerator + denominator - 1) // denominator


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """Return the least multiple that is not below a number.

    Parameters
    ----------
    value : int
        The number.
    multiple : int
        What the result is a multiple of.

    Raises
    ------
    ArgumentError
        If `multiple` is 0.

    See Also
    --------
    ceil_div : The quotient alone.

    Examples
    --------
    >>> from te_fast.pytorch.utils import round_up_to_nearest_multiple
    >>> round_up_to_nearest_multiple(13, 4)
    16
    """
    if multiple == 0:
        message = "round_up_to_nearest_multiple: multiple must not be 0"
        raise ArgumentError(message)
    return (value + multiple - 1) // multiple * multiple
