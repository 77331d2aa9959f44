"""Tensors and quantizer for high precision, where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.tensor.identity_tensor import (
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    _make_identity_tensor_in_reduce_ex,
)

__all__ = [
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "_make_identity_tensor_in_reduce_ex",
]

publish(__name__)
