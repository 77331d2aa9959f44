"""Weights that one product reads, in adjacent memory.

Adjacent parameters are views of one storage. The entries of ``state_dict`` have storages of their own, over the same
memory, for libraries that take tensors of one storage for the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_fast.runtime.parts import is_part, save_alone

#: A module, and the name of a parameter in it.
Place = tuple[torch.nn.Module, str]


@torch.no_grad()
def pack(places: Sequence[Place]) -> Callable[[], None] | None:
    """Return a function that moves parameters to adjacent memory; None if they lie in another library's buffer."""
    parameters: list[Any] = [module._parameters[name] for module, name in places]
    if any(parameter.is_meta for parameter in parameters):
        return None
    for parameter in parameters:
        if is_part(parameter) or not parameter.is_contiguous():
            return None
    whole = torch.cat([parameter.detach() for parameter in parameters])

    def lay() -> None:
        parts = whole.split([parameter.shape[0] for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
        for module, _ in places:
            if _save_alone not in module._state_dict_hooks.values():
                module._register_state_dict_hook(_save_alone)

    return lay


def _save_alone(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Call :func:`save_alone`.

    After :func:`undo`, the hook stays with the module, since the parameters stay where they are.
    """
    save_alone(module, state, prefix)
