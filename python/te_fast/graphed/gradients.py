"""Keeps the gradients of parameters unchanged while graphs are captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from te_fast.errors import StateError


class MainGrad(NamedTuple):
    """A buffer that a layer adds a parameter's gradient to."""

    parameter: torch.nn.Parameter
    grad: torch.Tensor


def main_grads(module: torch.nn.Module) -> list[MainGrad]:
    """Return the buffers that layers within a module write to.

    Parameters
    ----------
    module : torch.nn.Module
        A callable.
    """
    found = []
    for part in module.modules():
        fuses = getattr(part, "fuse_wgrad_accumulation", False)
        if fuses or getattr(part, "_accumulate_into_main_grad", False):
            for parameter in part.parameters(recurse=False):
                grad = getattr(parameter, "main_grad", None)
                if parameter.requires_grad and isinstance(grad, torch.Tensor):
                    found.append(MainGrad(parameter, grad))
    return found


@contextmanager
def untouched(buffers: Sequence[MainGrad]) -> Iterator[set[int]]:
    """Restore the values of ``main_grad`` after a run.

    Yields a set that has, after the run, the identities of parameters whose gradients the run has added.
    """
    contents = [buffer.grad.clone() for buffer in buffers]
    flags = [getattr(buffer.parameter, _FLAG, None) for buffer in buffers]
    for buffer, flag in zip(buffers, flags, strict=True):
        if flag is not None:
            setattr(buffer.parameter, _FLAG, False)
    added: set[int] = set()
    try:
        yield added
    finally:
        for buffer, content, flag in zip(buffers, contents, flags, strict=True):
            buffer.grad.copy_(content)
            if flag is not None:
                if getattr(buffer.parameter, _FLAG):
                    added.add(id(buffer.parameter))
                setattr(buffer.parameter, _FLAG, flag)


_FLAG = "grad_added_to_main_grad"


def check_main_grads(name: str, buffers: Sequence[tuple[MainGrad, int]]) -> None:
    """Raise unless buffers lie where the graph writes.

    Parameters
    ----------
    name : str
        The callable in messages.
    buffers : sequence
        Buffers of the capture, and their addresses.

    Raises
    ------
    StateError
        If a buffer lies elsewhere.
    """
    for buffer, address in buffers:
        grad = getattr(buffer.parameter, "main_grad", None)
        if grad is None or grad.data_ptr() != address:
            message = (
                f"{name}: a parameter's main_grad lies elsewhere than when the graph was captured; keep the buffer, or "
                "capture once more"
            )
            raise StateError(message)


@contextmanager
def put_aside(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Remove ``.grad`` of parameters for a while."""
    former = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, former, strict=True):
            parameter.grad = grad
