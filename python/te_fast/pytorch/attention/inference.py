"""Key-value caches where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.attention.inference import (
    InferenceParams,
    KVCacheManager,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
)

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager"]

publish(__name__)
