"""Tells whether hooks, or other forwards, observe the calls of a module."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.runtime import native


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether the module has hooks that run in its calls or in its backward."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


def are_called_plainly(*modules: Any) -> bool:
    """Return whether calls of modules run the forwards that te_fast's classes were made with, and no hooks.

    A class notes its forward as ``_called_forward``, since others may replace forwards of classes.
    """
    for module in modules:
        kind: Any = type(module)
        if kind.forward is not getattr(kind, "_called_forward", kind.forward):
            return False
    return native.are_called_plainly(*modules)
