"""Transformer Engine's PyTorch names on te_fast's dispatcher."""

from __future__ import annotations

from te_fast._names import publish
from te_fast.graphs.stand_ins import register_when_dynamo_is_imported
from te_fast.pytorch import fp8 as fp8
from te_fast.pytorch import module as module
from te_fast.pytorch import ops
from te_fast.pytorch._missing import missing
from te_fast.pytorch.distributed import checkpoint
from te_fast.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from te_fast.pytorch.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_and_quantize,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from te_fast.pytorch.quantization import (
    FP8GlobalStateManager,
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
from te_fast.runtime.device import set_cuda_device_every_batch, should_set_cuda_device_every_batch

__all__ = [
    "FP8GlobalStateManager",
    "Fp8Padding",
    "Fp8Unpadding",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_and_quantize",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "quantized_model_init",
    "set_cuda_device_every_batch",
    "should_set_cuda_device_every_batch",
]

publish(__name__)


def __dir__() -> list[str]:
    """Show what is public."""
    return list(__all__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)


register_when_dynamo_is_imported()
