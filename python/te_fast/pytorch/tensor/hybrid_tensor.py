"""Tensors of two quantised values and their quantizer, where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.tensor.hybrid_tensor import (
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    _make_hybrid_quantized_tensor_in_reduce_ex,
)

__all__ = [
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "_make_hybrid_quantized_tensor_in_reduce_ex",
]

publish(__name__)
