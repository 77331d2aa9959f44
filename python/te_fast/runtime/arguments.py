"""Checks of arguments: sizes, numbers, flags, functions and tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch

from te_fast.errors import DtypeError, ShapeError, TeFastError


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


_TEXTS = (str, bytes)


def check_numbers(owner: str, **numbers: Any) -> None:
    """Raise unless arguments are numbers; tensors of one number are.

    Raises
    ------
    DtypeError
        With the name of the first wrong argument.
    """
    for name, number in numbers.items():
        try:
            # Dynamo of torch 2.8 knows no unions of types.
            is_number = not isinstance(number, _TEXTS) and float(number) is not None
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
        try:
            is_flag = flag in (True, False, None)
        except (RuntimeError, ValueError):  # several numbers are neither
            is_flag = False
        if not is_flag:
            message = f"{owner}: {name} must be True or False, got {type(flag).__name__} {flag!r}"
            raise DtypeError(message)


def check_layer_name(layer: Any, name: Any) -> None:
    """Raise unless a layer's name is a string, or None.

    Raises
    ------
    DtypeError
        With the layer's class.
    """
    if name is not None and not isinstance(name, str):
        message = (
            f"{type(layer).__name__}: name must be a string, got {type(name).__name__} {name!r}"
        )
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


def check_tensors(owner: str, error: type[TeFastError] = DtypeError, /, **tensors: Any) -> None:
    """Raise unless arguments are tensors.

    Raises
    ------
    TeFastError
        Of the given class, with the name of the first wrong argument.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            message = f"{owner}: {name} must be a torch.Tensor, got {type(tensor).__name__}"
            raise error(message)
