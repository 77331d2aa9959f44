"""Functions over lists of tensors where Transformer Engine has them."""

from te_fast.optimizers.multi_tensor import MultiTensorApply, multi_tensor_applier

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
