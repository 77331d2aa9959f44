"""Tells whether hooks observe the calls of a module."""

from __future__ import annotations

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


#: Whether calls of modules run their classes' own forwards without hooks.
are_called_plainly = native.are_called_plainly
