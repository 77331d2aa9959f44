"""Checkpoints from and to Transformer Engine.

te_fast loads Transformer Engine's checkpoints as they are. Transformer Engine cannot load te_fast's ``_extra_state``,
and knows quantised weights only by its own names. From Python::

    state = te_fast.convert_checkpoint(model.state_dict(), to="transformer_engine")

From the shell, on files and folders of files of ``torch.save``::

    python -m te_fast.convert_checkpoint --to transformer_engine --dry-run step_1000.pt converted.pt

The module itself is callable: ``te_fast.convert_checkpoint(...)`` is
:func:`te_fast.convert_checkpoint.convert_checkpoint`.
"""

from __future__ import annotations

import argparse
import copy
import io
import sys
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from te_fast.convert_checkpoint import files
from te_fast.errors import ArgumentError, StateError, TeFastError, UnsupportedError
from te_fast.state import extra_state, pickle_writer
from te_fast.tensor.hybrid_tensor import HybridQuantizedTensorStorage
from te_fast.tensor.storage import QuantizedTensorStorage

__all__ = ["Report", "convert_checkpoint", "convert_file", "main"]

Format = Literal["transformer_engine", "te_fast"]
_FORMATS = ("transformer_engine", "te_fast")
_STATE = "_extra_state"
#: Files of torch.save, by how their names end.
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_BAR = 30


@dataclass
class Report:
    """A report of a conversion, or of a dry run.

    Attributes
    ----------
    states : list of str
        Keys of the states of delayed scaling that were written anew.
    weights : list of str
        Keys of quantised weights: written by the other library's names, or dequantised.
    left : int
        Entries that stay as they are.

    See Also
    --------
    convert_checkpoint, convert_file : Fill one.

    Examples
    --------
    >>> import torch
    >>> import te_fast
    >>> report = te_fast.convert_checkpoint.Report()
    >>> state = te_fast.convert_checkpoint({"weight": torch.ones(2)}, report=report)
    >>> report.left
    1
    """

    states: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    left: int = 0

    def __str__(self) -> str:
        """Return the report in one line."""
        return (
            f"{len(self.states)} states of delayed scaling, {len(self.weights)} quantised weights, "
            f"{self.left} entries as they were"
        )


def convert_checkpoint(
    checkpoint: Any,
    *,
    to: Format = "transformer_engine",
    dequantize: bool = False,
    report: Report | None = None,
) -> Any:
    """Return a checkpoint that the other library loads.

    Parameters
    ----------
    checkpoint : mapping
        A ``state_dict``, or dictionaries, lists and tuples of any depth that contain some. It is not changed.
    to : {'transformer_engine', 'te_fast'}, default = 'transformer_engine'
        The library that will load the result. Every ``_extra_state`` of delayed scaling is written in this library's
        format, whichever format it had.
    dequantize : bool, default = False
        Convert quantised weights to plain tensors of their nominal type, for models without quantised weights.
        Parameters stay parameters.
    report : Report, optional
        Filled with the keys that were converted.

    Returns
    -------
    mapping
        A copy of the same classes, which shares the tensors that did not have to be written anew.

    Raises
    ------
    StateError
        If a state is damaged.
    ArgumentError
        If `to` is another name, or `checkpoint` is a module.
    UnsupportedError
        If a weight is a HybridQuantizedTensor, and `to` is Transformer Engine without `dequantize`.

    See Also
    --------
    convert_file : Converts a file.
    te_fast.state.extra_state.write_as : Lets layers write the other library's states.

    Examples
    --------
    >>> import torch
    >>> import te_fast
    >>> import te_fast.pytorch as te
    >>> layer = te.Linear(16, 16, device="cpu")
    >>> with te.autocast():
    ...     y = layer(torch.ones(16, 16))
    >>> state = te_fast.convert_checkpoint(layer.state_dict(), to="transformer_engine")
    >>> sorted(state)
    ['_extra_state', 'bias', 'weight']
    """
    if to not in _FORMATS:
        message = (
            f"convert_checkpoint: to must be one of {', '.join(map(repr, _FORMATS))}, got {to!r}"
        )
        raise ArgumentError(message)
    if isinstance(checkpoint, torch.nn.Module):
        message = (
            "convert_checkpoint: checkpoint must be a state_dict, or containers of some, got "
            f"{type(checkpoint).__name__}; pass its state_dict()"
        )
        raise ArgumentError(message)
    report = Report() if report is None else report
    return _Conversion(to, dequantize, report).of(checkpoint, "")


