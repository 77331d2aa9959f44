"""Values and memory of tensors: casts, masks, and memory that is replaced, freed or kept."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from te_fast.helpers.checks import assert_viewless_tensor


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a tensor in a type; the tensor itself if it has the type already.

    Parameters
    ----------
    tensor : torch.Tensor, optional
        Of any shape; None stays None.
    dtype : torch.dtype
        The type.

    Notes
    -----
    The cast is differentiable even under ``torch.no_grad()``.

    See Also
    --------
    attention_mask_func : Another function of a tensor.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import cast_if_needed
    >>> x = torch.ones(2)
    >>> cast_if_needed(x, torch.float32) is x
    True
    """
    if tensor is None or tensor.dtype == dtype:
        return tensor
    with torch.enable_grad():
        return tensor.to(dtype=dtype)


def attention_mask_func(
    attention_scores: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Write -10000 to masked attention scores, in place.

    Parameters
    ----------
    attention_scores : torch.Tensor
        ``(..., queries, keys)``.
    attention_mask : torch.Tensor
        bool, broadcastable to the scores; True where a query does not attend.

    Returns
    -------
    torch.Tensor
        `attention_scores`.

    See Also
    --------
    te_fast.pytorch.DotProductAttention : Attention with masks.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import attention_mask_func
    >>> attention_mask_func(torch.zeros(2), torch.tensor([False, True]))
    tensor([     0., -10000.])
    """
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def safely_set_viewless_tensor_data(tensor: torch.Tensor, new_data_tensor: torch.Tensor) -> None:
    """Give a tensor that is no view the memory of another one: ``tensor.data = new_data_tensor``.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape.
    new_data_tensor : torch.Tensor
        The new values, of any shape.

    Raises
    ------
    ArgumentError
        If `tensor` is a view: its base would keep the old memory.

    See Also
    --------
    assert_viewless_tensor : The check alone.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import safely_set_viewless_tensor_data
    >>> x = torch.ones(2)
    >>> safely_set_viewless_tensor_data(x, torch.zeros(3))
    >>> x
    tensor([0., 0., 0.])
    """
    assert_viewless_tensor(tensor, f"The new data has shape {list(new_data_tensor.shape)}")
    tensor.data = new_data_tensor


def _is_protected(tensor: Any) -> bool:
    """Tell whether offloading has marked a tensor, or a part of it, whose memory it reuses."""
    parts = tensor.get_data_tensors() if hasattr(tensor, "get_data_tensors") else ()
    parts = parts if isinstance(parts, tuple) else (parts,)
    return any(hasattr(each, "_do_not_clear") for each in (tensor, *parts))


def clear_tensor_data(*tensors: Any) -> None:
    """Free the memory of tensors that something else still refers to.

    The tensors must not be used afterwards. A tensor with an attribute ``_do_not_clear`` stays as it is.

    Parameters
    ----------
    *tensors : torch.Tensor, QuantizedTensorStorage or None
        Plain tensors are empty afterwards; quantised ones lose their bytes by ``clear()``.

    See Also
    --------
    safely_set_viewless_tensor_data : Replaces the memory.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import clear_tensor_data
    >>> x = torch.ones(2, 3)
    >>> clear_tensor_data(x, None)
    >>> x.shape
    torch.Size([0])
    """
    for tensor in tensors:
        if tensor is None or _is_protected(tensor):
            continue
        if hasattr(tensor, "clear"):
            tensor.clear()
        else:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


@cache
def get_cached_ones_tensor(
    num_elements: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor of ones, the same one in every call, so that CUDA graphs find it at one address.

    Parameters
    ----------
    num_elements : int
        Its length.
    dtype : torch.dtype
        Its type.
    device : torch.device
        Where it is.

    Returns
    -------
    torch.Tensor
        ``(num_elements,)``; it is never freed, and must not be written to.

    See Also
    --------
    cast_if_needed : Another type of a tensor.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import get_cached_ones_tensor
    >>> get_cached_ones_tensor(2, torch.float32, torch.device("cpu"))
    tensor([1., 1.])
    """
    with torch.inference_mode(mode=False):  # later calls may be outside of it
        return torch.ones(num_elements, dtype=dtype, device=device)
