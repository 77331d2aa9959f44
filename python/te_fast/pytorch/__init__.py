"""Transformer Engine's PyTorch names on te_fast's dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fast._names import defer, load, publish
from te_fast.graphs import inference as _inference  # noqa: F401  defines what saved programs call
from te_fast.graphs.stand_ins import register_when_dynamo_is_imported
from te_fast.moe import choice as _choice  # noqa: F401  and so do these two
from te_fast.moe import operators as _operators  # noqa: F401
from te_fast.pytorch import constants as constants
from te_fast.pytorch import float8_tensor as float8_tensor
from te_fast.pytorch import fp8 as fp8
from te_fast.pytorch import module as module
from te_fast.pytorch import tensor as tensor
from te_fast.pytorch._missing import missing
from te_fast.pytorch.constants import CPLoadBalancingStrategy, DType
from te_fast.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from te_fast.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from te_fast.pytorch.quantization import (
    DelayedScalingRequest,
    FP8GlobalStateManager,
    QuantizerRequest,
    QuantizerRole,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_align_size_for_quantization,
    get_default_recipe,
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from te_fast.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from te_fast.runtime.device import set_cuda_device_every_batch, should_set_cuda_device_every_batch
from te_fast.tensor.loading import register_classes

if TYPE_CHECKING:
    from te_fast.experts.block import MoE
    from te_fast.pytorch import attention as attention
    from te_fast.pytorch import cpp_extensions as cpp_extensions
    from te_fast.pytorch import cpu_offload as cpu_offload
    from te_fast.pytorch import cross_entropy as cross_entropy
    from te_fast.pytorch import custom_recipes as custom_recipes
    from te_fast.pytorch import graph as graph
    from te_fast.pytorch import jit as jit
    from te_fast.pytorch import ops
    from te_fast.pytorch import optimizers as optimizers
    from te_fast.pytorch import permutation as permutation
    from te_fast.pytorch import router as router
    from te_fast.pytorch import transformer as transformer
    from te_fast.pytorch import utils as utils
    from te_fast.pytorch.attention import (
        DotProductAttention,
        InferenceParams,
        MultiheadAttention,
        RotaryPositionEmbedding,
    )
    from te_fast.pytorch.cpu_offload import (
        ManualOffloadSynchronizer,
        get_cpu_offload_context,
        mark_not_offload,
    )
    from te_fast.pytorch.cross_entropy import parallel_cross_entropy
    from te_fast.pytorch.graph import make_graphed_callables
    from te_fast.pytorch.permutation import (
        moe_permute,
        moe_permute_and_pad_with_probs,
        moe_permute_and_quantize,
        moe_permute_with_probs,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
        moe_unpermute,
    )
    from te_fast.pytorch.transformer import TransformerLayer
    from te_fast.pytorch.utils import (
        deinterleave_glu_tensor,
        get_cudnn_version,
        interleave_glu_tensor,
    )

__all__ = [
    "CPLoadBalancingStrategy",
    "CudaRNGStatesTracker",
    "DType",
    "DelayedScalingRequest",
    "DotProductAttention",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "ManualOffloadSynchronizer",
    "MoE",
    "MultiheadAttention",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "deinterleave_glu_tensor",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_default_recipe",
    "get_device_compute_capability",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "mark_not_offload",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_and_quantize",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "parallel_cross_entropy",
    "prepare_for_saving",
    "quantized_model_init",
    "restore_from_func_ctx",
    "restore_from_saved",
    "set_cuda_device_every_batch",
    "should_set_cuda_device_every_batch",
]

# Modules that a linear layer does not need are imported at first use; with each, its share of the names above.
_MODULES = (
    "attention cpp_extensions cpu_offload cross_entropy custom_recipes graph jit ops optimizers "
    "permutation router transformer utils"
)
_NAMES = {
    "attention": (
        *("DotProductAttention", "InferenceParams", "MultiheadAttention"),
        "RotaryPositionEmbedding",
    ),
    "cpu_offload": ("ManualOffloadSynchronizer", "get_cpu_offload_context", "mark_not_offload"),
    "cross_entropy": ("parallel_cross_entropy",),
    "graph": ("make_graphed_callables",),
    "permutation": tuple(name for name in __all__ if name.startswith("moe_")),
    "transformer": ("TransformerLayer",),
    "utils": ("deinterleave_glu_tensor", "get_cudnn_version", "interleave_glu_tensor"),
}
_DEFERRED = {"MoE": "te_fast.experts.block"}
_DEFERRED |= {name: f"{__name__}.{name}" for name in _MODULES.split()}
_DEFERRED |= {name: f"{__name__}.{source}" for source, names in _NAMES.items() for name in names}

defer(__name__, _DEFERRED)
publish(__name__)


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)


def __getattr__(name: str) -> object:
    """Import a deferred name; raise for names that Transformer Engine has here and te_fast does not have yet."""
    if name in _DEFERRED:
        return load(__name__, name, _DEFERRED[name])
    raise missing(__name__, name)


register_when_dynamo_is_imported()
register_classes()
