"""Which recipes the machine can run.

A machine without a GPU runs FP8 on the host backend. With a GPU, the current device decides, as in
Transformer Engine; the answer is stored per device index, since GPUs of one process may differ.
"""

from __future__ import annotations

from functools import cache

import torch

from te_fast.errors import CudaError, DeviceError
from te_fast.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_fast.runtime import native

_HOST = (0, 0)
_NOT_YET = "{} is not supported by te_fast yet; use Float8CurrentScaling or DelayedScaling."


@cache
def _capability_of(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def gpus_differ() -> bool:
    """Return whether GPUs of this process differ in compute capability."""
    if not torch.cuda.is_available():
        return False
    return len({_capability_of(index) for index in range(torch.cuda.device_count())}) > 1


def kind_of_device() -> tuple[int, int] | None:
    """Return the capability of the current device if GPUs differ, else ``None``."""
    return get_device_compute_capability() if gpus_differ() else None


@cache
def driver_problem() -> str:
    """Return why the machine's CUDA driver cannot run te_fast's kernels; an empty string if it can.

    All GPUs share one driver.
    """
    try:
        native.cuda_driver_version()
    except CudaError as error:
        return str(error)
    return ""


def get_device_compute_capability() -> tuple[int, int]:
    """Return the compute capability of the current GPU.

    Returns
    -------
    tuple of int
        Major and minor version; ``(0, 0)`` on a machine without a GPU.

    See Also
    --------
    is_fp8_available : What follows from it.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> te.get_device_compute_capability() if torch.cuda.is_available() else "no GPU"  # doctest: +SKIP
    """
    if not torch.cuda.is_available():
        return _HOST
    return _capability_of(torch.cuda.current_device())


def check_fp8_support() -> tuple[bool, str]:
    """Return whether FP8 with one scale per tensor can run, and why not."""
    capability = get_device_compute_capability()
    if capability == _HOST:
        return True, ""
    if capability >= (8, 9):
        return not driver_problem(), driver_problem()
    return False, "Device compute capability 8.9 or higher required for FP8 execution."


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """Return whether FP8 block scaling can run, and why not."""
    capability = get_device_compute_capability()
    if capability == _HOST:
        return True, ""
    if capability >= (10, 0):
        return False, _NOT_YET.format("FP8 block scaling on compute capability 10.0 or higher")
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if capability >= (9, 0) and cuda >= (12, 9):
        return not driver_problem(), driver_problem()
    reason = "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."
    return False, reason


def check_mxfp8_support() -> tuple[bool, str]:
    """Return whether MXFP8 can run, and why not."""
    capability = get_device_compute_capability()
    if capability >= (12, 0):
        return False, "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
    if capability >= (10, 0):
        return False, _NOT_YET.format("MXFP8")
    return False, "Device compute capability 10.0 or higher required for MXFP8 execution."


def check_nvfp4_support() -> tuple[bool, str]:
    """Return whether NVFP4 can run, and why not."""
    if get_device_compute_capability() >= (10, 0):
        return False, _NOT_YET.format("NVFP4")
    return False, "Device compute capability 10.0 or higher required for NVFP4 execution."


def check_recipe_support(recipe: Recipe) -> None:
    """Raise unless the current device can run a recipe.

    Raises
    ------
    DeviceError
        With the reason. It is a ``RuntimeError``, as in Transformer Engine.

    Notes
    -----
    A :class:`CustomRecipe` passes: the recipes that its factory gives to layers are checked when these run.
    """
    if recipe.custom():
        return
    if recipe.float8_block_scaling():
        supported, reason = check_fp8_block_scaling_support()
    elif recipe.mxfp8():
        supported, reason = check_mxfp8_support()
    elif recipe.nvfp4():
        supported, reason = check_nvfp4_support()
    else:
        supported, reason = check_fp8_support()
    if not supported:
        raise DeviceError(reason)


def get_default_recipe() -> Recipe:
    """Return the default training recipe of the current device.

    Returns
    -------
    Recipe
        :class:`DelayedScaling` up to Hopper and on the CPU, :class:`Float8CurrentScaling` on newer GPUs, where
        Transformer Engine takes MXFP8 or the same.

    See Also
    --------
    autocast : Takes it without a recipe.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> type(te.get_default_recipe()).__name__
    'DelayedScaling'
    """
    if get_device_compute_capability() >= (10, 0):
        return Float8CurrentScaling()
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Return the multiple to which row counts of grouped operands must be padded.

    Parameters
    ----------
    recipe : Recipe
        Recipe of the operands.

    Returns
    -------
    int
        16 with one scale per tensor and in blocks of 128, 32 for MXFP8, 128 for NVFP4, or the number of a
        :class:`CustomRecipe`.

    See Also
    --------
    Fp8Padding : Pads to it.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> from te_fast.common import recipe
    >>> te.get_align_size_for_quantization(recipe.Float8BlockScaling())
    16
    """
    if recipe.custom():
        return int(recipe.quantization_alignment)  # type: ignore[attr-defined]
    if recipe.mxfp8():
        return 32
    return 128 if recipe.nvfp4() else 16


Answer = tuple[bool, str]


def is_fp8_available(return_reason: bool = False) -> bool | Answer:
    """Tell whether FP8 with one scale per tensor can run.

    Parameters
    ----------
    return_reason : bool, default = False
        Return ``(is_available, reason)``; the reason is empty where it is available.

    See Also
    --------
    is_fp8_block_scaling_available : The same for another format.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> available, reason = te.is_fp8_available(return_reason=True)
    >>> available or bool(reason)
    True
    """
    answer = check_fp8_support()
    return answer if return_reason else answer[0]


def is_mxfp8_available(return_reason: bool = False) -> bool | Answer:
    """Tell whether MXFP8 can run; the parameter is that of :func:`is_fp8_available`.

    See Also
    --------
    is_fp8_available : The same for another format.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> available, reason = te.is_mxfp8_available(return_reason=True)
    >>> available or bool(reason)
    True
    """
    answer = check_mxfp8_support()
    return answer if return_reason else answer[0]


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | Answer:
    """Tell whether FP8 block scaling can run; the parameter is that of :func:`is_fp8_available`.

    See Also
    --------
    is_fp8_available : The same for another format.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> available, reason = te.is_fp8_block_scaling_available(return_reason=True)
    >>> available or bool(reason)
    True
    """
    answer = check_fp8_block_scaling_support()
    return answer if return_reason else answer[0]


def is_nvfp4_available(return_reason: bool = False) -> bool | Answer:
    """Tell whether NVFP4 can run; the parameter is that of :func:`is_fp8_available`.

    See Also
    --------
    is_fp8_available : The same for another format.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> available, reason = te.is_nvfp4_available(return_reason=True)
    >>> available or bool(reason)
    True
    """
    answer = check_nvfp4_support()
    return answer if return_reason else answer[0]


def is_bf16_available(return_reason: bool = False) -> bool | Answer:
    """Tell whether BF16 can run; the parameter is that of :func:`is_fp8_available`.

    See Also
    --------
    is_fp8_available : The same for another format.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> available, reason = te.is_bf16_available(return_reason=True)
    >>> available or bool(reason)
    True
    """
    capability = get_device_compute_capability()
    available = capability == _HOST or capability >= (8, 0)
    reason = (
        "" if available else "BF16 support requires a GPU with compute capability 8.0 or higher."
    )
    return (available, reason) if return_reason else available
