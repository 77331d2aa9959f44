"""Register the classes of quantised tensors with ``torch.load(weights_only=True)`` and with the native module."""

from __future__ import annotations

import torch

from te_fast.runtime import native
from te_fast.tensor import blockwise, float8, hybrid_tensor, identity_tensor
from te_fast.tensor.dtypes import DType


def register_classes() -> None:
    """Name the classes that native calls make, and let ``torch.load`` make them.

    The functions that ``torch.load`` calls check their arguments and run no code of the file.
    """
    native.install_tensors(per_tensor=float8.Float8Tensor, block=blockwise.Float8BlockwiseQTensor)
    torch.serialization.add_safe_globals(
        [
            DType,
            float8._make_float8_tensor_in_reduce_ex,
            float8.Float8Quantizer,
            float8.Float8CurrentScalingQuantizer,
            blockwise._make_float8_blockwise_tensor_in_reduce_ex,
            blockwise.Float8BlockQuantizer,
            identity_tensor._make_identity_tensor_in_reduce_ex,
            identity_tensor.IdentityQuantizer,
            hybrid_tensor._make_hybrid_quantized_tensor_in_reduce_ex,
            hybrid_tensor.HybridQuantizer,
        ]
    )


def get_all_tensor_types() -> list[type]:
    """Return the classes of tensors, plain and quantised, that layers take.

    See Also
    --------
    QuantizedTensor : The class of quantised tensors.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.tensor import get_all_tensor_types
    >>> torch.Tensor in get_all_tensor_types()
    True
    """
    quantized = (float8.Float8Tensor, float8.Float8TensorStorage)
    blocks = (blockwise.Float8BlockwiseQTensor, blockwise.Float8BlockwiseQTensorStorage)
    others = (identity_tensor.IdentityTensor, identity_tensor.IdentityTensorStorage)
    both = (hybrid_tensor.HybridQuantizedTensor, hybrid_tensor.HybridQuantizedTensorStorage)
    return [torch.Tensor, torch.nn.Parameter, *quantized, *blocks, *others, *both]
