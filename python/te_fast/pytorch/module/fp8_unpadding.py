"""``Fp8Unpadding`` where Transformer Engine has it."""

from te_fast.moe.padding import Fp8Unpadding

__all__ = ["Fp8Unpadding"]
