"""``FusedSGD`` where Transformer Engine has it."""

from te_fast.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedSGD"]
