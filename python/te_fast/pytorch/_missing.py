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
    "onnx_export CusolverMpCtx newton_schulz "
    "newton_schulz_tp initialize_ub destroy_ub "
    "UserBufferQuantizationMode"
)
_SUBMODULES = (
    "cpu_offload_v1 distributed_weight dynamo ep export newton_schulz onnx_extensions triton"
)
_OLD_QUANTIZATION = "RecipeState"
_NAMES = {
    "te_fast.pytorch": f"{_LINEAR_ATTENTION} {_QUANTISATION} {_TENSORS} {_TOOLS} {_SUBMODULES}",
    "te_fast.pytorch.attention": f"{_LINEAR_ATTENTION} linear_attention",
    "te_fast.pytorch.attention.dot_product_attention.context_parallel": (
        "AttnFuncWithCPAndKVAllGather AttnFuncWithCPAndKVP2P AttnFuncWithCPAndQKVOA2A attn_forward_func_with_cp "
        "get_cu_seqlens_on_cp_rank thd_cp_rank_order_to_sequence_order thd_sequence_order_to_cp_rank_order"
    ),
    "te_fast.pytorch.attention.dot_product_attention.utils": (
        "AttentionLogging AttentionParams ConvertBSHDtoTHD ConvertTHDtoBSHD FlashAttentionUtils PackTensors "
        "UnpackTensor combine_and_dequantize combine_and_quantize get_alibi get_attention_backend "
        "get_attention_quantizers get_qkv_layout mxfp8_quantize_fast_path mxfp8_quantize_only "
        "mxfp8_transpose_swizzle print_quantizers qkv_layout_needs_detection transpose_to_bhsd_htd_pytorch"
    ),
    "te_fast.pytorch.ops": "ScaledTanhSReLU is_op_fuser_grouped_tensor_path_supported",
    "te_fast.pytorch.ops.basic": "ScaledTanhSReLU is_op_fuser_grouped_tensor_path_supported",
    "te_fast.pytorch.router": (
        "FusedAuxLoss FusedComputeScoresForMoEAuxLoss FusedTopkScoreFunction FusedTopkScoreFunctionQB "
        "mark_qb_bin_bounds_validated"
    ),
    "te_fast.pytorch.distributed": ("FullyShardedDataParallel symmetric_all_reduce"),
    "te_fast.pytorch.utils": "mark_grouped_tensor resolve_grouped_linear_single_param_flags",
    "te_fast.pytorch.tensor": (
        f"{_TENSORS} GroupedTensor GroupedTensorStorage grouped_tensor mxfp8_tensor nvfp4_tensor"
    ),
    "te_fast.pytorch.custom_recipes.quantizer_factories": "mxfp8_factory nvfp4_factory",
    "te_fast.pytorch.tensor.storage": (
        "GroupedTensorStorage HybridQuantizedTensorStorage IdentityTensorStorage "
        "MXFP8TensorStorage NVFP4TensorStorage"
    ),
    "te_fast.pytorch.optimizers": "multi_tensor_adam_fp8",
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
