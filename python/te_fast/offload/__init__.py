"""Tensors that backward needs, kept in the host's memory in between."""
