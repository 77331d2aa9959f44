"""Autocast regions, their state, and which recipes can run, where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.helpers.number_formats import (
    get_fp4_te_dtype,
    get_fp8_max,
    get_fp8_te_dtype,
    split_and_copy,
)
from te_fast.pytorch._missing import missing
from te_fast.recipe.roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole
from te_fast.runtime import scale_update
from te_fast.runtime.autocast import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from te_fast.runtime.delayed import DelayedScalingRecipeState, get_fp8_torch_dtype
from te_fast.runtime.global_state import FP8GlobalState, FP8GlobalStateManager
from te_fast.runtime.support import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    check_recipe_support,
    get_align_size_for_quantization,
    get_default_fp8_recipe,
    get_default_recipe,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)

__all__ = [
    "DelayedScalingRecipeState",
    "DelayedScalingRequest",
    "FP8GlobalState",
    "FP8GlobalStateManager",
    "QuantizerRequest",
    "QuantizerRole",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_device_compute_capability",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
    "split_and_copy",
]

_update_amax_history = scale_update.update_history
_compute_amax_and_update_history = scale_update.amax_and_updated_history
_default_get_amax_and_update_history = scale_update.amax_and_updated_history
_default_sf_compute = scale_update.default_scale
_compute_scaling_factor = scale_update.scaling_factor
_amax_and_scale_update = scale_update.update

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
