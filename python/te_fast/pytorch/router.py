"""Functions of MoE routers where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.moe.balancing import QBHistogramMode
from te_fast.moe.router import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from te_fast.pytorch._missing import missing

__all__ = [
    "QBHistogramMode",
    "RoutingMapFormat",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
