"""Enumerations of Transformer Engine's extension, with its numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from te_fast.moe.router import RoutingMapFormat as NVTERoutingMapFormat
from te_fast.tensor.dtypes import DType
from te_fast.tensor.slots import FP8BwdTensorIdx as FP8BwdTensors
from te_fast.tensor.slots import FP8FwdTensorIdx as FP8FwdTensors

__all__ = [
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8TensorMeta",
    "NVTERoutingMapFormat",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
]


class CommOverlapType(IntEnum):
    """Collectives beside products; te_fast's functions take none."""

    RS = 0
    AG = 1


class NVTE_Bias_Type(IntEnum):
    """Biases of attention scores."""

    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2
    NVTE_ALIBI = 3


class NVTE_Mask_Type(IntEnum):
    """Masks of attention."""

    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


class NVTE_Softmax_Type(IntEnum):
    """Denominators of attention's softmax."""

    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


class NVTE_QKV_Format(IntEnum):
    """Orders of dimensions of queries, keys and values."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2
    NVTE_BSHD_2SBHD = 3
    NVTE_SBHD_2BSHD = 4
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6
    NVTE_BHSD = 7


class NVTE_QKV_Layout(IntEnum):
    """Orders of dimensions, and which of queries, keys and values share memory."""

    NVTE_SB3HD = 0
    NVTE_SBH3D = 1
    NVTE_SBHD_SB2HD = 2
    NVTE_SBHD_SBH2D = 3
    NVTE_SBHD_SBHD_SBHD = 4
    NVTE_BS3HD = 5
    NVTE_BSH3D = 6
    NVTE_BSHD_BS2HD = 7
    NVTE_BSHD_BSH2D = 8
    NVTE_BSHD_BSHD_BSHD = 9
    NVTE_T3HD = 10
    NVTE_TH3D = 11
    NVTE_THD_T2HD = 12
    NVTE_THD_TH2D = 13
    NVTE_THD_THD_THD = 14
    NVTE_SBHD_BSHD_BSHD = 15
    NVTE_BSHD_SBHD_SBHD = 16
    NVTE_THD_BSHD_BSHD = 17
    NVTE_THD_SBHD_SBHD = 18
    NVTE_Paged_KV_BSHD_BSHD_BSHD = 19
    NVTE_Paged_KV_BSHD_SBHD_SBHD = 20
    NVTE_Paged_KV_SBHD_BSHD_BSHD = 21
    NVTE_Paged_KV_SBHD_SBHD_SBHD = 22
    NVTE_Paged_KV_THD_BSHD_BSHD = 23
    NVTE_Paged_KV_THD_SBHD_SBHD = 24
    NVTE_BHSD_BHSD_BHSD = 25


class NVTE_Fused_Attn_Backend(IntEnum):
    """Kernels of cuDNN's attention; te_fast's attention runs on torch's."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class FP8TensorMeta:
    """Scales, inverse scales and histories of maxima of delayed scaling; all None at first."""

    def __init__(self) -> None:
        self.scale: Any = None
        self.scale_inv: Any = None
        self.amax_history: Any = None