@dataclass
class _Conversion:
    to: str
    dequantizes: bool
    report: Report

    def of(self, value: Any, path: str) -> Any:
        if path.rpartition(".")[2] == _STATE:
            return self._state(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list | tuple):
            made = [self.of(item, f"{path}.{index}") for index, item in enumerate(value)]
            same = all(one is other for one, other in zip(made, value, strict=True))
            kind = type(value)
            # A named tuple takes its items one by one.
            return value if same else getattr(kind, "_make", kind)(made)
        if isinstance(value, QuantizedTensorStorage):
            self.report.weights.append(path)
            return self._weight(value, path)
        self.report.left += 1
        return value

    def _mapping(self, value: Any, path: str) -> Any:
        made = {
            key: self.of(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()
        }
        if all(made[key] is item for key, item in value.items()):
            return value
        if not isinstance(value, MutableMapping):
            return type(value)(made)
        # The copy has the attributes of the mapping; torch keeps versions of modules there.
        result = copy.copy(value)
        for key, item in made.items():
            result[key] = item
        return result

    def _weight(self, value: Any, path: str) -> Any:
        if self.dequantizes:
            with torch.no_grad():
                plain = value.dequantize()
            is_parameter = isinstance(value, torch.nn.Parameter)
            return torch.nn.Parameter(plain, value.requires_grad) if is_parameter else plain
        if self.to == _FORMATS[0] and isinstance(value, HybridQuantizedTensorStorage):
            message = (
                f"convert_checkpoint: {path} is a {type(value).__name__}, which Transformer Engine reads with its own "
                "quantizers alone; convert with dequantize=True (--dequantize)"
            )
            raise UnsupportedError(message)
        return value

    def _state(self, value: Any, path: str) -> Any:
        is_state = value is None or isinstance(value, torch.Tensor | io.BytesIO)
        read = extra_state.unpack(value, layer=path) if is_state else None
        if read is None:
            self.report.left += 1
            return value
        self.report.states.append(path)
        if self.to == "te_fast":
            return extra_state.pack_own(read)
        return pickle_writer.write(read)


def convert_file(
    source: str | Path,
    target: str | Path,
    *,
    to: Format = "transformer_engine",
    dequantize: bool = False,
    dry_run: bool = False,
) -> Report:
    """Convert a file of ``torch.save``.

    No code from the file is run. The file may hold tensors, quantised tensors of either library, and Python's
    containers.

    Parameters
    ----------
    source, target : str or Path
        The files. `target` must not exist; it is written completely or not at all.
    to, dequantize
        As of :func:`convert_checkpoint`.
    dry_run : bool, default = False
        Write nothing.

    Returns
    -------
    Report
        What was converted.

    Raises
    ------
    StateError
        If `source` holds other objects or is damaged, or `target` exists.
    ArgumentError, UnsupportedError
        As of :func:`convert_checkpoint`.
    OSError
        If a file cannot be read or written.

    See Also
    --------
    convert_checkpoint : Converts a loaded checkpoint.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import torch
    >>> import te_fast
    >>> folder = Path(tempfile.mkdtemp())
    >>> torch.save({"weight": torch.ones(2)}, folder / "own.pt")
    >>> te_fast.convert_checkpoint.convert_file(folder / "own.pt", folder / "other.pt").left
    1
    >>> torch.load(folder / "other.pt")
    {'weight': tensor([1., 1.])}
    """
    source, target = Path(source), Path(target)
    if target.exists() and not dry_run:
        message = f"convert_checkpoint: {target} is there already; remove it, or name another file"
        raise StateError(message)
    report = Report()
    made = convert_checkpoint(files.read(source), to=to, dequantize=dequantize, report=report)
    if not dry_run:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write(made, target, foreign=to == "transformer_engine")
    return report


def _pairs(source: Path, target: Path) -> list[tuple[Path, Path]]:
    """Return sources and targets of a conversion: one file, or the files of a folder."""
    if not source.is_dir():
        if not source.exists():
            message = f"convert_checkpoint: there is no {source}"
            raise StateError(message)
        return [(source, target)]
    found = [
        path for path in sorted(source.rglob("*")) if path.suffix in _SUFFIXES and path.is_file()
    ]
    if not found:
        message = (
            f"convert_checkpoint: no file of torch.save ({', '.join(_SUFFIXES)}) in {source}; save a distributed "
            "checkpoint as one first, by torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        )
        raise StateError(message)
    return [(path, target / path.relative_to(source)) for path in found]


def _with_bar(pairs: Sequence[Any], show: Callable[[Any], str], out: TextIO) -> Iterator[Any]:
    """Go through files, and show the progress on a terminal."""
    for number, pair in enumerate(pairs):
        if out.isatty():
            done = _BAR * number // len(pairs)
            out.write(
                f"\r\033[K[{'#' * done}{' ' * (_BAR - done)}] {number}/{len(pairs)} {show(pair)}"
            )
            out.flush()
        yield pair
    if out.isatty():
        out.write(f"\r\033[K[{'#' * _BAR}] {len(pairs)}/{len(pairs)}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process by default.

    Returns
    -------
    int
        0, or 2 after an error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m te_fast.convert_checkpoint",
        description="Convert checkpoints of torch.save from and to Transformer Engine.",
    )
    parser.add_argument("source", type=Path, help="a file, or a folder of files")
    parser.add_argument("target", type=Path, help="the result; must not exist")
    parser.add_argument(
        "--to", choices=_FORMATS, default=_FORMATS[0], help="the library that will load the result"
    )
    parser.add_argument(
        "--dequantize", action="store_true", help="convert quantised weights to plain tensors"
    )
    parser.add_argument("--dry-run", action="store_true", help="report what would be done")
    asked = parser.parse_args(arguments)
    options = {"to": asked.to, "dequantize": asked.dequantize, "dry_run": asked.dry_run}
    try:
        pairs = _pairs(asked.source, asked.target)
        lines = []
        for source, target in _with_bar(pairs, lambda pair: pair[0].name, sys.stderr):
            lines.append(f"{source} -> {target}: {convert_file(source, target, **options)}")
    except (TeFastError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


_Report = Report


class CallableModule(types.ModuleType):
    """A callable module, so that ``te_fast.convert_checkpoint(...)`` works although it is a submodule.

    Its attributes tell type checkers what the module has.
    """

    __call__ = staticmethod(convert_checkpoint)
    Report = _Report
    convert_checkpoint = staticmethod(convert_checkpoint)
    convert_file = staticmethod(convert_file)
    main = staticmethod(main)


sys.modules[__name__].__class__ = CallableModule
