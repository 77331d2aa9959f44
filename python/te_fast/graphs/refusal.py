"""Errors in a trace: te_fast's own reach the caller, and a fallback to eager code is told."""

from __future__ import annotations

import warnings

import torch

from te_fast import errors
from te_fast.errors import TeFastError, UnsupportedError

#: Class and message of an error. Code that a trace runs as a constant returns them: torch would turn an error that is
#: raised there into an internal error.
Problem = tuple[str, str]

#: Messages that were told.
_told: set[str] = set()


def problem_of(error: TeFastError) -> Problem:
    """Return what a trace needs to raise an error."""
    return type(error).__name__, str(error)


def raise_problem(problem: Problem | None) -> None:
    """Raise an error in a trace, if there is one."""
    if problem is None:
        return
    kind, message = problem
    if kind == "UnsupportedError":
        raise refusal(message)
    raise getattr(errors, kind)(message)


def refusal(message: str) -> UnsupportedError:
    """Return the error of a trace that te_fast refuses.

    Without ``fullgraph=True``, ``torch.compile`` catches the error and runs the code eagerly. A warning says so, once.
    """
    if torch.compiler.is_dynamo_compiling():
        _tell(message)
    return UnsupportedError(message)


def _tell(message: str) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    trace = InstructionTranslator.current_tx()
    raises = getattr(trace, "one_graph", False) or getattr(trace, "error_on_graph_break", False)
    if raises or message in _told:
        return
    _told.add(message)
    message = f"{message}. torch.compile leaves this code to eager mode; fullgraph=True makes this an error"
    warnings.warn(message, UserWarning, stacklevel=2)


_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]
