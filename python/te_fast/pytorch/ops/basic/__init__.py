"""The basic operations where Transformer Engine has them."""

from __future__ import annotations

from te_fast._names import publish
from te_fast.ops.basic.arithmetic import AddExtraInput, ConstantScale, MakeExtraOutput
from te_fast.ops.basic.basic_linear import BasicLinear
from te_fast.ops.basic.bias import Bias
from te_fast.ops.basic.dropout import Dropout
from te_fast.ops.basic.grouped_linear import GroupedLinear
from te_fast.ops.basic.identity import (
    AllGather,
    AllReduce,
    Identity,
    ReduceScatter,
    Reshape,
)
from te_fast.ops.basic.l2normalization import L2Normalization
from te_fast.ops.basic.quantize import Quantize
from te_fast.ops.common import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY
from te_fast.pytorch._missing import missing
from te_fast.pytorch.ops.basic.activation import GELU, QGELU, ReLU, SiLU, SReLU
from te_fast.pytorch.ops.basic.glu import (
    GEGLU,
    GLU,
    QGEGLU,
    ClampedSwiGLU,
    ReGLU,
    SiTUGLU,
    SReGLU,
    SwiGLU,
)
from te_fast.pytorch.ops.basic.norm import LayerNorm, RMSNorm
from te_fast.pytorch.ops.basic.scaled import (
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
)

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "GRAD_INPUT_BUFFER_KEY",
    "OUTPUT_BUFFER_KEY",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
