"""Functions over lists of tensors: norms, and copies with a factor.

They call torch's ``_foreach`` functions, under the names that code for Transformer Engine or apex uses. They never wait
for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_fast.errors import ListsError
from te_fast.runtime.arguments import check_numbers, check_tensors
from te_fast.tensor.dtensors import local_part

Lists = Sequence[list[torch.Tensor]]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: Types of copies: a copy to integers would cut numbers off.
_COPIED = (*_FLOATS, torch.float64)


def are_lists(tensor_lists: Any) -> bool:
    """Tell whether this is a list of lists of tensors."""
    kinds = (list, tuple)
    return isinstance(tensor_lists, kinds) and all(
        isinstance(tensors, kinds) and all(isinstance(one, torch.Tensor) for one in tensors)
        for tensors in tensor_lists
    )


def _check_one(name: str, tensor_lists: Any, **tensors: Any) -> None:
    if not are_lists(tensor_lists) or len(tensor_lists) == 0:
        message = f"{name}: expected a list of one list of tensors"
        raise ListsError(message)
    check_tensors(name, **tensors)
    others = [tensor.dtype for tensor in tensor_lists[0] if tensor.dtype not in _FLOATS]
    if others:
        message = f"{name}: tensors must be FP32, FP16 or BF16, got {others[0]}"
        raise ListsError(message)


class MultiTensorApply:
    """Calls a function over lists of tensors.

    Parameters
    ----------
    chunk_size : int
        Passed to the function; te_fast's own functions do not need it.

    See Also
    --------
    multi_tensor_applier : The instance that Megatron-LM imports.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm
    >>> flag = torch.zeros(1, dtype=torch.int)
    >>> norm, _ = multi_tensor_applier(multi_tensor_l2norm, flag, [[torch.ones(9), torch.ones(16)]])
    >>> norm
    tensor([5.])
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Lists,
        *args: Any,
    ) -> Any:
        """Call ``op(chunk_size, noop_flag_buffer, lists, *args)`` on the tensors that are not empty.

        Parameters
        ----------
        op : Callable
            The function.
        noop_flag_buffer : torch.Tensor
            One integer, which functions set to 1 if a value is not finite.
        tensor_lists : list of list of torch.Tensor
            Lists of one length. For a ``DTensor`` the local part is used.
        *args
            The function's own arguments.

        Returns
        -------
        object
            The function's result; ``None`` if there is no tensor.

        Raises
        ------
        ListsError
            If the lists are not equally long.
        """
        lengths = [len(tensors) for tensors in tensor_lists]
        if len(set(lengths)) > 1:
            message = f"multi_tensor_applier: the lists must be equally long, got lengths {lengths}"
            raise ListsError(message)
        rows = [row for row in zip(*tensor_lists, strict=True) if row[0].numel() > 0]
        if not rows:
            return None
        lists = [[local_part(tensor) for tensor in column] for column in zip(*rows, strict=True)]
        return op(self.chunk_size, noop_flag_buffer, lists, *args)


#: The instance that Transformer Engine's optimizers and Megatron-LM call.
multi_tensor_applier = MultiTensorApply(2048 * 32)


