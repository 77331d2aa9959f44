"""Devices, types and process groups where the user gives none."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from te_fast.errors import DeviceError, RanksError
from te_fast.runtime.device import default_device


def _current_gpu(function: str) -> torch.device:
    if not torch.cuda.is_available():
        message = f"{function}: a CUDA device was asked for, and torch sees no CUDA GPU"
        raise DeviceError(message)
    return torch.device("cuda", torch.cuda.current_device())


def canonicalize_device(device: torch.device | str | None) -> torch.device:
    """Return a device with its number.

    Parameters
    ----------
    device : torch.device or str, optional
        By default torch's default device if that is a GPU, else the current GPU; on a machine without a GPU torch's
        default device.

    Returns
    -------
    torch.device
        A CUDA device has a number.

    Raises
    ------
    DeviceError
        If it is a CUDA device without a number and there is no GPU.

    See Also
    --------
    devices_match : Compares two of them.

    Examples
    --------
    >>> from te_fast.pytorch.utils import canonicalize_device
    >>> canonicalize_device("cpu")
    device(type='cpu')
    """
    if device is None:
        found = default_device()
        if found.type != "cuda" and torch.cuda.is_available():
            return _current_gpu("canonicalize_device")
    else:
        found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return _current_gpu("canonicalize_device")
    return found


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return a type; for None, torch's default type.

    Parameters
    ----------
    dtype : torch.dtype, optional
        The type.

    See Also
    --------
    canonicalize_device : The same of devices.

    Examples
    --------
    >>> from te_fast.pytorch.utils import canonicalize_dtype
    >>> canonicalize_dtype(None)
    torch.float32
    """
    return torch.get_default_dtype() if dtype is None else dtype


def devices_match(device1: torch.device | str, device2: torch.device | str) -> bool:
    """Tell whether two devices are the same; a CUDA device without a number is the current one.

    Parameters
    ----------
    device1, device2 : torch.device or str
        The devices.

    Raises
    ------
    DeviceError
        If the number of the current GPU matters and there is no GPU.

    See Also
    --------
    canonicalize_device : Returns the number.

    Examples
    --------
    >>> from te_fast.pytorch.utils import devices_match
    >>> devices_match("cpu", "cpu"), devices_match("cpu", "cuda")
    (True, False)
    """
    first, second = torch.device(device1), torch.device(device2)
    if first.type != "cuda" or second.type != "cuda" or first.index == second.index:
        return first == second
    numbers = {
        _current_gpu("devices_match").index if each.index is None else each.index
        for each in (first, second)
    }
    return len(numbers) == 1


def canonicalize_process_group(group: Any) -> Any:
    """Return a process group; for None, the default group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The group.

    Raises
    ------
    RanksError
        If there is no default group.

    See Also
    --------
    torch.distributed.init_process_group : Makes the default group.

    Examples
    --------
    >>> from te_fast.pytorch.utils import canonicalize_process_group
    >>> canonicalize_process_group("a group")
    'a group'
    """
    if group is not None:
        return group
    # torch without torch.distributed has no such function.
    if not getattr(torch.distributed, "is_initialized", lambda: False)():
        message = "canonicalize_process_group: there is no default group; call init_process_group of torch.distributed"
        raise RanksError(message)
    return torch.distributed.group.WORLD


#: ``torch.autocast`` of the GPU.
gpu_autocast_ctx: Any = partial(torch.amp.autocast, device_type="cuda")


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """Return the type that ``torch.autocast`` casts to on the GPU.

    See Also
    --------
    torch.get_autocast_dtype : The same of any device.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import torch_get_autocast_gpu_dtype
    >>> torch_get_autocast_gpu_dtype() is torch.get_autocast_dtype("cuda")
    True
    """
    return torch.get_autocast_dtype("cuda")
