"""Splits of tensors along a dimension, and the way back without a copy where the parts share memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch

from te_fast.errors import ShapeError
from te_fast.helpers.whole_numbers import divide
from te_fast.runtime.compiling import PLAIN
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


def _are_views(parts: Sequence[torch.Tensor], distances: Iterable[int]) -> bool:
    """Tell whether plain parts lie in one memory with equal strides.

    `distances` are the elements from each part's beginning to that of the next one.
    """
    # A trace has no addresses.
    if torch.compiler.is_compiling() or type(parts[0]) not in PLAIN:
        return False
    first, address = parts[0], parts[0].data_ptr()
    width, stride = first.element_size(), first.stride()
    for part, distance in zip(parts[1:], distances):  # noqa: B905  a distance behind the last part
        address += distance * width
        # Addresses are asked for first, since they mostly differ.
        if type(part) not in PLAIN or part.data_ptr() != address or part.stride() != stride:
            return False
    # Another tensor may lie behind a tensor by chance.
    memory = first.untyped_storage().data_ptr()
    return all(
        part.dtype == first.dtype and part.untyped_storage().data_ptr() == memory for part in parts
    )


def _over(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor over another one's memory, from its first element on. Autograd does not know of it."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, stride)


def _whole(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Join parts along a dimension: a view of their memory if they lie there side by side, else a copy."""
    stride = parts[0].stride(dim)
    if not _are_views(parts, (part.shape[dim] * stride for part in parts)):
        return torch.cat(tuple(parts), dim=dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _over(parts[0], shape, parts[0].stride())


def _stacked(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Stack parts along a new dimension: a view of their memory if they lie there at equal distances, else a copy."""
    first = parts[0]
    distance = int(parts[1].storage_offset() - first.storage_offset()) if len(parts) > 1 else 0
    if distance < 0 or not _are_views(parts, repeat(distance)):
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
        sections = split_size_or_sections
        sections = sections if isinstance(sections, int) else list(sections)
        is_tensor = isinstance(mixed_x_layer, torch.Tensor)
        whole = mixed_x_layer if is_tensor else mixed_x_layer._data
        parts = torch.split(whole, sections, dim=split_dim)
        ctx.squeezed = ()
        if squeeze:
            ctx.squeezed = [part.shape[split_dim] == 1 for part in parts]
            parts = tuple(_without(part, ctx.split_dim) for part in parts)
        return tuple(parts) if is_tensor else _storages_like(mixed_x_layer, parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Join the gradients of the parts."""
        dim, squeezed = ctx.split_dim, ctx.squeezed
        if type(grad_outputs[0]) is not torch.Tensor and _share_scale(grad_outputs):
            data = _restored([grad._data for grad in grad_outputs], squeezed, dim)  # type: ignore[attr-defined]
            return _like(grad_outputs[0], _whole(data, dim)), None, None, None
        return _whole(_restored(grad_outputs, squeezed, dim), dim), None, None, None


def _storages_like(storage: Float8TensorStorage, parts: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return storages over bytes, with another storage's scale."""
    options = storage.get_metadata() | {"data_transpose": None}
    return tuple(Float8TensorStorage(**options | {"data": part}) for part in parts)


def _restored(
    grads: Sequence[torch.Tensor], squeezed: Sequence[bool], dim: int
) -> Sequence[torch.Tensor]:
    """Return gradients with the dimension that forward has removed."""
    if not squeezed:
        return grads
    return [
        grad.unsqueeze(dim) if lacks else grad for grad, lacks in zip(grads, squeezed, strict=True)
    ]
