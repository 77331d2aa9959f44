"""Whether somebody looks at the calls of a module."""

from __future__ import annotations

import torch


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks of the module's own run when it is called, or in its backward."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )
