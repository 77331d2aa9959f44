"""Transformer Engine's names that do not depend on the framework."""

from te_fast.common import recipe

__all__ = ["recipe"]
