"""Quantised values without torch's tensor interface, where Transformer Engine has them."""

from te_fast.pytorch._missing import missing
from te_fast.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
    Float8BlockwiseQTensorStorage,
)
from te_fast.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from te_fast.pytorch.tensor.storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
from te_fast.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage

__all__ = [
    "Float8BlockwiseQTensorStorage",
    "Float8TensorStorage",
    "HybridQuantizedTensorStorage",
    "IdentityTensorStorage",
]


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
