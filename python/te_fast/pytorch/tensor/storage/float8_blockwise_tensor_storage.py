"""FP8 with a scale for each block, without torch's tensor interface, where Transformer Engine has it."""

from te_fast.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensorStorage

__all__ = ["Float8BlockwiseQTensorStorage"]
