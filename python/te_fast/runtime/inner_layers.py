"""All layers in a module, also those that no module's tree has."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Where a module has a forward of its own: `te_fast.convert` puts te_fast's layers there, wrappers such as Accelerate's
#: hooks put what they have found aside.
_FORWARDS = ("forward", "_old_forward")


def parts_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and all modules in it, each followed by te_fast's layers behind its converted forward.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    """
    for part in module.modules():
        yield part
        for name in _FORWARDS:
            inner_layers = getattr(part.__dict__.get(name), "inner_layers", None)
            if inner_layers is not None:
                yield from inner_layers()


def drop_weight_caches(module: torch.nn.Module, *, of_graphs: bool = True) -> None:
    """Forget the quantised weights of all layers and operations in a module.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    of_graphs : bool, default = True
        Forget those that CUDA graphs read, too.
    """
    for part in parts_of(module):
        drop = getattr(part, "_drop_weight_cache", None)
        if drop is not None:
            drop(of_graphs=of_graphs)
