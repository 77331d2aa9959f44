"""Tensors that do not own their memory."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import DtypeError


def make_weak_ref(x: Any) -> Any:
    """Return tensors on the same memory that do not keep it allocated.

    A captured graph owns the memory of its results. If tensors on this memory do not own it, later captures can use it,
    too.

    Parameters
    ----------
    x : torch.Tensor, tuple, list, dict, int, float, bool or None
        Tensors, or containers of them. A tensor that is not on a GPU is returned as it is.

    Raises
    ------
    DtypeError
        For anything else.

    See Also
    --------
    te_fast.pytorch.make_graphed_callables : Captures modules.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import make_weak_ref
    >>> x = torch.ones(2)
    >>> make_weak_ref([x, 1])[0] is x
    True
    """
    if isinstance(x, torch.Tensor):
        return _alias(x) if x.is_cuda else x
    if isinstance(x, tuple):
        return tuple(make_weak_ref(part) for part in x)
    if isinstance(x, list):
        return [make_weak_ref(part) for part in x]
    if isinstance(x, dict):
        return {key: make_weak_ref(part) for key, part in x.items()}
    if x is None or isinstance(x, int | float | bool):
        return x
    message = (
        f"make_weak_ref: expected tensors, numbers, None, or tuples, lists and dicts of them, got a "
        f"{type(x).__name__}"
    )
    raise DtypeError(message)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same elements that does not own their memory."""
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), tensor.device, memory.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
