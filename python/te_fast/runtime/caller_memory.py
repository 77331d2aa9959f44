"""Memory of the caller's for a result or a gradient: its check, and copies into it where no program writes it."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import ArgumentError, DtypeError, ShapeError
from te_fast.runtime.second_order import differentiable_once


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and the last address of a tensor's elements, the last exclusive."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum([(size - 1) * stride for size, stride in steps])
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _is_shared(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(other) not in (torch.Tensor, torch.nn.Parameter):
        return False  # it keeps its values elsewhere
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (begin, end), (other_begin, other_end) = _range(one), _range(other)
    return begin < other_end and other_begin < end


def check_buffer(
    layer: str,
    name: str,
    buffer: Any,
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype | None,
    inp: torch.Tensor,
) -> None:
    """Raise unless a call can write to a buffer.

    Parameters
    ----------
    layer : str
        For messages.
    name : str
        The argument, for messages.
    buffer : object
        The buffer.
    shapes : tuple of tuple of int
        Shapes that it may have.
    dtype : torch.dtype, optional
        Its type; None leaves the check to the program.
    inp : torch.Tensor
        The input of the call: on the buffer's device, with other memory.

    Raises
    ------
    DtypeError
        If it is no tensor.
    ShapeError
        If shape, type, device or layout do not fit.
    ArgumentError
        If it requires a gradient, or shares memory with the input, which backward reads.
    """
    if not isinstance(buffer, torch.Tensor):
        message = f"{layer}: {name} must be a torch.Tensor, got {type(buffer).__name__}"
        raise DtypeError(message)
    fits = tuple(buffer.shape) in shapes and dtype in (None, buffer.dtype)
    if not (fits and buffer.device == inp.device and buffer.is_contiguous()):
        kind = "" if dtype is None else f"{dtype} "
        message = (
            f"{layer}: {name}, a buffer of the caller's, must be a contiguous {kind}tensor of shape {list(shapes[0])} "
            f"on {inp.device}, got {buffer.dtype} of shape {list(buffer.shape)} on {buffer.device}"
        )
        raise ShapeError(message)
    if buffer.requires_grad:
        message = f"{layer}: {name} must not require a gradient; give its detach()"
        raise ArgumentError(message)
    if _is_shared(buffer, inp):
        message = f"{layer}: {name} must not share memory with the input, which backward reads; give other memory"
        raise ArgumentError(message)


class _CopyResult(torch.autograd.Function):
    """Arguments: result, buffer. Returns the buffer's memory."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        del ctx
        return buffer.copy_(result.view_as(buffer)).view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        del ctx
        return grad, None


class _CopyGradient(torch.autograd.Function):
    """Arguments: input, buffer. Returns the input, whose gradient lies in the buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    @differentiable_once("dgrad_out or grad_input, memory of the caller's")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.buffer.copy_(grad.view_as(ctx.buffer)).view_as(grad), None


def result_in(result: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return a result copied into a buffer."""
    made: torch.Tensor = _CopyResult.apply(result, buffer)
    return made


def gradient_in(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return an input whose gradient is copied into a buffer; the input itself if it wants none."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    made: torch.Tensor = _CopyGradient.apply(x, buffer)
    return made
