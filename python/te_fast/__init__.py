"""te_fast: Transformer Engine's FP8 layers for PyTorch at the host cost of ``torch.nn.Linear``.

``te_fast.pytorch`` has the layers under Transformer Engine's names, ``te_fast.dispatch`` the
dispatcher beneath them, :func:`te_fast.profile` tells where a forward's host time goes,
``te_fast.convert`` lets models of other libraries compute by te_fast's layers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from te_fast import errors
from te_fast.errors import (
    CudaError,
    DeviceError,
    DtypeError,
    ShapeError,
    StateError,
    TeFastError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from te_fast import common, dispatch, doctor, profiling, pytorch
    from te_fast.convert import CallableModule as _Convert
    from te_fast.convert_checkpoint import CallableModule as _ConvertCheckpoint
    from te_fast.dispatch import auto_pad
    from te_fast.parallel.checkpoint import load_sharded_state_dict, sharded_state_dict
    from te_fast.parallel.overlap import communication_chunks
    from te_fast.profiling import profile

    convert: _Convert
    convert_checkpoint: _ConvertCheckpoint

#: Transformer Engine's version whose names and signatures ``te_fast.pytorch`` has.
TRANSFORMER_ENGINE_VERSION = "2.20.2"

__all__ = [
    "TRANSFORMER_ENGINE_VERSION",
    "CudaError",
    "DeviceError",
    "DtypeError",
    "ShapeError",
    "StateError",
    "TeFastError",
    "UnsupportedError",
    "__version__",
    "auto_pad",
    "common",
    "communication_chunks",
    "convert",
    "convert_checkpoint",
    "dispatch",
    "doctor",
    "errors",
    "load_sharded_state_dict",
    "profile",
    "profiling",
    "pytorch",
    "sharded_state_dict",
]

_SUBMODULES = {
    "common",
    "convert",
    "convert_checkpoint",
    "dispatch",
    "doctor",
    "profiling",
    "pytorch",
}
# Names that are loaded from a submodule when they are first used.
_FUNCTIONS = {
    "auto_pad": "dispatch",
    "communication_chunks": "parallel.overlap",
    "load_sharded_state_dict": "parallel.checkpoint",
    "profile": "profiling",
    "sharded_state_dict": "parallel.checkpoint",
}


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"te_fast.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"te_fast.{_FUNCTIONS[name]}"), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("te_fast")
        except PackageNotFoundError as error:  # which hasattr would let through
            message = "te_fast has no __version__: it runs from a directory, not from its package"
            raise AttributeError(message) from error
    message = f"module 'te_fast' has no attribute {name!r}"
    raise AttributeError(message)
