"""Values in high precision without torch's tensor interface, where Transformer Engine has them."""

from te_fast.pytorch.tensor.identity_tensor import IdentityTensorStorage

__all__ = ["IdentityTensorStorage"]
