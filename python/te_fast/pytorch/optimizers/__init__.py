"""Optimizers and functions over lists of tensors where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.optimizers.fused_adam import FusedAdam
from te_fast.optimizers.fused_sgd import FusedSGD
from te_fast.optimizers.multi_tensor import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)
from te_fast.pytorch._missing import missing
from te_fast.pytorch.optimizers import fused_adam, fused_sgd, multi_tensor_apply

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "fused_adam",
    "fused_sgd",
    "multi_tensor_applier",
    "multi_tensor_apply",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
