"""Transformer Engine's functions for matrix products, and the names of its extension."""

from te_fast import tex as _tex
from te_fast.pytorch.cpp_extensions import gemm as gemm
from te_fast.tex import *  # noqa: F403
from te_fast.tex.general import general_gemm, general_grouped_gemm

__all__ = ["general_gemm", "general_grouped_gemm"]
__all__ += _tex.__all__


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not."""
    from te_fast.tex.missing import missing

    raise missing(__name__, name)
