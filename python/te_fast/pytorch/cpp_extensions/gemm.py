"""Matrix products where Transformer Engine has them."""

from te_fast.tex.general import general_gemm, general_grouped_gemm

__all__ = ["general_gemm", "general_grouped_gemm"]
