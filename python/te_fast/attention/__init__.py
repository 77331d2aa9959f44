"""Attention and what is built around it: rotary embeddings, key-value caches, whole transformer layers."""
