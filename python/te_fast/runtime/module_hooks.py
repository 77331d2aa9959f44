"""Tells whether hooks observe the calls of a module."""

from __future__ import annotations

import torch


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether the module has hooks that run in its calls or in its backward."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


_global = torch.nn.modules.module
_hooks_of_all = (
    _global._global_forward_hooks,
    _global._global_forward_pre_hooks,
    _global._global_backward_hooks,
    _global._global_backward_pre_hooks,
)


def are_called_plainly(*modules: torch.nn.Module) -> bool:
    """Return whether calls of modules run their classes' own forwards without hooks."""
    if any(_hooks_of_all):
        return False
    for module in modules:
        own = module.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or own.get("_compiled_call_impl") is not None
        ):
            return False
    return True
