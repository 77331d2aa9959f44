"""Element types, indices of quantizers, and how context-parallel ranks share tokens, as Transformer Engine has them."""

from te_fast._names import publish
from te_fast.attention.rules import CPLoadBalancingStrategy
from te_fast.pytorch._missing import missing
from te_fast.tensor.dtypes import DType, TE_DType, TE_DType_To_Torch
from te_fast.tensor.slots import FP8BwdTensorIdx, FP8FwdTensorIdx

__all__ = [
    "CPLoadBalancingStrategy",
    "DType",
    "FP8BwdTensorIdx",
    "FP8FwdTensorIdx",
    "TE_DType",
    "TE_DType_To_Torch",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
