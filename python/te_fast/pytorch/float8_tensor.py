"""FP8 tensors where older code looks for them."""

from te_fast.pytorch.tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
