"""Quantised tensors where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.pytorch._missing import missing
from te_fast.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from te_fast.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from te_fast.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from te_fast.pytorch.tensor.hybrid_tensor import HybridQuantizedTensor, HybridQuantizer
from te_fast.pytorch.tensor.identity_tensor import IdentityQuantizer, IdentityTensor
from te_fast.pytorch.tensor.storage import HybridQuantizedTensorStorage, IdentityTensorStorage
from te_fast.pytorch.tensor.utils import cast_master_weights_to_fp8, replace_raw_data
from te_fast.tensor.loading import get_all_tensor_types

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "cast_master_weights_to_fp8",
    "get_all_tensor_types",
    "prepare_for_saving",
    "replace_raw_data",
    "restore_from_func_ctx",
    "restore_from_saved",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
