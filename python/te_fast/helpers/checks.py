"""Questions and checks of tensors, context managers and trackers of random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from te_fast.errors import ArgumentError, DtypeError, ShapeError, StateError


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Tell whether a tensor requires a gradient.

    Parameters
    ----------
    *tensors : torch.Tensor or None
        Tensors of any shape and type.

    Returns
    -------
    bool
        Whether at least one of them does.

    See Also
    --------
    needs_quantized_gemm : Another question about an operand.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import requires_grad
    >>> requires_grad(None, torch.ones(2), torch.ones(2, requires_grad=True))
    True
    """
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def check_dim_for_fp8_exec(tensor: torch.Tensor) -> bool:
    """Tell whether FP8 products take a matrix as it is.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape.

    Returns
    -------
    bool
        Whether it has two dimensions, a multiple of 8 rows and a multiple of 16 columns.

    See Also
    --------
    assert_dim_for_fp8_exec : Raises instead.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import check_dim_for_fp8_exec
    >>> check_dim_for_fp8_exec(torch.ones(8, 16)), check_dim_for_fp8_exec(torch.ones(4, 16))
    (True, False)
    """
    return tensor.dim() == 2 and tensor.size(0) % 8 == 0 and tensor.size(1) % 16 == 0


def assert_dim_for_fp8_exec(*tensors: torch.Tensor) -> None:
    """Raise unless FP8 products take tensors as they are.

    Parameters
    ----------
    *tensors : torch.Tensor
        ``(..., columns)``.

    Raises
    ------
    ShapeError
        If the product of all dimensions but the last is no multiple of 8, or the last one no multiple of 16.

    See Also
    --------
    check_dim_for_fp8_exec : Answers instead.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import assert_dim_for_fp8_exec
    >>> assert_dim_for_fp8_exec(torch.ones(2, 4, 16), torch.ones(8, 32))
    """
    for tensor in tensors:
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        if rows % 8 != 0 or columns % 16 != 0:
            message = (
                "assert_dim_for_fp8_exec: expected rows that are a multiple of 8 and columns that are a multiple of "
                f"16, got {rows} rows and {columns} columns in shape {list(tensor.shape)}; pad the tensor"
            )
            raise ShapeError(message)


def needs_quantized_gemm(obj: Any, rowwise: bool = True) -> bool:
    """Tell whether an operand is quantised: anything but a plain tensor or parameter.

    Parameters
    ----------
    obj : Any
        The operand.
    rowwise : bool, default = True
        Chooses a layout of tensors of Transformer Engine's debug tools, which te_fast does not have; both answers are
        the same here.

    See Also
    --------
    check_dim_for_fp8_exec : Whether its shape fits.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import needs_quantized_gemm
    >>> needs_quantized_gemm(torch.ones(2))
    False
    """
    del rowwise
    return type(obj) not in (torch.Tensor, torch.nn.Parameter)


def validate_ctx_manager(ctx: Callable[[], Any]) -> None:
    """Raise unless a function returns a context manager; it is called, entered and left once.

    Parameters
    ----------
    ctx : callable
        Takes no arguments.

    Raises
    ------
    ArgumentError
        With the error of the call, the entry or the exit as its cause.

    See Also
    --------
    validate_rng_states_func : Checks a tracker's ``fork`` by it.

    Examples
    --------
    >>> from contextlib import nullcontext
    >>> from te_fast.pytorch.utils import validate_ctx_manager
    >>> validate_ctx_manager(nullcontext)
    """
    try:
        with ctx():
            pass
    except Exception as error:
        message = f"validate_ctx_manager: expected a function that returns a context manager, got {ctx!r}: {error}"
        raise ArgumentError(message) from error


def validate_rng_states_func(get_rng_tracker: Callable[[], Any]) -> None:
    """Raise unless a function returns a tracker of random numbers.

    Parameters
    ----------
    get_rng_tracker : callable
        Takes no arguments; its result must have the methods ``get_states``, ``set_states`` and ``fork``.

    Raises
    ------
    DtypeError
        If it is no function, or the tracker lacks a method.
    StateError
        If the call fails.
    ArgumentError
        If ``fork()`` is no context manager.

    See Also
    --------
    te_fast.pytorch.CudaRNGStatesTracker : Such a tracker.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.utils import validate_rng_states_func
    >>> tracker = te.CudaRNGStatesTracker()
    >>> try:
    ...     validate_rng_states_func(tracker)
    ... except TypeError as error:
    ...     print("no function")
    no function
    """
    name = "validate_rng_states_func"
    if not callable(get_rng_tracker):
        message = (
            f"{name}: get_rng_tracker must be a function, got {type(get_rng_tracker).__name__}"
        )
        raise DtypeError(message)
    try:
        tracker = get_rng_tracker()
    except Exception as error:
        message = f"{name}: get_rng_tracker() has failed: {error}"
        raise StateError(message) from error
    for method in ("get_states", "set_states", "fork"):
        if not callable(getattr(tracker, method, None)):
            message = f"{name}: the tracker must have a method {method}, which {type(tracker).__name__} lacks"
            raise DtypeError(message)
    validate_ctx_manager(tracker.fork)


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """Return a tensor that is no view; a view would keep the memory of its base alive.

    Parameters
    ----------
    tensor : torch.Tensor or list
        A tensor or a list of tensors; anything else is returned unchecked.
    extra_msg : str, optional
        Added to the message.

    Returns
    -------
    torch.Tensor or list
        What was given.

    Raises
    ------
    ArgumentError
        If a tensor is a view.

    See Also
    --------
    safely_set_viewless_tensor_data : Checks by it.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import assert_viewless_tensor
    >>> assert_viewless_tensor(torch.ones(2))
    tensor([1., 1.])
    """
    if isinstance(tensor, list):
        return [assert_viewless_tensor(each, extra_msg) for each in tensor]
    if isinstance(tensor, torch.Tensor) and tensor._base is not None:
        message = (
            f"assert_viewless_tensor: expected a tensor that is no view, got a view {list(tensor.shape)} of a tensor "
            f"{list(tensor._base.shape)}, whose memory it would keep; give a clone"
        )
        raise ArgumentError(f"{message}. {extra_msg}" if extra_msg else message)
    return tensor
