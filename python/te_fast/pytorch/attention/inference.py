"""Key-value caches where Transformer Engine has them."""

from te_fast._names import publish
from te_fast.attention.caches import KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager
from te_fast.attention.inference import InferenceParams

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager"]

publish(__name__)
