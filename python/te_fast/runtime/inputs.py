"""Checks the inputs of layers."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import DeviceError, DtypeError, ShapeError, UnsupportedError


def refuse_nested(
    layer: Any, inp: Any, remedy: str = "the rows as one tensor, (rows, features)"
) -> None:
    """Raise if an input is a nested tensor, which native programs cannot read.

    Parameters
    ----------
    layer : torch.nn.Module
        The layer.
    inp : object
        The input.
    remedy : str, optional
        What to pass instead.

    Raises
    ------
    UnsupportedError
        With the layer's ``name``.
    """
    if isinstance(inp, torch.Tensor) and inp.is_nested:
        message = f"{layer.name}: nested tensors are not supported here; pass {remedy}"
        raise UnsupportedError(message)


def check_input(
    layer: Any,
    inp: Any,
    name: str,
    features: int,
    device: torch.device,
) -> None:
    """Raise unless an input is a tensor of the layer's size, on the device of its parameters.

    Parameters
    ----------
    layer : torch.nn.Module
        The layer; messages have its ``name``. A trace guards the name only if it raises.
    inp : object
        The input.
    name : str
        Name of the argument that gives the size, for messages.
    features : int
        The size of the last dimension.
    device : torch.device
        Where the parameters are.

    Raises
    ------
    DtypeError
        If it is no tensor.
    UnsupportedError
        If it is a nested tensor without a shape.
    ShapeError
        If it has another last dimension.
    DeviceError
        If it is on another device, or the parameters are on the meta device.
    """
    if not isinstance(inp, torch.Tensor):
        message = f"{layer.name}: the input must be a torch.Tensor, got {type(inp).__name__}"
        raise DtypeError(message)
    if inp.is_nested and inp.layout is torch.strided:  # it has no shape
        refuse_nested(layer, inp)
    if inp.dim() == 0 or inp.shape[-1] != features:
        message = (
            f"{layer.name}: the input's last dimension must be {name} = {features}, got a tensor "
            f"of shape {list(inp.shape)}"
        )
        raise ShapeError(message)
    if device.type == "meta":
        message = (
            f"{layer.name}: the parameters are on the meta device; call reset_parameters(), or "
            "to_empty() and load a checkpoint, before a forward"
        )
        raise DeviceError(message)
    if inp.device != device:
        message = (
            f"{layer.name}: the input must be on {device}, where the layer's weight is (move one "
            f"with .to()), got {inp.device}"
        )
        raise DeviceError(message)
