"""FP8 with a scale for each block, where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.tensor.blockwise import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    _make_float8_blockwise_tensor_in_reduce_ex,
)

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "_make_float8_blockwise_tensor_in_reduce_ex",
]

publish(__name__)
