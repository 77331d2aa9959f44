"""``FusedAdam`` where Transformer Engine has it."""

from te_fast.optimizers.fused_adam import FusedAdam

__all__ = ["FusedAdam"]
