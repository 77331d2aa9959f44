"""Optimizers and functions over lists of tensors where Transformer Engine has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fast._names import defer, load, publish
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

if TYPE_CHECKING:
    from te_fast.tex import (
        multi_tensor_adam,
        multi_tensor_adam_capturable,
        multi_tensor_adam_capturable_master,
        multi_tensor_sgd,
    )

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "fused_adam",
    "fused_sgd",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_applier",
    "multi_tensor_apply",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

# The optimizers do not need these steps.
_DEFERRED = dict.fromkeys(
    (
        "multi_tensor_adam",
        "multi_tensor_adam_capturable",
        "multi_tensor_adam_capturable_master",
        "multi_tensor_sgd",
    ),
    "te_fast.tex",
)

defer(__name__, _DEFERRED)
publish(__name__)


def __getattr__(name: str) -> object:
    """Import a deferred name; say so of what Transformer Engine has here and te_fast does not yet."""
    if name in _DEFERRED:
        return load(__name__, name, _DEFERRED[name])
    raise missing(__name__, name)
