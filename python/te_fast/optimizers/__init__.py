"""Optimizers and functions over lists of tensors, on torch's fused kernels."""
