"""Checks of optimizers' numbers, where they are made."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from te_fast.errors import ArgumentError


def check_not_negative(optimizer: str, **numbers: Any) -> None:
    """Raise unless numbers, by the arguments' names, are at least 0; tensors, which may be on a GPU, are not read.

    Raises
    ------
    ArgumentError
        Naming the optimizer and the argument.
    """
    for name, number in numbers.items():
        if isinstance(number, torch.Tensor):
            continue
        if not isinstance(number, Real) or not float(number) >= 0.0:
            message = f"{optimizer}: {name} must be a number that is not negative, got {number!r}"
            raise ArgumentError(message)


def check_betas(optimizer: str, betas: Any) -> None:
    """Raise unless there are two numbers from 0 to below 1.

    Raises
    ------
    ArgumentError
        Naming the optimizer.
    """
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    if is_pair and all(isinstance(beta, Real) and 0.0 <= float(beta) < 1.0 for beta in betas):
        return
    message = f"{optimizer}: betas must be two numbers from 0 to below 1, got {betas!r}"
    raise ArgumentError(message)
