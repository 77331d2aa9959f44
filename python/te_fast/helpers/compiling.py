"""Decorators of functions that torch compiles, or must not."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from te_fast import _config
from te_fast.errors import ArgumentError

Function = Callable[..., Any]


def lazy_compile(func: Function) -> Function:
    """Return a function that calls ``torch.compile`` when it is first called.

    Parameters
    ----------
    func : callable
        The function. A compiled caller traces it as it is.
    """
    compiled: list[Function] = []

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(func))
        return compiled[0](*args, **kwargs)

    return call


def _as_it_is(func: Function) -> Function:
    return func


#: Compiles a function at its first call, unless ``NVTE_TORCH_COMPILE`` is 0.
jit_fuser = lazy_compile if _config.TORCH_COMPILE else _as_it_is
dropout_fuser = jit_fuser


def no_torch_dynamo(
    recursive: bool = True, when: Callable[[Mapping[str, Any]], str | None] | None = None
) -> Callable[[Function], Function]:
    """Return a decorator of functions that ``torch.compile`` does not trace.

    Parameters
    ----------
    recursive : bool, default = True
        What the function calls is not traced, either.
    when : callable, optional
        Decides for each traced call: it gets the arguments that were given, by name, and returns why the call cannot be
        traced, or None. The reason is the text of a warning.

    Raises
    ------
    ArgumentError
        By the decorator, if `when` is given and the function takes ``*args``, whose names are unknown.
    """

    def decorate(func: Function) -> Function:
        if when is None:
            outside: Function = torch.compiler.disable(func, recursive=recursive)
            return wraps(func)(outside)
        return _traced_unless(func, when, recursive=recursive)

    return decorate


def _traced_unless(
    func: Function, when: Callable[[Mapping[str, Any]], str | None], *, recursive: bool
) -> Function:
    parameters = inspect.signature(func).parameters
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters.values()):
        name = getattr(func, "__name__", repr(func))
        message = f"no_torch_dynamo: with when=, a function must not take *args, as {name} does; name its arguments"
        raise ArgumentError(message)
    names = list(parameters)

    # A warning ends a trace by itself, so it is given where nothing is traced.
    def warn_and_run(reason: str, *args: Any, **kwargs: Any) -> Any:
        message = (
            f"torch.compile: {reason} cannot be traced, the call runs eagerly; fullgraph=True fails"
        )
        warnings.warn(message, UserWarning, stacklevel=3)
        return func(*args, **kwargs)

    outside: Function = torch.compiler.disable(warn_and_run, recursive=recursive)

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return func(*args, **kwargs)
        given = dict(zip(names, args))  # noqa: B905  arguments may be left out
        given.update(kwargs)
        reason = when(given)
        if reason is None:
            return func(*args, **kwargs)
        return outside(reason, *args, **kwargs)

    return call


def set_jit_fusion_options() -> None:
    """Choose how torch fuses operations: ``torch.compile``, which every supported version of torch has on already."""
