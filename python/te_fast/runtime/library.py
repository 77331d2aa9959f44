"""The operators that te_fast adds to torch's dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_library = torch.library.Library("te_fast", "FRAGMENT")


def register(
    schema: str, run: Callable[..., Any], meta: Callable[..., Any]
) -> torch._ops.OpOverload[..., Any]:
    """Add an operator and return it.

    `meta` makes empty results for tracers, by ``new_empty`` of arguments. ``torch.library.custom_op`` and
    ``register_fake`` would look through the source files of all loaded modules, which takes longer than the rest of
    an import.

    Parameters
    ----------
    schema : str
        Name, arguments and results.
    run, meta : Callable
        The functions that compute the results, and that make empty ones.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    _library.impl(name, meta, "Meta")
    operator: torch._ops.OpOverload[..., Any] = getattr(torch.ops.te_fast, name).default
    return operator


def register_gradient(
    operator: torch._ops.OpOverload[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Add the gradient of an operator: ``setup_context(ctx, inputs, output)`` and ``backward(ctx, *grads)``."""
    torch.library.register_autograd(operator, backward, setup_context=setup_context, lib=_library)
