"""Quantised tensors: FP8 bytes and scales behind torch's tensor interface, and the quantizers that make them."""
