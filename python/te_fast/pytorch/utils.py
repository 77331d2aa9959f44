"""Those of Transformer Engine's helpers that other code imports."""

from te_fast._names import publish
from te_fast.ops.interleave import deinterleave_glu_tensor, interleave_glu_tensor
from te_fast.pytorch._missing import missing
from te_fast.runtime.support import get_device_compute_capability, is_bf16_available
from te_fast.runtime.weak_tensors import make_weak_ref

__all__ = [
    "deinterleave_glu_tensor",
    "get_device_compute_capability",
    "interleave_glu_tensor",
    "is_bf16_available",
    "make_weak_ref",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
