"""Names of Transformer Engine's extension, ``transformer_engine_torch``, on te_fast's native functions.

All functions work outside of autograd.
"""

from __future__ import annotations

from te_fast.tex import enums as _enums
from te_fast.tex import multi_tensor as _multi_tensor
from te_fast.tex.activations import (
    FUNCTIONS as _FUNCTIONS,
)
from te_fast.tex.activations import (
    clamped_dswiglu,
    clamped_swiglu,
    dsituglu,
    situglu,
)
from te_fast.tex.enums import *  # noqa: F403
from te_fast.tex.gemm import generic_gemm
from te_fast.tex.missing import missing as _missing
from te_fast.tex.multi_tensor import *  # noqa: F403
from te_fast.tex.norms import (
    layernorm_bwd,
    layernorm_fwd,
    rmsnorm_bwd,
    rmsnorm_bwd_add,
    rmsnorm_fwd,
)
from te_fast.tex.quantize import (
    bgrad_quantize,
    create_empty_quantized_tensor,
    dequantize,
    multi_tensor_quantize,
    quantize,
    split_quantize,
)
from te_fast.tex.queries import (
    device_supports_multicast,
    get_cublasLt_version,
    get_cudnn_version,
    get_num_cublas_streams,
    get_stream_priority_range,
    nvte_built_with_cublasmp,
    ubuf_built_with_mpi,
)
from te_fast.tex.rope import fused_rope_backward, fused_rope_forward
from te_fast.tex.scaled import (
    scaled_clamped_dswiglu,
    scaled_clamped_swiglu,
    scaled_dsituglu,
    scaled_dsrelu,
    scaled_dswiglu,
    scaled_situglu,
    scaled_srelu,
    scaled_swiglu,
)
from te_fast.tex.scaling import (
    compute_amax,
    fp8_block_scaling_compute_partial_amax,
    fp8_block_scaling_partial_cast,
    fp8_transpose,
    fused_amax_and_scale_update_after_reduction,
    swap_first_dims,
)
from te_fast.tex.thd import (
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
    thd_sequence_order_to_cp_rank_order,
)

__all__ = [
    "bgrad_quantize",
    "clamped_dswiglu",
    "clamped_swiglu",
    "compute_amax",
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "create_empty_quantized_tensor",
    "dequantize",
    "device_supports_multicast",
    "dsituglu",
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "fp8_transpose",
    "fused_amax_and_scale_update_after_reduction",
    "fused_rope_backward",
    "fused_rope_forward",
    "generic_gemm",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "layernorm_bwd",
    "layernorm_fwd",
    "multi_tensor_quantize",
    "nvte_built_with_cublasmp",
    "quantize",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
    "scaled_clamped_dswiglu",
    "scaled_clamped_swiglu",
    "scaled_dsituglu",
    "scaled_dsrelu",
    "scaled_dswiglu",
    "scaled_situglu",
    "scaled_srelu",
    "scaled_swiglu",
    "situglu",
    "split_quantize",
    "swap_first_dims",
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
    "ubuf_built_with_mpi",
]
__all__ += _enums.__all__
__all__ += _multi_tensor.__all__
__all__ += _FUNCTIONS

globals().update(_FUNCTIONS)
for _name in __all__:
    # Only of what this package defines: other classes keep the names that pickles have for them.
    if getattr(globals()[_name], "__module__", "").startswith(f"{__name__}."):
        globals()[_name].__module__ = __name__


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine's extension has and te_fast does not."""
    raise _missing(__name__, name)
