"""Names the parameter that made a call fail: one that is gone, or that a tensor of another kind has replaced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_fast.errors import DeviceError, DtypeError, ShapeError
from te_fast.runtime.parameters import needed_parameter


def name_the_wrong_one(layer: Any, sizes: dict[str, tuple[int, ...]]) -> None:
    """Raise if a parameter of a layer is not what the constructor made; only calls that have failed ask.

    Parameters
    ----------
    layer : torch.nn.Module
        The layer; messages have its ``name``.
    sizes : dict
        The size of each parameter that the layer reads, by name.

    Raises
    ------
    MissingAttributeError
        If a parameter was deleted, or is None.
    DtypeError, ShapeError, DeviceError
        If it is no tensor, has another shape, or is on another device than the first parameter.
    """
    tensors = {name: _tensor(layer, name) for name in sizes}
    for name, size in sizes.items():
        if tuple(tensors[name].shape) != size:
            message = (
                f"{layer.name}: parameter {name} must have the shape {list(size)}, got {list(tensors[name].shape)}; "
                "assign one of that shape, or make a layer of other sizes"
            )
            raise ShapeError(message)
    _check_devices(layer, tensors.items())


def _tensor(layer: Any, name: str) -> torch.Tensor:
    parameter = needed_parameter(layer, name, layer.name, "layer")
    if not isinstance(parameter, torch.Tensor):
        message = (
            f"{layer.name}: parameter {name} must be a torch.Tensor, got {type(parameter).__name__}"
        )
        raise DtypeError(message)
    return parameter


def _check_devices(layer: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    (first, one), *others = tensors
    for name, tensor in others:
        if tensor.device != one.device:
            message = (
                f"{layer.name}: parameter {name} is on {tensor.device}, and parameter {first} on {one.device}; move "
                "one, or the whole layer (layer.to(device))"
            )
            raise DeviceError(message)
