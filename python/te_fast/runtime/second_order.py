"""Derivatives that te_fast lacks, of gradients and in forward mode: its own error in place of torch's."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from te_fast.errors import UnsupportedError
from te_fast.runtime import native


def _error(name: str) -> UnsupportedError:
    message = (
        f"{name}: its gradient cannot be differentiated again; call backward without create_graph=True, or use torch's "
        "own layers where second derivatives are needed"
    )
    return UnsupportedError(message)


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
        raise _error(name)


class _Refused(torch.autograd.Function):
    """Arguments: name, number of gradients, gradients, sources. The gradient of the gradients is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *given: Any) -> Any:
        ctx.name = name
        return given[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise _error(ctx.name)


def _leaves_of(node: Any) -> list[torch.Tensor]:
    """Return the leaves that the gradients of a node go to."""
    found, seen, left = [], {node}, [node]
    while left:
        for other, _ in left.pop().next_functions:
            if other is None or other in seen:
                continue
            seen.add(other)
            left.append(other)
            if hasattr(other, "variable"):
                found.append(other.variable)
    return found


def _once(name: str, made: Any, node: Any, given: tuple[Any, ...]) -> Any:
    """Return gradients that raise when they are differentiated.

    torch's ``once_differentiable`` does so only if the gradient that backward got needs one. But these gradients depend
    on inputs and parameters, too, and autograd would take them for constants. ``torch.autograd.grad`` runs only what
    leads to the tensors that it is given, so the error has to lead to the leaves, and to the gradients that backward
    got, by which ``torch.autograd.functional.jvp`` differentiates.
    """
    grads = made if isinstance(made, tuple) else (made,)
    # Results of a node need gradients only if arguments of it do.
    leaves = [grad if grad is None else grad.detach().requires_grad_() for grad in grads]
    refused = _Refused.apply(name, len(leaves), *leaves, *given, *_leaves_of(node))
    return refused if isinstance(made, tuple) else refused[0]


def differentiable_once(
    name_of: Callable[[Any], str] | str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let the backward of an autograd function refuse to be differentiated, by te_fast's error.

    Parameters
    ----------
    name_of : Callable or str
        Name of the layer or function in the message; a callable finds it in the node's context, only under
        ``create_graph=True``.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                made = backward(ctx, *grads)
            return _once(name_of if isinstance(name_of, str) else name_of(ctx), made, ctx, grads)

        return wrapper

    return decorate


def no_forward_mode(name_of: Callable[[Any], str] | str) -> Any:
    """Return the ``jvp`` of an autograd function that has no derivatives in forward mode.

    torch's compiler takes no function with a ``jvp`` of its own, so that functions in graphs keep torch's.

    Parameters
    ----------
    name_of : Callable or str
        Name of the layer or function in the message; a callable finds it in the node's context.
    """

    def jvp(ctx: Any, *_: Any) -> Any:
        name = name_of if isinstance(name_of, str) else name_of(ctx)
        message = (
            f"{name}: there is no derivative in forward mode (torch.autograd.forward_ad); call backward, or use "
            "torch's own layers where tangents are needed"
        )
        raise UnsupportedError(message)

    return staticmethod(jvp)


def name_of_program(native_object: Any) -> str:
    """Return the name of the layer or chain that a native object belongs to.

    Parameters
    ----------
    native_object : object
        A program, or what a program's forward left for backward. Native code shows Python's garbage collector the owner
        and the program, and the program's weights. Only errors need their names, so a search is cheap enough.
    """
    near = gc.get_referents(native_object)
    names = [name for one in near if (name := _own_name(one)) is not None]
    if not names:
        far = [
            other for one in near if type(one) is native.Program for other in gc.get_referents(one)
        ]
        names = [name for one in far if (name := _own_name(one)) is not None]
    return " and ".join(dict.fromkeys(names)) or "te_fast's program"


def _own_name(one: Any) -> str | None:
    if isinstance(one, (torch.Tensor, dict, native.Program)):
        return None
    for attribute in ("name", "_name"):
        name = getattr(one, attribute, None)
        if isinstance(name, str):
            return name
    return type(one).__name__ if isinstance(one, torch.nn.Module) else None
