"""Collectives along the first dimension, by ``torch.distributed``: they return a result and a handle."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from te_fast.errors import (
    DtypeError,
    RanksError,
    ShapeError,
    StateError,
    TeFastError,
    UnsupportedError,
)

#: torch's handle of a running collective; None if there is nothing to wait for.
Handle = Any


def is_initialized() -> bool:
    """Tell whether this process has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class named:
    """Name the layer in the errors of ``torch.distributed`` when a rank is gone or late.

    It has no state, so that a layer makes one for all its calls.

    Parameters
    ----------
    name, collective : str
        Name of the layer, and of the collective.
    """

    __slots__ = ("_collective", "_name")

    def __init__(self, name: str, collective: str) -> None:
        self._name, self._collective = name, collective

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise the error of the layer in place of one of ``torch.distributed``."""
        if not isinstance(error, RuntimeError) or isinstance(error, TeFastError):
            return
        why = "another rank has stopped, is late, or does something else"
        if "No backend type associated" in str(error):
            why = "initialise the process group for both devices, init_process_group('cpu:gloo,cuda:nccl')"
        message = f"{self._name}: {self._collective} failed; {why}: {error}"
        raise RanksError(message) from error


def check_is_group(owner: str, argument: str, group: Any) -> None:
    """Raise unless this is a process group, what ranks outside of a new group get in its place, or None.

    Raises
    ------
    DtypeError
        Naming the owner and the argument.
    """
    known = torch.distributed
    if group is None or not known.is_available() or isinstance(group, known.ProcessGroup):
        return
    if group is known.GroupMember.NON_GROUP_MEMBER:
        return
    remedy = "; give its get_group()" if hasattr(group, "get_group") else ""
    message = (
        f"{owner}: {argument} must be a torch.distributed.ProcessGroup, got "
        f"{type(group).__name__}{remedy}"
    )
    raise DtypeError(message)


def get_distributed_world_size(group: Any = None) -> int:
    """Return the number of ranks of a group; 1 without ``torch.distributed``.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The group; all ranks by default.

    See Also
    --------
    te_fast.pytorch.distributed.get_distributed_rank : this process's rank in a group.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> te.distributed.get_distributed_world_size()
    1
    """
    return torch.distributed.get_world_size(group=group) if is_initialized() else 1


def get_distributed_rank(group: Any = None) -> int:
    """Return this process's rank in a group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The group; all ranks by default.

    Raises
    ------
    RanksError
        Without ``torch.distributed``.

    See Also
    --------
    te_fast.pytorch.distributed.get_distributed_world_size : the number of ranks.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> try:
    ...     rank = te.distributed.get_distributed_rank()
    ... except RuntimeError:
    ...     print("there is no process group")
    there is no process group
    """
    if not is_initialized():
        message = "get_distributed_rank: torch.distributed has no process group; call init_process_group() first"
        raise RanksError(message)
    return torch.distributed.get_rank(group=group)


def spans(group: Any, part: Any) -> bool:
    """Tell whether a group has all ranks of another one; None stands for all ranks."""
    if group is None or group is part:
        return True
    ranks_of = torch.distributed.get_process_group_ranks
    return set(ranks_of(part)) <= set(ranks_of(group))


def check_rows(rows: int, size: int, what: str) -> None:
    """Raise unless rows can be divided among ranks.

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


def _check_has_rows(function: str, shape: torch.Size) -> None:
    if not shape:
        message = f"{function}: the tensor must have a first dimension, got a scalar"
        raise ShapeError(message)


def gather_along_first_dim(
    inp: torch.Tensor, process_group: Any, async_op: bool = False, quantizer: Any = None
) -> tuple[torch.Tensor, Handle]:
    """Concatenate the tensors of all ranks along the first dimension.

    Parameters
    ----------
    inp : torch.Tensor
        ``(rows, ...)``, of the same shape on all ranks.
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
        None if there is nothing to wait for.

    Raises
    ------
    UnsupportedError
        For a quantizer.
    ShapeError
        If several ranks gather a scalar.

    See Also
    --------
    te_fast.pytorch.distributed.reduce_scatter_along_first_dim : the inverse, with a sum.

    Examples
    --------
    With one rank the result is the input:

    >>> import torch
    >>> import te_fast.pytorch as te
    >>> whole, handle = te.distributed.gather_along_first_dim(torch.ones(4, 8), None)
    >>> tuple(whole.shape), handle
    ((4, 8), None)
    """
    if quantizer is not None:
        message = "gather_along_first_dim: quantizer is not supported yet; gather, then quantise"
        raise UnsupportedError(message)
    check_is_group("gather_along_first_dim", "process_group", process_group)
    size = get_distributed_world_size(process_group)
    if size == 1:
        return inp, None
    return gather_of(size, inp, process_group, async_op=async_op)


