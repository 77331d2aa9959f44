"""Functions of distributed optimizers for quantised weights, where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.tensor.masters import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from te_fast.tensor.storage import clear_columnwise_cache

__all__ = [
    "cast_master_weights_to_fp8",
    "clear_columnwise_cache",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]

publish(__name__)
