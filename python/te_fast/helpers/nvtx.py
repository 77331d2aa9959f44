"""Ranges of NVIDIA's profilers, which ``NVTE_NVTX_ENABLED=1`` turns on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from te_fast import _config
from te_fast.errors import ArgumentError, StateError

#: Messages of the ranges that are open.
_open: list[str] = []


def get_nvtx_range_context(msg: str) -> AbstractContextManager[Any]:
    """Return a context manager that is an NVTX range if ``NVTE_NVTX_ENABLED`` is 1, and does nothing otherwise.

    Parameters
    ----------
    msg : str
        Name of the range.

    See Also
    --------
    nvtx_range_push : Begins a range without ``with``.

    Examples
    --------
    >>> from te_fast.pytorch.utils import get_nvtx_range_context
    >>> with get_nvtx_range_context("forward"):
    ...     pass
    """
    if _config.nvtx_is_enabled():
        context: AbstractContextManager[Any] = torch.cuda.nvtx.range(msg)
        return context
    return nullcontext()


def nvtx_range_push(msg: str) -> None:
    """Begin an NVTX range if ``NVTE_NVTX_ENABLED`` is 1.

    Parameters
    ----------
    msg : str
        Name of the range.

    See Also
    --------
    nvtx_range_pop : Ends it.

    Examples
    --------
    >>> from te_fast.pytorch.utils import nvtx_range_pop, nvtx_range_push
    >>> nvtx_range_push("forward")
    >>> nvtx_range_pop("forward")
    """
    if _config.nvtx_is_enabled():
        _open.append(msg)
        torch.cuda.nvtx.range_push(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """End the innermost NVTX range if ``NVTE_NVTX_ENABLED`` is 1.

    Parameters
    ----------
    msg : str, optional
        Its name, which is compared.

    Raises
    ------
    StateError
        If no range is open.
    ArgumentError
        If the range has another name.

    See Also
    --------
    nvtx_range_push : Begins one.

    Examples
    --------
    >>> from te_fast.pytorch.utils import nvtx_range_pop, nvtx_range_push
    >>> nvtx_range_push("forward")
    >>> nvtx_range_pop()
    """
    if not _config.nvtx_is_enabled():
        return
    if not _open:
        message = "nvtx_range_pop: no range is open; call nvtx_range_push first"
        raise StateError(message)
    last = _open.pop()
    if msg is not None and msg != last:
        message = f"nvtx_range_pop: expected the innermost range, {last!r}, got {msg!r}"
        raise ArgumentError(message)
    torch.cuda.nvtx.range_pop()
