"""Splits of tensors along a dimension, and the way back without a copy where the parts share memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from te_fast.errors import ShapeError
from te_fast.helpers.whole_numbers import divide
from te_fast.tensor.float8 import Float8Tensor, Float8TensorStorage


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Split a tensor into equal parts.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape.
    dim : int
        Dimension that is split.
    num_partitions : int
        Number of parts.
    contiguous_split_chunks : bool, default = False
        Copy the parts into memory of their own, where they are not contiguous.

    Returns
    -------
    tuple of torch.Tensor
        Views of the tensor, or copies.

    Raises
    ------
    ArgumentError
        If the dimension has no such number of equal parts.

    See Also
    --------
    combine_tensors : The way back.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import split_tensor_along_dim
    >>> split_tensor_along_dim(torch.arange(4), 0, 2)
    (tensor([0, 1]), tensor([2, 3]))
    """
    parts = torch.split(tensor, divide(tensor.size(dim), num_partitions), dim=dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


def _is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


def _are_views(parts: Sequence[torch.Tensor], starts: Sequence[int]) -> bool:
    """Tell whether parts lie in one memory, each at its start (in elements) behind the first, with equal strides."""
    first = parts[0]
    address, stride, memory, width = first.data_ptr(), first.stride(), None, first.element_size()
    for part, start in zip(parts, starts, strict=True):
        # Addresses are asked for first, since they mostly differ. Other tensors may lie behind a tensor by chance.
        if part.data_ptr() != address + start * width or part.stride() != stride:
            return False
        storage = part.untyped_storage().data_ptr()
        memory = storage if memory is None else memory
        if part.dtype != first.dtype or storage != memory:
            return False
    return True


def _over(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor over another one's memory, from its first element on. Autograd does not know of it."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, stride)


def _whole(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Join parts along a dimension: a view of their memory if they lie there side by side, else a copy."""
    first = parts[0]
    sizes = [part.shape[dim] for part in parts]
    starts = [start * first.stride(dim) for start in accumulate(sizes[:-1], initial=0)]
    # A trace has no addresses.
    if torch.compiler.is_compiling() or not _is_plain(parts) or not _are_views(parts, starts):
        return torch.cat(tuple(parts), dim=dim)
    shape = list(first.shape)
    shape[dim] = sum(sizes)
    return _over(first, shape, first.stride())


def _stacked(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Stack parts along a new dimension: a view of their memory if they lie there at equal distances, else a copy."""
    first = parts[0]
    distance = int(parts[1].storage_offset() - first.storage_offset()) if len(parts) > 1 else 0
    starts = [at * distance for at in range(len(parts))]
    if distance < 0 or not _is_plain(parts) or not _are_views(parts, starts):
        return torch.stack([part.detach() for part in parts], dim)
    shape, stride = list(first.shape), list(first.stride())
    shape.insert(dim, len(parts))
    stride.insert(dim, distance)
    return _over(first, shape, stride)


def _share_scale(tensors: Sequence[Any]) -> bool:
    """Tell whether tensors are FP8 tensors of one type with one scale, so that their bytes can be joined."""
    first = tensors[0]
    return all(
        isinstance(tensor, Float8Tensor)
        and tensor._data is not None
        and tensor._fp8_dtype == first._fp8_dtype
        and tensor._scale_inv.data_ptr() == first._scale_inv.data_ptr()
        for tensor in tensors
    )


def _like(tensor: Any, data: torch.Tensor) -> Any:
    """Return other bytes with a tensor's scale; their column layout is made when it is needed."""
    return type(tensor).make_like(tensor, data=data, data_transpose=None, shape=data.shape)


def combine_tensors(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Stack tensors along a new dimension, without a copy if they are views of one buffer at equal distances.

    Parameters
    ----------
    tensors : list of torch.Tensor
        Tensors of equal shape; FP8 tensors with one scale per tensor that they share stay FP8.
    dim : int
        The new dimension, 0 or more.

    Returns
    -------
    torch.Tensor
        A view of the buffer, or a copy. Autograd does not know where it is from.

    Raises
    ------
    ShapeError
        If the shapes differ, or there is no tensor.

    See Also
    --------
    SplitAlongDim : Splits, and joins gradients.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import combine_tensors
    >>> x = torch.arange(6).view(3, 2)
    >>> whole = combine_tensors([x[:, 0], x[:, 1]], 1)
    >>> torch.equal(whole, x), whole.data_ptr() == x.data_ptr()
    (True, True)
    """
    if not tensors or any(tensor.shape != tensors[0].shape for tensor in tensors):
        shapes = [list(tensor.shape) for tensor in tensors]
        message = f"combine_tensors: expected tensors of equal shape, got shapes {shapes}"
        raise ShapeError(message)
    if _share_scale(tensors):
        return _like(tensors[0], _stacked([tensor._data for tensor in tensors], dim))  # type: ignore[attr-defined]
    return _stacked(tensors, dim)


def _without(part: torch.Tensor, dim: int) -> torch.Tensor:
    """Remove a dimension of size 1; FP8 tensors stay FP8."""
    return part.select(dim, 0) if part.shape[dim] == 1 else part


class SplitAlongDim(torch.autograd.Function):
    """Split a tensor into views; the gradient is not concatenated where its parts are views of one buffer.

    Call it as ``SplitAlongDim.apply(tensor, split_dim, split_size_or_sections, squeeze=False)``.

    Parameters
    ----------
    mixed_x_layer : torch.Tensor or Float8TensorStorage
        Of any shape; FP8 tensors with one scale per tensor give FP8 parts.
    split_dim : int
        Dimension that is split.
    split_size_or_sections : int or list of int
        Size of each part, or their sizes.
    squeeze : bool, default = False
        Remove the dimension from parts of size 1.

    Returns
    -------
    tuple of torch.Tensor
        The parts.

    See Also
    --------
    split_tensor_along_dim : Equal parts, with torch's gradient.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import SplitAlongDim
    >>> q, k = SplitAlongDim.apply(torch.ones(2, 3, requires_grad=True), 1, [1, 2])
    >>> q.shape, k.shape
    (torch.Size([2, 1]), torch.Size([2, 2]))
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixed_x_layer: Any,
        split_dim: int,
        split_size_or_sections: int | Sequence[int],
        squeeze: bool = False,
    ) -> tuple[Any, ...]:
        """Split; see the class."""
        ctx.split_dim = split_dim % len(mixed_x_layer.shape)
        is_storage = isinstance(mixed_x_layer, Float8TensorStorage)
        is_storage = is_storage and not isinstance(mixed_x_layer, torch.Tensor)
        whole = mixed_x_layer._data if is_storage else mixed_x_layer
        sections = split_size_or_sections
        sections = sections if isinstance(sections, int) else list(sections)
        parts = torch.split(whole, sections, dim=split_dim)
        ctx.squeezed = [squeeze and part.shape[split_dim] == 1 for part in parts]
        if squeeze:
            parts = tuple(_without(part, ctx.split_dim) for part in parts)
        if not is_storage:
            return tuple(parts)
        options = mixed_x_layer.get_metadata() | {"data_transpose": None}
        return tuple(Float8TensorStorage(**options | {"data": part}) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Join the gradients of the parts."""
        dim = ctx.split_dim
        if _share_scale(grad_outputs):
            data = [grad._data for grad in grad_outputs]  # type: ignore[attr-defined]
            whole = _like(grad_outputs[0], _whole(_restored(data, ctx.squeezed, dim), dim))
        else:
            whole = _whole(_restored(grad_outputs, ctx.squeezed, dim), dim)
        return whole, None, None, None


def _restored(
    grads: Sequence[torch.Tensor], squeezed: Sequence[bool], dim: int
) -> list[torch.Tensor]:
    """Return gradients with the dimension that forward has removed."""
    return [
        grad.unsqueeze(dim) if lacks else grad for grad, lacks in zip(grads, squeezed, strict=True)
    ]
