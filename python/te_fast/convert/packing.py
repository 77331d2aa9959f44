"""Weights that one product reads, in adjacent memory, and their storages in checkpoints.

Adjacent parameters are views of one storage. Libraries that save models take tensors of one storage for the same
tensor: Accelerate keeps one of them, safetensors refuses them, and ``torch.save`` writes the whole storage for each.
So the entries of ``state_dict`` have storages of their own, over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: A module, and the name of a parameter in it.
Place = tuple[torch.nn.Module, str]


@torch.no_grad()
def pack(places: Sequence[Place]) -> Callable[[], None] | None:
    """Return a function that moves parameters to adjacent memory; None if they lie in another library's buffer."""
    parameters: list[Any] = [module._parameters[name] for module, name in places]
    if any(parameter.is_meta for parameter in parameters):
        return None
    for parameter in parameters:
        if _is_part(parameter) or not parameter.is_contiguous():
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


def _is_part(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's storage has other values, too."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _save_alone(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Give the parts of a joint memory storages of their own in a ``state_dict``.

    The entries keep the memory of the parameters, and count changes with them: who writes to an entry changes the
    parameter. After :func:`undo`, the hook stays with the module, since the parameters stay where they are.
    """
    for name in module._parameters:
        value = state.get(f"{prefix}{name}")
        # With keep_vars=True, the entries are the parameters themselves.
        if type(value) is not torch.Tensor or value.is_meta or not _is_part(value):
            continue
        # DLPack makes a storage of the tensor's own size, which keeps the joint memory alive.
        alone = torch.from_dlpack(value)  # type: ignore[attr-defined]
        if value.is_inference():  # such tensors count no changes
            state[f"{prefix}{name}"] = alone
        else:
            value.data = alone
