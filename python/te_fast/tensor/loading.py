"""Which of te_fast's classes ``torch.load(weights_only=True)`` makes: quantised tensors and their quantizers."""

from __future__ import annotations

import torch

from te_fast.tensor import blockwise, float8
from te_fast.tensor.dtypes import DType


def allow_loading() -> None:
    """Let ``torch.load`` make quantised tensors; what it calls checks its arguments and runs no code of the file's."""
    torch.serialization.add_safe_globals(
        [
            DType,
            float8._make_float8_tensor_in_reduce_ex,
            float8.Float8Quantizer,
            float8.Float8CurrentScalingQuantizer,
            blockwise._make_float8_blockwise_tensor_in_reduce_ex,
            blockwise.Float8BlockQuantizer,
        ]
    )
