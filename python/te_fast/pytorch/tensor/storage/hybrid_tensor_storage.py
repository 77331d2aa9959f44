"""Two quantised values without torch's tensor interface, where Transformer Engine has them."""

from te_fast.pytorch.tensor.hybrid_tensor import HybridQuantizedTensorStorage

__all__ = ["HybridQuantizedTensorStorage"]
