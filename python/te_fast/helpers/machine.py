"""What the GPU and torch's libraries can do."""

from __future__ import annotations

import torch

from te_fast.errors import DeviceError
from te_fast.runtime.support import get_device_compute_capability, is_bf16_available


def is_bf16_compatible() -> bool:
    """Tell whether BF16 can run on the current GPU, or on the CPU of a machine without one.

    See Also
    --------
    te_fast.pytorch.is_bf16_available : The same, with a reason.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.utils import is_bf16_compatible
    >>> is_bf16_compatible() == te.is_bf16_available()
    True
    """
    return bool(is_bf16_available())


def is_non_tn_fp8_gemm_supported() -> bool:
    """Tell whether FP8 products of the current GPU read operands in either layout, so that none is transposed.

    Returns
    -------
    bool
        False up to Hopper and on the CPU.

    See Also
    --------
    te_fast.pytorch.get_device_compute_capability : What it follows from.

    Examples
    --------
    >>> from te_fast.pytorch.utils import is_non_tn_fp8_gemm_supported
    >>> is_non_tn_fp8_gemm_supported() in (True, False)
    True
    """
    capability = get_device_compute_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def get_cudnn_version() -> tuple[int, int, int]:
    """Return the version of the cuDNN that torch has loaded.

    Returns
    -------
    tuple of int
        Major, minor and patch version; ``(0, 0, 0)`` if torch has no cuDNN.

    See Also
    --------
    te_fast.pytorch.get_device_compute_capability : The same of the GPU.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> len(te.get_cudnn_version())
    3
    """
    version = torch.backends.cudnn.version() or 0
    # cuDNN 9 has a digit more for the minor version.
    major, rest = divmod(version, 1000 if version < 90000 else 10000)
    minor, patch = divmod(rest, 100)
    return major, minor, patch


get_cudnn_version._dynamo_marked_constant = True  # type: ignore[attr-defined]


def get_sm_count() -> int:
    """Return the number of multiprocessors of the current GPU.

    Raises
    ------
    DeviceError
        Without a GPU.

    See Also
    --------
    te_fast.pytorch.get_device_compute_capability : Another property of the GPU.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import get_sm_count
    >>> get_sm_count() if torch.cuda.is_available() else "no GPU"  # doctest: +SKIP
    """
    if not torch.cuda.is_available():
        message = "get_sm_count: the machine has no GPU that torch can use"
        raise DeviceError(message)
    current = torch.cuda.current_device()
    return int(torch.cuda.get_device_properties(current).multi_processor_count)
