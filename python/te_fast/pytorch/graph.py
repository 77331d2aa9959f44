"""CUDA graphs where Transformer Engine has them."""

from torch.cuda import graph_pool_handle

from te_fast._names import publish
from te_fast.graphed.make import make_graphed_callables
from te_fast.graphed.scales import restore_fp8_tensors, save_fp8_tensors
from te_fast.runtime.capturing import is_graph_capturing, set_capture_end, set_capture_start

__all__ = [
    "graph_pool_handle",
    "is_graph_capturing",
    "make_graphed_callables",
    "restore_fp8_tensors",
    "save_fp8_tensors",
    "set_capture_end",
    "set_capture_start",
]

publish(__name__)
