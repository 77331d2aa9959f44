"""Activation checkpointing where Transformer Engine has it."""

from te_fast._names import publish
from te_fast.pytorch._missing import missing
from te_fast.runtime.recompute import (
    activation_recompute_forward,
    checkpoint,
    get_activation_recompute_contexts,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)

__all__ = [
    "activation_recompute_forward",
    "checkpoint",
    "get_activation_recompute_contexts",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
