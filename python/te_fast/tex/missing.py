"""Names of Transformer Engine's extension that te_fast does not have, and the errors of their use."""

from __future__ import annotations

from te_fast.errors import MissingError

_ATTENTION = (
    "fa_prepare_bwd fa_prepare_fwd fused_attn_bwd fused_attn_fwd get_fused_attn_backend copy_to_kv_cache "
    "multi_tensor_pad_last_dim multi_tensor_transpose_to_bhsd scaled_aligned_causal_masked_softmax_backward "
    "scaled_aligned_causal_masked_softmax_forward scaled_masked_softmax_backward scaled_masked_softmax_forward "
    "scaled_softmax_backward scaled_softmax_forward scaled_upper_triang_masked_softmax_backward "
    "scaled_upper_triang_masked_softmax_forward"
)
_COMMUNICATION = (
    "CommOverlap CommOverlapAlgo CommOverlapBase CommOverlapCore CommOverlapHelper CommOverlapP2P CommOverlapP2PBase "
    "bulk_overlap_ag_with_external_gemm create_nvshmem_tensor init_nvshmem_backend nvshmem_finalize "
    "nvshmem_send_on_current_stream nvshmem_wait_on_current_stream"
)
_GROUPED_TENSORS = (
    "bgrad_group_quantize group_dequantize group_quantize group_requantize_inplace grouped_mlp_experimental "
    "get_grouped_gemm_setup_workspace_size grouped_swizzle_for_gemm splits_to_offsets splits_to_offsets_multi "
    "te_general_grouped_gemm te_general_grouped_gemm_for_discrete_in te_general_grouped_gemm_for_discrete_out "
    "te_general_grouped_gemm_for_grouped_tensor"
)
_OTHER_FORMATS = (
    "Float8BlockScaleTensorFormat multi_tensor_compute_scale_inv_e8m0 mxfp8_scaling_compute_partial_amax "
    "mxfp8_scaling_partial_cast nvfp4_2d_compute_partial_amax nvfp4_2d_multi_tensor_transpose nvfp4_2d_partial_cast "
    "nvfp4_2d_scale_transpose nvfp4_compute_global_scale nvfp4_compute_per_block_scale nvfp4_data_transpose "
    "nvfp4_expand_scale_to_fp8 nvfp4_fused_scale nvfp4_group_quantize_with_amax "
    "nvfp4_multi_tensor_2d_partial_cast nvfp4_multi_tensor_compute_partial_amax nvfp4_multi_tensor_fused_scale "
    "nvfp4_quantize_with_amax multi_tensor_swizzle_scales_for_gemm_ multi_tensor_swizzle_scales_for_gemm_unchecked_ "
    "swizzle_scales_for_gemm_"
)
_MIXTURES = (
    "NVTEQBHistogramMode fused_moe_aux_loss_bwd fused_moe_aux_loss_fwd fused_moe_aux_loss_fwd_graph_safe "
    "fused_multi_row_padding fused_multi_row_unpadding fused_score_for_moe_aux_loss_bwd "
    "fused_score_for_moe_aux_loss_fwd fused_topk_with_score_function_bwd fused_topk_with_score_function_fwd "
    "fused_topk_with_score_function_qb_fwd moe_permute_bwd moe_permute_fwd moe_unpermute_bwd moe_unpermute_fwd"
)
_OPERATIONS = "dropout_bwd dropout_fwd fused_qkv_rope_backward fused_qkv_rope_forward"
_OPTIMIZERS = "multi_tensor_adam_fp8 multi_tensor_adam_param_remainder"
_TOOLS = "bulk_allocate copy_data_ptrs_to_device cusolvermp_ctx_create cusolvermp_ctx_destroy newton_schulz"
#: Names that `transformer_engine_torch` has.
NAMES = frozenset(
    " ".join(
        (
            *(_ATTENTION, _COMMUNICATION, _GROUPED_TENSORS, _MIXTURES),
            *(_OPERATIONS, _OPTIMIZERS, _OTHER_FORMATS, _TOOLS),
        )
    ).split()
)


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a missing attribute of the extension, or of the package that repeats its names.

    Parameters
    ----------
    module : str
        Name of the module.
    name : str
        Name of the attribute.
    """
    if name in NAMES:
        message = f"{module}.{name} is not there yet; keep Transformer Engine's"
        return MissingError(message)
    return AttributeError(f"module {module!r} has no attribute {name!r}")
