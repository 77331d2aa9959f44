"""Names of Transformer Engine that te_fast does not have yet, and the errors of their use."""

from __future__ import annotations

from te_fast.errors import MissingError

__all__ = ["missing"]

_LINEAR_ATTENTION = (
    "GatedDeltaNetAttention GatedDeltaNet2Attention GatedDeltaProductAttention "
    "FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant"
)
_QUANTISATION = "apply_recipe quantizer_factory"
_TENSORS = (
    "MXFP8Tensor MXFP8TensorStorage MXFP8Quantizer NVFP4Tensor NVFP4TensorStorage NVFP4Quantizer"
)
_TOOLS = (
    ""
    "onnx_export CusolverMpCtx newton_schulz "
    "newton_schulz_tp initialize_ub destroy_ub "
    "UserBufferQuantizationMode get_cudnn_version"
)
_SUBMODULES = (
    "cpp_extensions cpu_offload_v1 distributed_weight dynamo ep export jit newton_schulz "
    "onnx_extensions triton"
)
_OLD_QUANTIZATION = "RecipeState get_fp4_te_dtype get_fp8_max get_fp8_te_dtype split_and_copy"
_NAMES = {
    "te_fast.pytorch": f"{_LINEAR_ATTENTION} {_QUANTISATION} {_TENSORS} {_TOOLS} {_SUBMODULES}",
    "te_fast.pytorch.attention": f"{_LINEAR_ATTENTION} linear_attention",
    "te_fast.pytorch.ops": "ScaledTanhSReLU is_op_fuser_grouped_tensor_path_supported",
    "te_fast.pytorch.ops.basic": "ScaledTanhSReLU is_op_fuser_grouped_tensor_path_supported",
    "te_fast.pytorch.router": (
        "FusedAuxLoss FusedComputeScoresForMoEAuxLoss FusedTopkScoreFunction FusedTopkScoreFunctionQB "
        "mark_qb_bin_bounds_validated"
    ),
    "te_fast.pytorch.distributed": ("FullyShardedDataParallel symmetric_all_reduce"),
    "te_fast.pytorch.utils": (
        "SplitAlongDim all_close assert_dim_for_fp8_exec assert_viewless_tensor attention_mask_func "
        "canonicalize_device canonicalize_dtype canonicalize_process_group cast_if_needed ceil_div "
        "check_dim_for_fp8_exec clear_tensor_data combine_tensors compare_tensors "
        "devices_match divide ensure_divisibility get_cached_ones_tensor "
        "get_cudnn_version get_default_init_method get_nvtx_range_context get_sm_count "
        "init_method_constant init_method_normal is_bf16_compatible "
        "is_non_tn_fp8_gemm_supported mark_grouped_tensor needs_quantized_gemm nvtx_range_pop "
        "nvtx_range_push print_rank_0 requires_grad resolve_grouped_linear_single_param_flags "
        "round_up_to_nearest_multiple safely_set_viewless_tensor_data scaled_init_method_normal "
        "split_tensor_along_dim torch_get_autocast_gpu_dtype validate_ctx_manager "
        "validate_rng_states_func"
    ),
    "te_fast.pytorch.constants": (
        "AttnBiasTypes AttnMaskTypes AttnTypes LayerTypes QKVLayouts "
        "GemmParallelModes MXFP8_BLOCK_SCALING_SIZE "
        "NVFP4_BLOCK_SCALING_SIZE dist_group_type"
    ),
    "te_fast.pytorch.tensor": (
        f"{_TENSORS} GroupedTensor GroupedTensorStorage grouped_tensor mxfp8_tensor nvfp4_tensor"
    ),
    "te_fast.pytorch.custom_recipes.quantizer_factories": "mxfp8_factory nvfp4_factory",
    "te_fast.pytorch.tensor.storage": (
        "GroupedTensorStorage HybridQuantizedTensorStorage IdentityTensorStorage "
        "MXFP8TensorStorage NVFP4TensorStorage"
    ),
    "te_fast.pytorch.optimizers": (
        "multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master "
        "multi_tensor_adam_fp8 multi_tensor_sgd"
    ),
    "te_fast.pytorch.cpu_offload": "is_cpu_offload_enabled mark_activation_offload start_offload",
    "te_fast.pytorch.fp8": _OLD_QUANTIZATION,
    "te_fast.pytorch.module": (
        "UserBufferQuantizationMode destroy_ub initialize_ub is_module_grouped_tensor_path_supported"
    ),
    "te_fast.pytorch.module.base": (
        "UserBufferQuantizationMode destroy_ub get_ub initialize_ub is_ub_initialized quantize_weight "
        "using_cublasmp_backend"
    ),
    "te_fast.pytorch.quantization": (
        f"{_OLD_QUANTIZATION} CustomRecipeState "
        "Float8BlockScalingRecipeState Float8CurrentScalingRecipeState "
        "MXFP8BlockScalingRecipeState NVFP4BlockScalingRecipeState"
    ),
}


def missing(module: str, name: str) -> AttributeError:
    """Return the error for a missing attribute of a module.

    Parameters
    ----------
    module : str
        Name of the module.
    name : str
        Name of the attribute.
    """
    if name in _NAMES[module].split():
        message = f"{module}.{name} is not there yet; keep Transformer Engine's"
        return MissingError(message)
    return AttributeError(f"module {module!r} has no attribute {name!r}")
