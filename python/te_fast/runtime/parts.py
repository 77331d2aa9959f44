"""Parameters in parts along dimension 0: their common memory, and their delayed gradients."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.runtime import main_grad, native

#: Attribute of tensors that offloading contexts leave on the device.
DO_NOT_OFFLOAD = "_TE_do_not_offload"


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate in the parts' own type; ``torch.autocast`` refuses 16-bit types other than its own."""
    if len(parts) == 1:
        return parts[0]
    kind = parts[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return torch.cat(parts)
    with torch.autocast(kind, enabled=False):
        return torch.cat(parts)


def are_adjacent(parts: list[torch.Tensor]) -> bool:
    """Tell whether parts are adjacent in one storage."""
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    return all(part.is_contiguous() for part in parts) and all(
        following.data_ptr() == end
        and following.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        for following, end in zip(parts[1:], ends, strict=False)
    )


def whole_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return adjacent parts as one tensor on their memory."""
    first = parts[0].detach()
    if len(parts) == 1:  # which may be a quantised tensor
        return first
    rows = sum(part.shape[0] for part in parts)
    size, stride = (rows, *first.shape[1:]), first.stride()
    whole = first.new_empty(0).set_(first.untyped_storage(), first.storage_offset(), size, stride)
    setattr(whole, DO_NOT_OFFLOAD, True)  # the parts, which are parameters, keep its memory
    return whole


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes that torch has counted; tensors of ``torch.inference_mode()`` count none."""
    return 0 if tensor.is_inference() else tensor._version


def lay_together(lists: list[list[torch.Tensor]]) -> None:
    """Move parts to one memory, in order, so that calls read them without a copy."""
    for parts in lists:
        if not are_adjacent(parts):
            whole = joined([part.detach() for part in parts])
            sizes = [part.shape[0] for part in parts]
            for part, memory in zip(parts, whole.split(sizes), strict=True):
                part.data = memory


def is_part(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's storage has other values, too."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def save_alone(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Give the parts of a joint memory storages of their own in a ``state_dict``.

    Libraries that save models take tensors of one storage for the same tensor: Accelerate keeps one of them,
    safetensors refuses them, and ``torch.save`` writes the whole storage for each. The entries keep the memory of the
    parameters, and count changes with them: who writes to an entry changes the parameter.
    """
    for name in module._parameters:
        value = state.get(f"{prefix}{name}")
        # With keep_vars=True, the entries are the parameters themselves.
        if type(value) is not torch.Tensor or value.is_meta or not is_part(value):
            continue
        # DLPack makes a storage of the tensor's own size, which keeps alive the tensor that it is made from: not the
        # entry itself, which has the storage and would never be freed.
        alone = torch.from_dlpack(value.detach())  # type: ignore[attr-defined]
        if value.is_inference():  # such tensors count no changes
            state[f"{prefix}{name}"] = alone
        else:
            value.data = alone


def fit_state(state_dict: Any, prefix: str, number: int, singles: dict[str, bool]) -> None:
    """Let modules with one parameter for all experts and modules with one for each load each other's checkpoints.

    Parameters
    ----------
    state_dict : dict
        The checkpoint, which is changed.
    prefix : str
        The module's name in it.
    number : int
        Experts.
    singles : dict of str to bool
        Parameters, and whether the module has one for all experts.
    """
    for name, is_single in singles.items():
        parts = [f"{prefix}{name}{expert}" for expert in range(number)]
        whole = f"{prefix}{name}"
        if is_single and whole not in state_dict and all(part in state_dict for part in parts):
            state_dict[whole] = torch.stack([state_dict.pop(part) for part in parts])
        elif not is_single and whole in state_dict and not any(p in state_dict for p in parts):
            state_dict.update(zip(parts, state_dict.pop(whole), strict=True))


def compute_deferred(handle: native.WeightHandle, parts: list[torch.Tensor], *, fuse: bool) -> None:
    """Compute the oldest delayed weight gradient, and give it to the parts that are trained.

    With `fuse`, it goes into their ``main_grad``; the product itself adds if these are adjacent.
    """
    # One that is missing or does not fit is noticed before a gradient is computed.
    buffers = [
        main_grad.main_grad_of(part, handle.name) for part in parts if fuse and part.requires_grad
    ]
    adjacent = are_adjacent(parts)
    whole = whole_of(parts) if adjacent else joined([part.detach() for part in parts])
    overwrites = {bool(getattr(part, "overwrite_main_grad", False)) for part in parts}
    if len(buffers) == len(parts) and len(overwrites) == 1 and are_adjacent(buffers):
        whole.main_grad = whole_of(buffers)  # type: ignore[attr-defined]
        whole.overwrite_main_grad = overwrites.pop()  # type: ignore[attr-defined]
        native.program_backward_dw(handle, whole, True)
        return
    dtypes = {buffer.dtype for buffer in buffers}
    dw: torch.Tensor | None
    if len(dtypes) == 1:  # computed in the type of main_grad, so that it is rounded once
        dw = torch.empty(whole.shape, dtype=dtypes.pop(), device=whole.device)
        whole.main_grad, whole.overwrite_main_grad = dw, True  # type: ignore[attr-defined]
        native.program_backward_dw(handle, whole, True)
    else:
        dw = native.program_backward_dw(handle, whole, False)
    if dw is None:
        return
    for parameter, part in zip(parts, dw.split([p.shape[0] for p in parts]), strict=True):
        if parameter.requires_grad:
            main_grad.give(parameter, part, handle.name, fuse=fuse, overwrite=False)
