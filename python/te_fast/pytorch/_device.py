"""The device check, as users of Transformer Engine's PR 2146 know it."""

from __future__ import annotations

from te_fast.pytorch import _ops

__all__ = ["set_cuda_device_every_batch", "should_set_cuda_device_every_batch"]


def should_set_cuda_device_every_batch() -> bool:
    """Tell whether each forward makes its tensors' device the current one.

    The environment variable ``NVTE_SET_CUDA_DEVICE=0`` turns it off at start.
    """
    checks = bool(_ops.native.set_check_device(True))
    _ops.native.set_check_device(checks)
    return checks


def set_cuda_device_every_batch(enabled: bool) -> None:
    """Choose whether each forward makes its tensors' device the current one.

    The check compares two numbers and costs some 10 ns; without it, tensors on a device that is not
    the current one fail.

    Parameters
    ----------
    enabled : bool
        Whether to.
    """
    _ops.native.set_check_device(bool(enabled))
