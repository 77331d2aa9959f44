"""``Fp8Padding`` where Transformer Engine has it."""

from te_fast.moe.padding import Fp8Padding

__all__ = ["Fp8Padding"]
