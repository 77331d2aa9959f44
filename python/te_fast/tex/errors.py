"""The error of an argument that a function of the extension does not take."""

from __future__ import annotations

from typing import Any

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
