"""The base classes of quantised tensors and quantizers where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.tensor.operations import passthrough_ops as _quantized_tensor_passthrough_ops
from te_fast.tensor.quantizer import Quantizer
from te_fast.tensor.storage import (
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from te_fast.tensor.tensor import QuantizedTensor

__all__ = [
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "_quantized_tensor_passthrough_ops",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]

publish(__name__)
