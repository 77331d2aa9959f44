"""Functions that torch compiles, and decorators for it, where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.helpers.compiling import (
    dropout_fuser,
    jit_fuser,
    lazy_compile,
    no_torch_dynamo,
    set_jit_fusion_options,
)
from te_fast.helpers.fused_functions import (
    bgrad_dgelu_fused,
    bgrad_dgelu_fused_,
    bias_dropout_add,
    bias_dropout_add_fused_inference,
    bias_dropout_add_fused_inference_,
    bias_dropout_add_fused_train,
    bias_dropout_add_fused_train_,
    bias_gelu_fused,
    bias_gelu_fused_,
    dgelu_fused_,
    gelu_fused_,
    get_bias_dropout_add,
    l2normalization_backward_fused,
    l2normalization_backward_fused_,
    l2normalization_fused,
    l2normalization_fused_,
    l2normalization_fwd_fused,
    l2normalization_fwd_fused_,
)
from te_fast.helpers.warmups import (
    warmup_jit_bias_dropout_add,
    warmup_jit_bias_dropout_add_all_dtypes,
    warmup_jit_bias_gelu,
    warmup_jit_bias_gelu_all_dtypes,
    warmup_jit_l2normalization,
    warmup_jit_l2normalization_all_dtypes,
)

__all__ = [
    "bgrad_dgelu_fused",
    "bgrad_dgelu_fused_",
    "bias_dropout_add",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_inference_",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_fused_train_",
    "bias_gelu_fused",
    "bias_gelu_fused_",
    "dgelu_fused_",
    "dropout_fuser",
    "gelu_fused_",
    "get_bias_dropout_add",
    "jit_fuser",
    "l2normalization_backward_fused",
    "l2normalization_backward_fused_",
    "l2normalization_fused",
    "l2normalization_fused_",
    "l2normalization_fwd_fused",
    "l2normalization_fwd_fused_",
    "lazy_compile",
    "no_torch_dynamo",
    "set_jit_fusion_options",
    "warmup_jit_bias_dropout_add",
    "warmup_jit_bias_dropout_add_all_dtypes",
    "warmup_jit_bias_gelu",
    "warmup_jit_bias_gelu_all_dtypes",
    "warmup_jit_l2normalization",
    "warmup_jit_l2normalization_all_dtypes",
]

publish(__name__)
