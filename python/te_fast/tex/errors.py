"""The error of an argument that a function of the extension does not take."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import TeFastError
from te_fast.runtime import arguments


class ExtensionError(TeFastError, RuntimeError, ValueError, TypeError):
    """A shape, type or combination does not fit; Transformer Engine's C++ raises ``RuntimeError``."""


def check_tensors(op: str, **given: Any) -> None:
    """Raise unless arguments are tensors, as the extension's signatures do.

    Raises
    ------
    ExtensionError
        With the name of the first wrong argument.
    """
    arguments.check_tensors(op, ExtensionError, **given)


def check_rows(op: str, **given: Any) -> None:
    """Raise unless arguments are dense tensors of one dimension or more, which kernels read as rows.

    Raises
    ------
    ExtensionError
        With the name of the first wrong argument.
    """
    check_tensors(op, **given)
    for name, tensor in given.items():
        if tensor.dim() == 0 or tensor.layout is not torch.strided:
            got = f"{tensor.layout} of shape {list(tensor.shape)}"
            message = f"{op}: {name} must be a dense tensor of one dimension or more, got {got}"
            raise ExtensionError(message)


def check_lists(op: str, **given: Any) -> None:
    """Raise unless arguments are lists or tuples.

    Raises
    ------
    ExtensionError
        With the name of the first wrong argument.
    """
    for name, value in given.items():
        if not isinstance(value, list | tuple):
            message = f"{op}: {name} must be a list, got {type(value).__name__}"
            raise ExtensionError(message)
