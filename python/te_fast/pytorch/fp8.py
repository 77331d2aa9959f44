"""The names of :mod:`te_fast.pytorch.quantization` where older code looks for them."""

from te_fast.pytorch.quantization import (
    FP8GlobalStateManager,
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
    get_fp8_torch_dtype,
)

__all__ = [
    "FP8GlobalStateManager",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_fp8_torch_dtype",
]
