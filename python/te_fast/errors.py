"""Exceptions of te_fast.

Every class derives from :class:`TeFastError` and from the built-in that Transformer Engine raises
in the same place, so that an ``except ValueError`` written for Transformer Engine keeps working.
A message names the layer or op, the expected value, the actual value, and the remedy.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentIndexError",
    "ArgumentKeyError",
    "ArgumentNameError",
    "CudaError",
    "DeviceError",
    "DtypeError",
    "HistogramError",
    "ListsError",
    "MissingAttributeError",
    "MissingError",
    "QuantizedTensorError",
    "RanksError",
    "RecipeError",
    "ShapeError",
    "StateDtypeError",
    "StateError",
    "TeFastError",
    "UnsupportedError",
]


class TeFastError(Exception):
    """Base of every error that te_fast raises on purpose."""


class ArgumentError(TeFastError, ValueError, TypeError):
    """An argument that an op or container does not take, or a value that it cannot use.

    Transformer Engine's ops raise ``ValueError`` in some of these places and ``TypeError`` in others.
    """


class ArgumentIndexError(ArgumentError, IndexError, RuntimeError):
    """A container has no module at an index, or an operation has no extra tensor of a number.

    Transformer Engine raises ``IndexError``, and ``RuntimeError`` for a number that is not an integer.
    """


class ArgumentKeyError(ArgumentError, KeyError):
    """A name is unknown; Transformer Engine raises ``KeyError``."""

    def __str__(self) -> str:
        """Return the message without the quotes that ``KeyError`` adds."""
        return str(self.args[0])


class ArgumentNameError(ArgumentError, RuntimeError):
    """An argument is given by its old and its new name, or by neither; Transformer Engine's class."""


class ShapeError(TeFastError, ValueError, AssertionError):
    """A rank, size or alignment does not fit.

    Transformer Engine asserts most of these and raises ``ValueError`` for the others; this class is both.
    """


class ListsError(ShapeError, RuntimeError):
    """Lists of tensors, or the tensors in them, do not fit each other; Transformer Engine raises ``RuntimeError``."""


class DtypeError(TeFastError, TypeError):
    """A tensor has the wrong data type, or an argument the wrong class."""


class HistogramError(ArgumentError, RuntimeError):
    """A histogram of a router, its bounds or the choice do not fit; Transformer Engine raises ``RuntimeError``."""


class DeviceError(TeFastError, RuntimeError):
    """A tensor is on the wrong device, or the device does not support the operation."""


class RecipeError(TeFastError, ValueError, AssertionError):
    """A recipe's fields are out of range or contradict each other.

    Transformer Engine asserts in ``__post_init__``, and pydantic turns that into a ``ValueError``;
    this class is both. A recipe that the device cannot run raises :class:`DeviceError`.
    """


class StateError(TeFastError, RuntimeError):
    """A checkpoint state cannot be read, or an object is used out of order."""


class StateDtypeError(StateError, AssertionError):
    """An optimizer's state has another type than its option says; Transformer Engine asserts."""


class QuantizedTensorError(TeFastError, RuntimeError, ValueError, AssertionError):
    """A quantised tensor lacks a layout, a quantizer, or the class that a quantizer writes to.

    Transformer Engine raises ``RuntimeError`` or ``ValueError`` in some of these places and asserts in others.
    """


class RanksError(TeFastError, RuntimeError, ValueError):
    """Ranks of a group differ, a rank is gone, or a layer was made for another group.

    Every rank raises, with the layer's name.
    """


class MissingAttributeError(TeFastError, AttributeError):
    """An object lacks an attribute that the call reads."""


class UnsupportedError(TeFastError, NotImplementedError):
    """Transformer Engine has an argument or a combination that te_fast does not have (yet)."""


class MissingError(UnsupportedError, AttributeError):
    """Transformer Engine's module has a name that te_fast's module does not have (yet).

    Since it is an ``AttributeError``, ``hasattr`` returns False, and an import of the name raises ``ImportError``.
    """


class CudaError(TeFastError, RuntimeError):
    """A call of the CUDA driver or of cuBLASLt failed.

    CUDA is asynchronous: an error at a launch or a synchronisation may stem from an earlier call.
    ``TE_FAST_SYNC=1`` synchronises after each launch and names the one that failed.
    """
