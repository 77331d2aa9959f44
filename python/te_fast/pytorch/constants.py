"""Element types, indices, sizes of blocks and the values that options take, where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.attention.rules import BIAS_TYPES as AttnBiasTypes
from te_fast.attention.rules import MASK_TYPES as AttnMaskTypes
from te_fast.attention.rules import CPLoadBalancingStrategy
from te_fast.helpers.constants import ATTENTION_TYPES as AttnTypes
from te_fast.helpers.constants import LAYER_TYPES as LayerTypes
from te_fast.helpers.constants import MXFP8_BLOCK_SCALING_SIZE, NVFP4_BLOCK_SCALING_SIZE
from te_fast.helpers.constants import PARALLEL_MODES as GemmParallelModes
from te_fast.helpers.constants import PROCESS_GROUP as dist_group_type
from te_fast.helpers.constants import QKV_LAYOUTS as QKVLayouts
from te_fast.tensor.dtypes import DType, TE_DType, TE_DType_To_Torch
from te_fast.tensor.slots import FP8BwdTensorIdx, FP8FwdTensorIdx

__all__ = [
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "AttnBiasTypes",
    "AttnMaskTypes",
    "AttnTypes",
    "CPLoadBalancingStrategy",
    "DType",
    "FP8BwdTensorIdx",
    "FP8FwdTensorIdx",
    "GemmParallelModes",
    "LayerTypes",
    "QKVLayouts",
    "TE_DType",
    "TE_DType_To_Torch",
    "dist_group_type",
]

publish(__name__)
