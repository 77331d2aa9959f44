"""Kept FP8 weights of all layers in a module."""

from __future__ import annotations

import torch

#: Where a module has a forward of its own: `te_fast.convert` puts te_fast's layers there, wrappers such as Accelerate's
#: hooks put what they have found aside.
FORWARDS = ("forward", "_old_forward")


def drop_weight_caches(module: torch.nn.Module, *, of_graphs: bool = True) -> None:
    """Forget the quantised weights of all layers and operations in a module, converted modules included.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    of_graphs : bool, default = True
        Forget those that CUDA graphs read, too.
    """
    for part in module.modules():
        for holder in (part, *map(part.__dict__.get, FORWARDS)):
            drop = getattr(holder, "_drop_weight_cache", None)
            if drop is not None:
                drop(of_graphs=of_graphs)
