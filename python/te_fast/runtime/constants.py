"""Checks of the constants that constructors of layers and operations take."""

from __future__ import annotations

from typing import Any

from te_fast.errors import DtypeError


def check_numbers(owner: str, **numbers: Any) -> None:
    """Raise unless arguments are numbers; tensors of one number are.

    Raises
    ------
    DtypeError
        With the name of the first wrong argument.
    """
    for name, number in numbers.items():
        try:
            is_number = not isinstance(number, str | bytes) and float(number) is not None
        except (TypeError, ValueError, RuntimeError):
            is_number = False
        if not is_number:
            message = f"{owner}: {name} must be a number, got {type(number).__name__} {number!r}"
            raise DtypeError(message)


def check_flags(owner: str, **flags: Any) -> None:
    """Raise unless arguments are true or false; None, 0 and 1 count.

    Raises
    ------
    DtypeError
        With the name of the first wrong argument.
    """
    for name, flag in flags.items():
        if flag not in (True, False, None):
            message = f"{owner}: {name} must be True or False, got {type(flag).__name__} {flag!r}"
            raise DtypeError(message)


def check_functions(owner: str, **functions: Any) -> None:
    """Raise unless arguments are functions, or None.

    Raises
    ------
    DtypeError
        With the name of the first wrong argument.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            got = f"{type(function).__name__} {function!r}"
            message = f"{owner}: {name} must be a function, got {got}"
            raise DtypeError(message)
