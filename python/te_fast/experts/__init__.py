"""Mixtures of experts as modules."""
