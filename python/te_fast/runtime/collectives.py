"""Collectives along the first dimension, by ``torch.distributed``: a result, and a handle of what is under way."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import ArgumentError, ShapeError, UnsupportedError

#: torch's handle of a collective that was started; None where there is nothing to wait for.
Handle = Any


def _is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def get_distributed_world_size(group: Any = None) -> int:
    """Return how many ranks a group has; 1 without ``torch.distributed``.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The group; all ranks by default.
    """
    return torch.distributed.get_world_size(group=group) if _is_initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """Return this process's rank in a group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The group; all ranks by default.

    Raises
    ------
    ArgumentError
        Without ``torch.distributed``.
    """
    if not _is_initialized():
        message = "get_distributed_rank: torch.distributed has no process group; call init_process_group() first"
        raise ArgumentError(message)
    return torch.distributed.get_rank(group=group)


def spans(group: Any, part: Any) -> bool:
    """Tell whether a group has all ranks of another one; None is all ranks."""
    if group is None or group is part:
        return True
    ranks_of = torch.distributed.get_process_group_ranks
    return set(ranks_of(part)) <= set(ranks_of(group))


def check_rows(rows: int, size: int, what: str) -> None:
    """Raise unless rows can be shared out among ranks.

    Raises
    ------
    ShapeError
        Naming `what`.
    """
    if rows % size != 0:
        message = (
            f"{what}: the first dimension must be a multiple of the {size} ranks that share it, got {rows}; pad the "
            f"sequence by {size - rows % size}"
        )
        raise ShapeError(message)


def gather_along_first_dim(
    inp: torch.Tensor, process_group: Any, async_op: bool = False, quantizer: Any = None
) -> tuple[torch.Tensor, Handle]:
    """Concatenate the tensors of all ranks along the first dimension.

    Parameters
    ----------
    inp : torch.Tensor
        ``(rows, ...)``, of one shape on all ranks.
    process_group : torch.distributed.ProcessGroup
        The ranks; None is all.
    async_op : bool, default = False
        Return at once, with a handle to ``wait()`` for.
    quantizer : Quantizer, optional
        Quantised gathers; not supported yet.

    Returns
    -------
    torch.Tensor
        ``(ranks · rows, ...)``.
    handle or None
        None where there is nothing to wait for.

    Raises
    ------
    UnsupportedError
        For a quantizer.
    """
    if quantizer is not None:
        message = "gather_along_first_dim: quantizer is not supported yet; gather, then quantise"
        raise UnsupportedError(message)
    size = get_distributed_world_size(process_group)
    if size == 1:
        return inp, None
    inp = inp.contiguous()
    out = inp.new_empty((inp.shape[0] * size, *inp.shape[1:]))
    if inp.numel() == 0:
        return out, None
    handle = torch.distributed.all_gather_into_tensor(
        out, inp, group=process_group, async_op=async_op
    )
    return out, handle


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Any, async_op: bool = False
) -> tuple[torch.Tensor, Handle]:
    """Sum the tensors of all ranks, and keep this rank's share along the first dimension.

    Parameters
    ----------
    inp : torch.Tensor
        ``(ranks · rows, ...)``, of one shape on all ranks.
    tp_group : torch.distributed.ProcessGroup
        The ranks; None is all.
    async_op : bool, default = False
        Return at once, with a handle to ``wait()`` for.

    Returns
    -------
    torch.Tensor
        ``(rows, ...)``.
    handle or None
        None where there is nothing to wait for.

    Raises
    ------
    ShapeError
        If the first dimension cannot be shared out.
    """
    size = get_distributed_world_size(tp_group)
    if size == 1:
        return inp, None
    check_rows(inp.shape[0], size, "reduce_scatter_along_first_dim")
    inp = inp.contiguous()
    out = inp.new_empty((inp.shape[0] // size, *inp.shape[1:]))
    if inp.numel() == 0:
        return out, None
    handle = torch.distributed.reduce_scatter_tensor(out, inp, group=tp_group, async_op=async_op)
    return out, handle


def allreduce(
    inp: torch.Tensor, tp_group: Any = None, async_op: bool = False
) -> tuple[torch.Tensor, Handle]:
    """Sum the tensors of all ranks, in the memory of `inp`.

    Parameters
    ----------
    inp : torch.Tensor
        Of one shape on all ranks, contiguous.
    tp_group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.
    async_op : bool, default = False
        Return at once, with a handle to ``wait()`` for.

    Returns
    -------
    torch.Tensor
        `inp`.
    handle or None
        None where there is nothing to wait for.
    """
    if get_distributed_world_size(tp_group) == 1 or inp.numel() == 0:
        return inp, None
    return inp, torch.distributed.all_reduce(inp, group=tp_group, async_op=async_op)


def split_tensor_into_1d_equal_chunks(
    tensor: torch.Tensor, tp_group: Any, new_buffer: bool = False
) -> torch.Tensor:
    """Return this rank's share of a tensor's elements.

    Parameters
    ----------
    tensor : torch.Tensor
        The same on all ranks.
    tp_group : torch.distributed.ProcessGroup
        The ranks; None is all.
    new_buffer : bool, default = False
        In memory of its own, and not as a view of `tensor`.

    Returns
    -------
    torch.Tensor
        ``(elements / ranks,)``.

    Raises
    ------
    ShapeError
        If the elements cannot be shared out.
    """
    size = get_distributed_world_size(tp_group)
    if tensor.numel() % size != 0:
        message = (
            f"split_tensor_into_1d_equal_chunks: the elements must be a multiple of the {size} ranks, got a tensor of "
            f"shape {list(tensor.shape)}"
        )
        raise ShapeError(message)
    rank = get_distributed_rank(tp_group) if size > 1 else 0
    chunk = tensor.reshape(-1).chunk(size)[rank] if tensor.numel() else tensor.reshape(-1)
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """Return all elements of which each rank has a share, the inverse of :func:`split_tensor_into_1d_equal_chunks`.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(elements / ranks,)``.
    tp_group : torch.distributed.ProcessGroup
        The ranks; None is all.
    """
    return gather_along_first_dim(tensor, tp_group)[0]


def set_tensor_model_parallel_attributes(
    tensor: Any, is_parallel: bool, dim: int, stride: int
) -> None:
    """Mark a parameter as Megatron-LM knows those that ranks share.

    Parameters
    ----------
    tensor : torch.Tensor
        The parameter.
    is_parallel : bool
        Whether ranks share it.
    dim, stride : int
        Along which dimension, and in strides of how many.
    """
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride
