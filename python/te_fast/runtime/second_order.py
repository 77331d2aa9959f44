"""Gradients that autograd cannot differentiate again."""

from __future__ import annotations

import torch

from te_fast.errors import UnsupportedError


def refuse_second_order(name: str) -> None:
    """Raise in a backward that is itself recorded, as under ``create_graph=True``.

    Parameters
    ----------
    name : str
        Name of the operation, for the message.

    Raises
    ------
    UnsupportedError
        If the backward is recorded.
    """
    if torch.is_grad_enabled():
        message = f"{name}: its gradient cannot be differentiated again; call backward without create_graph=True"
        raise UnsupportedError(message)
