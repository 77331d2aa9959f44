"""Helpers of Transformer Engine that other code imports, where it has them."""

from te_fast._names import publish
from te_fast.helpers.checks import (
    assert_dim_for_fp8_exec,
    assert_viewless_tensor,
    check_dim_for_fp8_exec,
    needs_quantized_gemm,
    requires_grad,
    validate_ctx_manager,
    validate_rng_states_func,
)
from te_fast.helpers.comparing import (
    all_close,
    compare_tensors,
    print_rank_0,
)
from te_fast.helpers.defaults import (
    canonicalize_device,
    canonicalize_dtype,
    canonicalize_process_group,
    devices_match,
    gpu_autocast_ctx,
    torch_get_autocast_gpu_dtype,
)
from te_fast.helpers.initial_values import (
    get_default_init_method,
    init_method_constant,
    init_method_normal,
    scaled_init_method_normal,
)
from te_fast.helpers.machine import (
    get_cudnn_version,
    get_sm_count,
    is_bf16_compatible,
    is_non_tn_fp8_gemm_supported,
)
from te_fast.helpers.nvtx import (
    get_nvtx_range_context,
    nvtx_range_pop,
    nvtx_range_push,
)
from te_fast.helpers.splitting import (
    SplitAlongDim,
    combine_tensors,
    split_tensor_along_dim,
)
from te_fast.helpers.tensor_data import (
    attention_mask_func,
    cast_if_needed,
    clear_tensor_data,
    get_cached_ones_tensor,
    safely_set_viewless_tensor_data,
)
from te_fast.helpers.whole_numbers import (
    ceil_div,
    divide,
    ensure_divisibility,
    round_up_to_nearest_multiple,
)
from te_fast.ops.interleave import (
    deinterleave_glu_tensor,
    interleave_glu_tensor,
)
from te_fast.pytorch._missing import missing
from te_fast.runtime.support import (
    get_device_compute_capability,
    is_bf16_available,
)
from te_fast.runtime.weak_tensors import (
    make_weak_ref,
)

__all__ = [
    "SplitAlongDim",
    "all_close",
    "assert_dim_for_fp8_exec",
    "assert_viewless_tensor",
    "attention_mask_func",
    "canonicalize_device",
    "canonicalize_dtype",
    "canonicalize_process_group",
    "cast_if_needed",
    "ceil_div",
    "check_dim_for_fp8_exec",
    "clear_tensor_data",
    "combine_tensors",
    "compare_tensors",
    "deinterleave_glu_tensor",
    "devices_match",
    "divide",
    "ensure_divisibility",
    "get_cached_ones_tensor",
    "get_cudnn_version",
    "get_default_init_method",
    "get_device_compute_capability",
    "get_nvtx_range_context",
    "get_sm_count",
    "gpu_autocast_ctx",
    "init_method_constant",
    "init_method_normal",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_bf16_compatible",
    "is_non_tn_fp8_gemm_supported",
    "make_weak_ref",
    "needs_quantized_gemm",
    "nvtx_range_pop",
    "nvtx_range_push",
    "print_rank_0",
    "requires_grad",
    "round_up_to_nearest_multiple",
    "safely_set_viewless_tensor_data",
    "scaled_init_method_normal",
    "split_tensor_along_dim",
    "torch_get_autocast_gpu_dtype",
    "validate_ctx_manager",
    "validate_rng_states_func",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
