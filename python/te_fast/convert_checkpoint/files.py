"""Files of checkpoints: read without running code from them, and written completely or not at all."""

from __future__ import annotations

import io
import os
import pickle
import types
from pathlib import Path
from typing import Any

import torch

from te_fast.errors import QuantizedTensorError, StateError
from te_fast.tensor import blockwise, float8, identity_tensor
from te_fast.tensor.dtypes import DType

_ENGINE = "transformer_engine.pytorch"
_MODULES = {
    float8.Float8Tensor: f"{_ENGINE}.tensor.float8_tensor",
    blockwise.Float8BlockwiseQTensor: f"{_ENGINE}.tensor.float8_blockwise_tensor",
    identity_tensor.IdentityTensor: f"{_ENGINE}.tensor.identity_tensor",
}
_MAKERS: dict[Any, Any] = {
    float8.Float8Tensor: float8._make_float8_tensor_in_reduce_ex,
    blockwise.Float8BlockwiseQTensor: blockwise._make_float8_blockwise_tensor_in_reduce_ex,
    identity_tensor.IdentityTensor: identity_tensor._make_identity_tensor_in_reduce_ex,
}
#: Where a tensor's quantizer is among the arguments of its reconstructor.
_QUANTIZER_AT = {blockwise.Float8BlockwiseQTensor: 7, identity_tensor.IdentityTensor: 1}

_QUANTIZERS: dict[Any, Any] = {
    float8.Float8Quantizer: float8.Float8Tensor,
    float8.Float8CurrentScalingQuantizer: float8.Float8Tensor,
    blockwise.Float8BlockQuantizer: blockwise.Float8BlockwiseQTensor,
    identity_tensor.IdentityQuantizer: identity_tensor.IdentityTensor,
}


class _NativeDType:
    """An element type of Transformer Engine's native half, as older streams hold it: a number."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __setstate__(self, number: int) -> None:
        self.number = int(number)

    def __int__(self) -> int:
        return self.number


def _maker_of(kind: Any, name: Any) -> Any:
    """Stand in for ``getattr``, which older streams call for one method."""
    if kind in _MAKERS and name == "_make_in_reduce_ex":
        return _MAKERS[kind]
    message = f"a look-up of {name!r:.60}, which no quantised tensor's stream has"
    raise QuantizedTensorError(message)


def _known() -> list[Any]:
    """List the names that streams of either library use for quantised tensors, and their replacements."""
    pairs: list[Any] = [
        (DType, f"{_ENGINE}.constants.DType"),
        (DType, f"{_ENGINE}.DType"),
        (_NativeDType, "transformer_engine_torch.DType"),
        (_maker_of, "builtins.getattr"),
        (_maker_of, "__builtin__.getattr"),
        (io.BytesIO, "_io.BytesIO"),
    ]
    for kind, module in _MODULES.items():
        # TE 1.x had its classes in other modules, and older te_fast streams had their reconstructors elsewhere.
        old = module.replace(".tensor.", ".")
        for where in (module, old):
            pairs.append((kind, f"{where}.{kind.__name__}"))
            pairs.append((_MAKERS[kind], f"{where}.{_MAKERS[kind].__name__}"))
    pairs += [
        (quantizer, f"{_MODULES[tensor]}.{quantizer.__name__}")
        for quantizer, tensor in _QUANTIZERS.items()
    ]
    return pairs


def read(path: Path) -> Any:
    """Return the content of a file of ``torch.save``, which may hold only known classes.

    Raises
    ------
    StateError
        If the file holds other objects, or is damaged.
    OSError
        If it cannot be opened.
    """
    # By its content, not by its name: torch.load takes a path's ending for the format.
    with path.open("rb") as file, torch.serialization.safe_globals(_known()):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        # torch raises errors of many kinds for damaged files: OSError, KeyError and AssertionError among them.
        except Exception as error:
            message = (
                f"{path}: not a checkpoint of torch.save, or one with objects that are not read without running code: "
                f"{_reason(error)}"
            )
            raise StateError(message) from error


def _reason(error: Exception) -> str:
    """Return why torch read no file, in one line."""
    # torch raises long advice about `weights_only` in place of the unpickler's own error.
    own = error.__context__ if isinstance(error, pickle.UnpicklingError) else None
    shown = str(own or error).strip()
    return shown.splitlines()[0] if shown else type(error).__name__


class _Name:
    """A name of Transformer Engine, which is written but never looked up."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None:
        """Never called; a pickle only writes callables."""


def _foreign(kind: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of Transformer Engine's reconstructor, without a quantizer.

    A weight takes the quantizer of the parameter that it is loaded into.
    """
    if kind is float8.Float8Tensor:
        return arguments[:6]
    at = _QUANTIZER_AT[kind]
    return (*arguments[:at], None, *arguments[at + 1 :])


_PythonPickler: Any = pickle._Pickler


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Writes quantised tensors as Transformer Engine's reconstructors take them."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, _Name):
            return thing.name
        if isinstance(thing, DType):
            return _Name(f"{_ENGINE}.constants", "DType"), (int(thing),)
        # torch writes a parameter as a call that takes its tensor, which comes here next.
        kind = next((kind for kind in _MODULES if isinstance(thing, kind)), None)
        if kind is not None and not isinstance(thing, torch.nn.Parameter):
            _, arguments = thing._reduced()
            return _Name(_MODULES[kind], _MAKERS[kind].__name__), _foreign(kind, arguments)
        return NotImplemented

    def save_global(self, thing: Any, name: Any = None) -> None:
        # Annotations do not know the pickler that is written in Python.
        own: Any = self
        if isinstance(thing, _Name):
            own.write(pickle.GLOBAL + f"{thing.module}\n{thing.name}\n".encode())
            own.memoize(thing)
        else:
            _PythonPickler.save_global(own, thing, name)


_FOREIGN = types.ModuleType("te_fast_foreign_pickle")
_FOREIGN.__dict__.update({name: getattr(pickle, name) for name in pickle.__all__})
_FOREIGN.__dict__["Pickler"] = _Pickler


def write(tree: Any, path: Path, *, foreign: bool) -> None:
    """Write a file completely or not at all.

    Parameters
    ----------
    tree : object
        The content.
    path : Path
        Where.
    foreign : bool
        Write Transformer Engine's names.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        torch.save(tree, part, pickle_module=_FOREIGN if foreign else pickle)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
