"""FP8 with one scale for a tensor, where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.tensor.float8 import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
    _make_float8_tensor_in_reduce_ex,
)

__all__ = [
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "_make_float8_tensor_in_reduce_ex",
]

publish(__name__)