def _norms(
    tensors: list[torch.Tensor], per_tensor: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    if not tensors:
        nothing = torch.zeros(1, dtype=torch.float32, device=device)
        return nothing, nothing.new_empty(0)
    norms = torch.stack(list(torch._foreach_norm(tensors, 2, dtype=torch.float32)))
    total = torch.linalg.vector_norm(norms).reshape(1)
    return total, norms if per_tensor else norms.new_empty(0)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Euclidean norm over all tensors.

    Parameters
    ----------
    chunk_size : int
        Not used: torch's functions choose their own chunks.
    noop_flag : torch.Tensor
        Only its device is used, if there is no tensor: values that are not finite show in the norm.
    tensor_lists : list of list of torch.Tensor
        One list.
    per_tensor_python : bool, optional
        Return the norm of each tensor, too.

    Returns
    -------
    norm : torch.Tensor
        FP32 ``(1,)``.
    norms : torch.Tensor
        FP32 ``(tensors,)``, or ``(0,)``.

    Raises
    ------
    ListsError
        If there is no list of tensors.

    See Also
    --------
    multi_tensor_unscale_l2norm : The norm of the tensors times a factor.
    multi_tensor_applier : Calls functions over lists.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_l2norm
    >>> flag = torch.zeros(1, dtype=torch.int)
    >>> multi_tensor_l2norm(0, flag, [[torch.ones(9), torch.ones(16)]], per_tensor_python=True)
    (tensor([5.]), tensor([3., 4.]))
    """
    _check_one("multi_tensor_l2norm", tensor_lists, noop_flag=noop_flag)
    return _norms(tensor_lists[0], bool(per_tensor_python), noop_flag.device)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Euclidean norm over all tensors times a factor; the tensors stay as they are.

    Parameters
    ----------
    chunk_size, noop_flag, tensor_lists, per_tensor_python
        As for :func:`multi_tensor_l2norm`.
    inv_scale : torch.Tensor
        FP32 ``(1,)``, the factor.

    Returns
    -------
    norm : torch.Tensor
        FP32 ``(1,)``.
    norms : torch.Tensor
        FP32 ``(tensors,)``, or ``(0,)``.

    Raises
    ------
    ListsError
        If there is no list of tensors.

    See Also
    --------
    multi_tensor_l2norm : The norm of the tensors as they are.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_unscale_l2norm
    >>> flag = torch.zeros(1, dtype=torch.int)
    >>> norm, _ = multi_tensor_unscale_l2norm(0, flag, [[torch.ones(9)]], torch.tensor([0.5]))
    >>> norm
    tensor([1.5000])
    """
    tensors = {"noop_flag": noop_flag, "inv_scale": inv_scale}
    _check_one("multi_tensor_unscale_l2norm", tensor_lists, **tensors)
    total, norms = _norms(tensor_lists[0], bool(per_tensor_python), noop_flag.device)
    factor = inv_scale.float().reshape(()).abs()
    return total * factor, norms * factor


def _note_infinite(noop_flag: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Set the flag to 1 if an element is infinite or not a number."""
    tensors = [tensor for tensor in tensors if tensor.numel()]  # others have no maximum
    if not tensors:
        return
    largest = torch.stack(list(torch._foreach_norm(tensors, torch.inf, dtype=torch.float32)))
    noop_flag.masked_fill_(~largest.isfinite().all(), 1)


def _copy_times(tensor_lists: Lists, scale: float | torch.Tensor) -> None:
    """Write the elements of one list times a factor to the other; products are FP32, rounded once."""
    wide: list[torch.Tensor] = []
    narrow: list[tuple[torch.Tensor, torch.Tensor]] = []
    for source, target in zip(*tensor_lists, strict=True):
        if target.dtype is not torch.float32:
            narrow.append((source, target))
            continue
        if target is not source:
            target.copy_(source)
        wide.append(target)
    if wide:
        torch._foreach_mul_(wide, scale)
    # Of one dimension: a number, or a tensor of no dimensions, would be rounded to the type of the elements.
    factor = scale.reshape(1) if isinstance(scale, torch.Tensor) else None
    for source, target in narrow:
        if factor is None or factor.device != source.device:
            factor = torch.full((1,), float(scale), dtype=torch.float32, device=source.device)
        torch.mul(torch.atleast_1d(source), factor, out=torch.atleast_1d(target))


def _check_pair(name: str, tensor_lists: Lists, **tensors: Any) -> None:
    check_tensors(name, **tensors)
    if not are_lists(tensor_lists) or len(tensor_lists) != 2:
        got = len(tensor_lists) if are_lists(tensor_lists) else "no lists of tensors"
        message = f"{name}: expected two lists, from and to, got {got}"
        raise ListsError(message)
    others = {tensor.dtype for tensors in tensor_lists for tensor in tensors}.difference(_COPIED)
    if others:
        message = f"{name}: tensors must be FP32, FP16, BF16 or FP64, got {others.pop()}"
        raise ListsError(message)
    shapes = [[tensor.shape for tensor in tensors] for tensors in tensor_lists]
    if shapes[0] == shapes[1]:
        return
    sources, targets = ([list(shape) for shape in each] for each in shapes)
    message = (
        f"{name}: both lists must have tensors of the same shapes, got {sources} and {targets}"
    )
    raise ListsError(message)


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Write the tensors of one list, times a number, into those of another.

    Parameters
    ----------
    chunk_size : int
        Not used: torch's functions choose their own chunks.
    noop_flag : torch.Tensor
        One number; becomes 1 if an element that was read is infinite or not a number.
    tensor_lists : list of list of torch.Tensor
        From and to, which may be the same tensors, and of different types.
    scale : float
        The number.

    Raises
    ------
    ListsError
        If there are not two lists of floating-point tensors with the same shapes.

    See Also
    --------
    multi_tensor_scale_tensor : Takes the number from the device.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_scale
    >>> flag, target = torch.zeros(1, dtype=torch.int), torch.empty(2)
    >>> multi_tensor_scale(0, flag, [[torch.ones(2)], [target]], 0.5)
    >>> target, flag
    (tensor([0.5000, 0.5000]), tensor([0], dtype=torch.int32))
    """
    _check_pair("multi_tensor_scale", tensor_lists, noop_flag=noop_flag)
    check_numbers("multi_tensor_scale", scale=scale)
    _note_infinite(noop_flag, tensor_lists[0])
    if scale == 1.0 and tensor_lists[0]:
        torch._foreach_copy_(tensor_lists[1], tensor_lists[0])
    else:
        _copy_times(tensor_lists, float(scale))


@torch.no_grad()
def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """Write the tensors of one list, times a number on their device, into those of another.

    Parameters
    ----------
    chunk_size, tensor_lists
        As for :func:`multi_tensor_scale`.
    is_infinite : torch.Tensor
        One number; becomes 1 if an element that was read is infinite or not a number.
    scale : torch.Tensor
        FP32 ``(1,)``, the number.

    Raises
    ------
    ListsError
        If there are not two lists of floating-point tensors with the same shapes.

    See Also
    --------
    multi_tensor_scale : Takes a number of Python.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_scale_tensor
    >>> flag, target = torch.zeros(1, dtype=torch.int), torch.empty(2)
    >>> multi_tensor_scale_tensor(0, flag, [[torch.ones(2)], [target]], torch.tensor([0.5]))
    >>> target
    tensor([0.5000, 0.5000])
    """
    tensors = {"is_infinite": is_infinite, "scale": scale}
    _check_pair("multi_tensor_scale_tensor", tensor_lists, **tensors)
    _note_infinite(is_infinite, tensor_lists[0])
    _copy_times(tensor_lists, scale.reshape(()))