def gather_of(
    size: int, inp: torch.Tensor, group: Any, *, async_op: bool
) -> tuple[torch.Tensor, Handle]:
    """Do the same among `size` ranks, which are several."""
    shape = inp.shape
    _check_has_rows("gather_along_first_dim", shape)
    inp = inp.contiguous()
    out = inp.new_empty((shape[0] * size, *shape[1:]))
    if inp.numel() == 0:
        return out, None
    return out, torch.distributed.all_gather_into_tensor(out, inp, group=group, async_op=async_op)


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: Any, async_op: bool = False
) -> tuple[torch.Tensor, Handle]:
    """Sum the tensors of all ranks, and keep this rank's share along the first dimension.

    Parameters
    ----------
    inp : torch.Tensor
        ``(ranks · rows, ...)``, of the same shape on all ranks.
    tp_group : torch.distributed.ProcessGroup
        The ranks; None is all.
    async_op : bool, default = False
        Return at once, with a handle to ``wait()`` for.

    Returns
    -------
    torch.Tensor
        ``(rows, ...)``.
    handle or None
        None if there is nothing to wait for.

    Raises
    ------
    ShapeError
        If the first dimension cannot be divided among the ranks, or there is none.

    See Also
    --------
    te_fast.pytorch.distributed.gather_along_first_dim : the inverse.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> share, handle = te.distributed.reduce_scatter_along_first_dim(torch.ones(4, 8), None)
    >>> tuple(share.shape), handle
    ((4, 8), None)
    """
    check_is_group("reduce_scatter_along_first_dim", "tp_group", tp_group)
    size = get_distributed_world_size(tp_group)
    if size == 1:
        return inp, None
    return reduce_scatter_of(size, inp, tp_group, async_op=async_op)


def reduce_scatter_of(
    size: int, inp: torch.Tensor, group: Any, *, async_op: bool
) -> tuple[torch.Tensor, Handle]:
    """Do the same among `size` ranks, which are several."""
    shape = inp.shape
    _check_has_rows("reduce_scatter_along_first_dim", shape)
    check_rows(shape[0], size, "reduce_scatter_along_first_dim")
    inp = inp.contiguous()
    out = inp.new_empty((shape[0] // size, *shape[1:]))
    if inp.numel() == 0:
        return out, None
    return out, torch.distributed.reduce_scatter_tensor(out, inp, group=group, async_op=async_op)


def allreduce(
    inp: torch.Tensor, tp_group: Any = None, async_op: bool = False
) -> tuple[torch.Tensor, Handle]:
    """Sum the tensors of all ranks, in the memory of `inp`.

    Parameters
    ----------
    inp : torch.Tensor
        A contiguous tensor of the same shape on all ranks.
    tp_group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.
    async_op : bool, default = False
        Return at once, with a handle to ``wait()`` for.

    Returns
    -------
    torch.Tensor
        `inp`.
    handle or None
        None if there is nothing to wait for.

    See Also
    --------
    te_fast.pytorch.distributed.reduce_scatter_along_first_dim : each rank keeps its share of the sum.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> total, handle = te.distributed.allreduce(torch.ones(2))
    >>> total.tolist()
    [1.0, 1.0]
    """
    check_is_group("allreduce", "tp_group", tp_group)
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
        Return a copy instead of a view of `tensor`.

    Returns
    -------
    torch.Tensor
        ``(elements / ranks,)``.

    Raises
    ------
    ShapeError
        If the elements cannot be divided among the ranks.

    See Also
    --------
    te_fast.pytorch.distributed.gather_split_1d_tensor : the inverse.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> te.distributed.split_tensor_into_1d_equal_chunks(torch.zeros(2, 2), None).shape
    torch.Size([4])
    """
    check_is_group("split_tensor_into_1d_equal_chunks", "tp_group", tp_group)
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
    """Gather the shares of all ranks, the inverse of :func:`split_tensor_into_1d_equal_chunks`.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(elements / ranks,)``.
    tp_group : torch.distributed.ProcessGroup
        The ranks; None is all.

    See Also
    --------
    te_fast.pytorch.distributed.split_tensor_into_1d_equal_chunks : the inverse.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> te.distributed.gather_split_1d_tensor(torch.zeros(4), None).shape
    torch.Size([4])
    """
    return gather_along_first_dim(tensor, tp_group)[0]


def mark_share(tensor: Any, is_parallel: bool, *, dim: int, stride: int) -> None:
    """Mark a parameter, which may be marked already, as :func:`set_tensor_model_parallel_attributes` does."""
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride


def set_tensor_model_parallel_attributes(
    tensor: Any, is_parallel: bool, dim: int, stride: int
) -> None:
    """Mark a parameter that ranks share, with Megatron-LM's attributes.

    Parameters
    ----------
    tensor : torch.Tensor
        The parameter.
    is_parallel : bool
        Whether ranks share it.
    dim, stride : int
        The dimension along which it is split, and the stride of the split.

    Raises
    ------
    StateError
        If the parameter has one of the attributes already.

    See Also
    --------
    te_fast.pytorch.Linear : marks its own parameters.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> te.distributed.set_tensor_model_parallel_attributes(weight, True, dim=0, stride=1)
    >>> weight.partition_dim
    0
    """
    names = ("tensor_model_parallel", "partition_dim", "partition_stride")
    found = [name for name in names if hasattr(tensor, name)]
    if found:
        message = (
            f"set_tensor_model_parallel_attributes: the tensor is marked already, by {', '.join(found)}; delete these "
            "attributes to mark it anew"
        )
        raise StateError(message)
    mark_share(tensor, is_parallel, dim=dim, stride=stride)
