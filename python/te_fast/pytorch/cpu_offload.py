"""Offloading of saved tensors where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.offload.context import (
    ManualOffloadSynchronizer,
    OffloadSynchronizer,
    get_cpu_offload_context,
)
from te_fast.offload.kept import mark_not_offload
from te_fast.pytorch._missing import missing

__all__ = [
    "ManualOffloadSynchronizer",
    "OffloadSynchronizer",
    "get_cpu_offload_context",
    "mark_not_offload",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
