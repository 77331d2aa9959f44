"""Helpers of ops: device and type of parameters, the type of arithmetic, and groups of ranks."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import torch

from te_fast.errors import ArgumentError, DtypeError, RanksError
from te_fast.runtime.collectives import check_is_group, get_distributed_world_size
from te_fast.runtime.device import check_device, default_device

#: Types that programs compute in.
NATIVE_TYPES = (torch.float32, torch.float16, torch.bfloat16)


#: Keyword arguments of the first and the last operation with experts: the caller's memory.
OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"


def parameter_device(device: torch.device | str | None, op: str) -> torch.device:
    """Return the device of an op's parameters: by default the GPU, or the CPU without one."""
    if device is None:
        device = default_device()
        if device.type == "cpu" and torch.cuda.is_available():
            device = torch.device("cuda")
    return check_device(device, op)


def parameter_dtype(dtype: torch.dtype | None, op: str) -> torch.dtype:
    """Return the type of an op's parameters.

    Raises
    ------
    ArgumentError
        If ops cannot compute in it.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in NATIVE_TYPES:
        message = f"{op}: dtype must be torch.float32, float16 or bfloat16, got {dtype}"
        raise ArgumentError(message)
    return dtype


def parameter_options(
    device: torch.device | str | None, dtype: torch.dtype | None, op: str
) -> dict[str, Any]:
    """Return both for ``torch.empty``."""
    return {"device": parameter_device(device, op), "dtype": parameter_dtype(dtype, op)}


def sizes_of(sizes: Any, op: str, argument: str) -> tuple[int, ...]:
    """Return an iterable of integers as a tuple.

    Raises
    ------
    ArgumentError
        If it is none.
    """
    try:
        return tuple([operator.index(size) for size in sizes])
    except TypeError:
        message = f"{op}: {argument} must be integers, got {type(sizes).__name__} {sizes!r}"
        raise ArgumentError(message) from None


def refuse_type(op: str, x: torch.Tensor, wanted: str) -> NoReturn:
    """Raise for an input of a type that torch's own functions refuse, or round without a word.

    Raises
    ------
    DtypeError
        With the type.
    """
    message = f"{op}: the input must be of a {wanted} type, got {x.dtype}; convert it by .float()"
    raise DtypeError(message)


def to_real(op: torch.nn.Module, name: str) -> torch.Tensor:
    """Return a parameter of an op; a parameter on the meta device gets memory first."""
    parameter: torch.Tensor = getattr(op, name)
    if not parameter.is_meta:
        return parameter
    device = parameter_device(None, type(op).__name__)
    made = torch.nn.Parameter(
        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
    )
    op.register_parameter(name, made)
    return made


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the type of ``torch.autocast`` on the device of `x`; None if it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def size_of_ranks(group: Any, op: str, argument: str) -> int:
    """Return the number of ranks of a process group; None is the group of all ranks.

    Raises
    ------
    DtypeError
        If it is no process group.
    RanksError
        If this rank is not in it.
    """
    check_is_group(op, argument, group)
    size = get_distributed_world_size(group)
    if size < 1:
        message = f"{op}: this rank is not in {argument}; give the group that has it"
        raise RanksError(message)
    return size
