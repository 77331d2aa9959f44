"""Facts of libraries and devices, with the names of Transformer Engine's extension."""

from __future__ import annotations

import ctypes

import torch

from te_fast.errors import DeviceError


def get_cublasLt_version() -> int:
    """Return the version of cuBLASLt, such as 120803.

    Raises
    ------
    DeviceError
        If there is none.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as error:
        message = f"get_cublasLt_version: {error}; install torch for CUDA"
        raise DeviceError(message) from error
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


def get_cudnn_version() -> int:
    """Return the version of cuDNN, such as 90701.

    Raises
    ------
    DeviceError
        If there is none.
    """
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None:
        message = "get_cudnn_version: this torch has no cuDNN; install torch for CUDA"
        raise DeviceError(message)
    return int(version)


def get_num_cublas_streams() -> int:
    """Return on how many streams products of one group run: one, the caller's."""
    return 1


def device_supports_multicast(device_id: int = -1) -> bool:
    """Return whether multicast may be used: never, since te_fast has no Userbuffers."""
    return False


def ubuf_built_with_mpi() -> bool:
    """Return whether Userbuffers use MPI: no, there are none."""
    return False


def nvte_built_with_cublasmp() -> bool:
    """Return whether products run on cuBLASMp: no."""
    return False


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Return the lowest and the highest priority of a stream.

    Parameters
    ----------
    device_id : int, default = -1
        Not used: torch's devices have one range.

    Raises
    ------
    DeviceError
        If there is no GPU.
    """
    if not torch.cuda.is_available():
        message = "get_stream_priority_range: there is no GPU"
        raise DeviceError(message)
    least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # a static method
    return int(least), int(greatest)
