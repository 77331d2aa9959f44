"""``set_grad_none``, an old argument of optimizers, and ``zero_grad``, which replaces it."""

from __future__ import annotations

import warnings

from te_fast.errors import ArgumentError


def warn_of_set_grad_none(optimizer: str, value: bool | None) -> None:
    """Warn about the old argument if it is given; `stacklevel` is right for an optimizer's constructor."""
    if value is not None:
        message = f"{optimizer}: set_grad_none is deprecated; give set_to_none to zero_grad()"
        warnings.warn(message, DeprecationWarning, stacklevel=3)


def forgets(optimizer: str, set_to_none: bool | None, set_grad_none: bool | None) -> bool:
    """Return whether ``zero_grad`` drops gradients instead of filling them with zeros.

    Parameters
    ----------
    optimizer : str
        Name in messages.
    set_to_none : bool, optional
        The argument of ``zero_grad``.
    set_grad_none : bool, optional
        The argument of the constructor.

    Raises
    ------
    ArgumentError
        If they differ.
    """
    if None not in (set_to_none, set_grad_none) and set_to_none != set_grad_none:
        message = (
            f"{optimizer}.zero_grad: set_to_none={set_to_none}, but the optimizer was made with "
            f"set_grad_none={set_grad_none}"
        )
        raise ArgumentError(message)
    chosen = set_grad_none if set_to_none is None else set_to_none
    return chosen is None or chosen
