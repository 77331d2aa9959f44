"""FP8 with one scale, without torch's tensor interface, where Transformer Engine has it."""

from te_fast.pytorch.tensor.float8_tensor import Float8TensorStorage

__all__ = ["Float8TensorStorage"]
