"""Gradients that go into ``main_grad`` of their parameters, and autograd's stand-ins for them."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import DtypeError, ShapeError, StateError

_dummy_wgrads: dict[tuple[Any, ...], torch.Tensor] = {}


def get_dummy_wgrad(
    shape: list[int],
    dtype: torch.dtype,
    zero: bool = False,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return a stand-in for a weight gradient that went into ``main_grad``; there is one per shape, type and device.

    Parameters
    ----------
    shape : list of int
        Shape of the weight.
    dtype : torch.dtype
        Type of the weight.
    zero : bool, default = False
        Fill it with zeros.
    device : torch.device or str, optional
        Device of the weight; by default the current GPU, or the CPU without a GPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (tuple(shape), dtype, device)
    if key not in _dummy_wgrads:
        _dummy_wgrads[key] = torch.empty(tuple(shape), dtype=dtype, device=device)
    dummy = _dummy_wgrads[key]
    if zero:
        dummy.fill_(0)
    return dummy.detach()


def dummy_wgrad_for(weight: torch.Tensor) -> torch.Tensor:
    """Return autograd's stand-in for the gradient of a weight with ``grad_added_to_main_grad``."""
    zero = getattr(weight, "zero_out_wgrad", False)
    return get_dummy_wgrad(list(weight.shape), weight.dtype, zero, weight.device)


def main_grad_of(parameter: torch.Tensor, layer: str) -> torch.Tensor:
    """Return the buffer that a parameter's gradient is added to.

    Parameters
    ----------
    parameter : torch.Tensor
        The parameter.
    layer : str
        Name of the layer or operation, for messages.

    Raises
    ------
    StateError
        If there is no buffer.
    DtypeError
        If the buffer is no tensor.
    ShapeError
        If the buffer cannot take the gradient.
    """
    if hasattr(parameter, "__fsdp_param__"):
        parameter.main_grad = parameter.get_main_grad()  # type: ignore[attr-defined]
    grad = getattr(parameter, "main_grad", None)
    if grad is None:
        message = (
            f"{layer}: linear: fuse_wgrad_accumulation=True needs weight.main_grad; set it before backward, or "
            "construct the layer without"
        )
        raise StateError(message)
    if not isinstance(grad, torch.Tensor):
        message = f"{layer}: linear: main_grad must be a tensor, got {type(grad).__name__}; set the weight's buffer"
        raise DtypeError(message)
    fits = grad.shape == parameter.shape and grad.device == parameter.device
    # A view with gaps is refused as in FP8, where one product adds to the whole buffer.
    if not (fits and grad.is_floating_point() and grad.is_contiguous()):
        contiguous = "" if grad.is_contiguous() else f" and strides {list(grad.stride())}"
        message = (
            f"{layer}: linear: main_grad must be a contiguous float tensor of shape {list(parameter.shape)} on "
            f"{parameter.device}, got {grad.dtype} of shape {list(grad.shape)}{contiguous} on {grad.device}"
        )
        raise ShapeError(message)
    return grad


def give(
    parameter: torch.Tensor, grad: torch.Tensor, layer: str, *, fuse: bool, overwrite: bool
) -> torch.Tensor | None:
    """Give a computed gradient to a parameter.

    The gradient goes into ``main_grad`` with `fuse`, else into ``.grad``. Errors name the `layer`. Returns the gradient
    for autograd.
    """
    if not fuse:
        if parameter.grad is None:
            parameter.grad = grad.to(parameter.dtype)
        else:
            parameter.grad += grad
        return None
    main_grad = main_grad_of(parameter, layer)
    if overwrite or getattr(parameter, "overwrite_main_grad", False):
        main_grad.copy_(grad)
    else:
        main_grad.add_(grad)
    return after_main_grad(parameter)


def after_main_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return autograd's gradient for a parameter whose gradient goes into ``main_grad``.

    If the parameter has ``grad_added_to_main_grad``, the attribute becomes true and autograd gets a dummy gradient, so
    that hooks run. Otherwise autograd gets None.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return dummy_wgrad_for(parameter)
