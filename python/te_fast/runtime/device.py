"""Devices of parameters, and the switch of the current device in a forward."""

from __future__ import annotations

import torch

from te_fast.errors import DeviceError, DtypeError
from te_fast.runtime import native
from te_fast.runtime.support import driver_problem


def should_set_cuda_device_every_batch() -> bool:
    """Tell whether each forward makes its tensors' device the current one.

    The environment variable ``NVTE_SET_CUDA_DEVICE=0`` turns it off at start.

    See Also
    --------
    set_cuda_device_every_batch : Chooses it.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> te.should_set_cuda_device_every_batch()
    True
    """
    checks = bool(native.set_check_device(True))
    native.set_check_device(checks)
    return checks


def set_cuda_device_every_batch(enabled: bool) -> None:
    """Choose whether each forward makes its tensors' device the current one.

    The check compares two numbers and costs some 10 ns; without it, tensors on a device that is not
    the current one fail.

    Parameters
    ----------
    enabled : bool
        Whether to.

    See Also
    --------
    should_set_cuda_device_every_batch : Returns the present setting.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> te.set_cuda_device_every_batch(True)
    >>> te.should_set_cuda_device_every_batch()
    True
    """
    native.set_check_device(bool(enabled))


def default_device() -> torch.device:
    """Return torch's default device, also in ``with torch.device(...)``, which torch 2.6 does not report."""
    try:
        return torch.empty(0).device
    except (AssertionError, RuntimeError):  # a GPU that cannot be used
        return torch.get_default_device()


def gpu_or_default() -> torch.device:
    """Return the current GPU; on a machine without one, torch's default device."""
    return torch.device("cuda") if torch.cuda.is_available() else default_device()


def check_device(device: torch.device | str | None, layer: str) -> torch.device:
    """Return a device for parameters; for None, torch's default device.

    Raises
    ------
    DeviceError
        If it names no such device, or is a GPU and no GPU can be used.
    DtypeError
        If it is no device or name.
    """
    try:
        chosen = default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        message = f"{layer}: device must be cuda, cuda:<number>, cpu or meta, got {device!r}"
        made = DtypeError if isinstance(error, TypeError) else DeviceError
        raise made(message) from None
    if chosen.type not in ("cuda", "cpu", "meta"):
        message = f"{layer}: device must be cuda, cpu or meta, got {chosen}"
        raise DeviceError(message)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        problem = driver_problem() or "torch sees no CUDA GPU"
        message = (
            f"{layer}: device={str(device)!r} was asked for. {problem}. Pass device='cpu' to run on "
            "the host backend, or 'meta' to defer"
        )
        raise DeviceError(message)
    return chosen
