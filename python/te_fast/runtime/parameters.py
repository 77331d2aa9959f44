"""Parameters that layers and operations need."""

from __future__ import annotations

from typing import Any

from te_fast.errors import MissingAttributeError


def needed_parameter(owner: Any, name: str, label: str, kind: str) -> Any:
    """Return a parameter that a layer or an operation always has; `label` begins the message, `kind` says which it is.

    Raises
    ------
    MissingAttributeError
        If the parameter was deleted, or is None.
    """
    parameter = getattr(owner, name, None)
    if parameter is None:
        hint = " (a layer without biases has bias=False)" if kind == "layer" else ""
        message = (
            f"{label}: parameter {name} was deleted or set to None, and the {kind} needs it; assign it again, or make "
            f"another {kind}{hint}"
        )
        raise MissingAttributeError(message)
    return parameter
