"""The error of an argument that a function of the extension does not take."""

from __future__ import annotations

from te_fast.errors import TeFastError


class ExtensionError(TeFastError, RuntimeError, ValueError, TypeError):
    """A shape, type or combination does not fit; Transformer Engine's C++ raises ``RuntimeError``."""
