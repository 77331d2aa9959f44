"""A reader of pickled checkpoint states that executes nothing.

Transformer Engine keeps the state of delayed scaling as a pickle, which Python's own reader runs as a program. This
reader walks the opcodes and knows the few globals that occur. It imports no name, calls no object of the file, and
allocates no more memory than the length of the file.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from te_fast.errors import StateError

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_RECIPE_MODULE = "transformer_engine.common.recipe"
_RECIPE_NAMES = frozenset(
    {
        "CustomRecipe",
        "DelayedScaling",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Format",
        "MMParams",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "QParams",
        "_FormatHelper",
        "_OverrideLinearPrecision",
    }
)
# If Megatron-LM is loaded, pickles contain the names of its replacements.
_STANDS_FOR = {
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"): (
        _RECIPE_MODULE,
        "DelayedScaling",
    ),
    ("megatron.core.safe_globals", "safe_load_from_bytes"): ("torch.storage", "_load_from_bytes"),
}
_STORAGE_DTYPES = {
    "FloatStorage": torch.float32,
    "ByteStorage": torch.uint8,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
}
_GLOBALS = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "_load_from_bytes"),
        ("builtins", "getattr"),
        ("__builtin__", "getattr"),
        *(("torch", name) for name in _STORAGE_DTYPES),
        *((_RECIPE_MODULE, name) for name in _RECIPE_NAMES),
    }
)
_MAX_DIMENSIONS = 8
# A state has about a hundred opcodes; its numbers are in a few long byte strings.
_MAX_OPCODES = 100_000


@dataclass(frozen=True)
class _Global:
    """A name that the file mentions; never imported."""

    module: str
    name: str


@dataclass
class Instance:
    """An object of one of Transformer Engine's recipe classes."""

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Storage:
    """The elements of tensors; some formats have the bytes after the tensors."""

    key: str
    dtype: torch.dtype
    numel: int
    data: bytes | None = None


@dataclass(frozen=True)
class TensorRecord:
    """A tensor, as described in the file."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """Return a CPU tensor with its own memory.

        Raises
        ------
        StateError
            If the description reaches beyond the file's bytes.
        """
        storage = self.storage
        _expect(storage.data is not None, "a tensor without bytes")
        numel = last = 1
        for size, stride in zip(self.size, self.stride, strict=True):
            numel *= size
            last += (size - 1) * stride
        _expect(numel <= storage.numel, "a tensor larger than its storage")
        if numel == 0:
            return torch.empty(self.size, dtype=storage.dtype)
        _expect(self.offset + last <= storage.numel, "a tensor beyond its storage")
        elements = torch.frombuffer(bytearray(storage.data or b""), dtype=storage.dtype)
        return elements.as_strided(self.size, self.stride, self.offset).clone()


def _expect(condition: bool, found: str) -> None:
    if not condition:
        message = f"found {found}"
        raise StateError(message)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**40


def _is_sizes(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= _MAX_DIMENSIONS and all(map(_is_size, value))


class _Mark:
    """Position of an opened container on the stack."""


_PUSH_ARGUMENT = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
    }
)
_PUSH_CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Runs one pickle of a stream."""

    def __init__(self, storages: dict[str, _Storage], *, nested: bool) -> None:
        self.storages = storages
        self.nested = nested
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: io.BytesIO) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            _expect(count < _MAX_OPCODES, "more opcodes than a state has")
            name = opcode.name
            if name == "STOP":
                return self._pop()
            if name in _PUSH_ARGUMENT:
                self.stack.append(argument)
            elif name in _PUSH_CONSTANT:
                self.stack.append(_PUSH_CONSTANT[name])
            elif name in _TUPLES:
                self._tuple(_TUPLES[name])
            else:
                handler = _HANDLERS.get(name)
                _expect(handler is not None, f"the pickle opcode {name}")
                if handler is not None:
                    handler(self, argument)
        message = "the pickle has no end"
        raise StateError(message)

    def _pop(self) -> Any:
        value = self.stack.pop()
        _expect(not isinstance(value, _Mark), "an unbalanced pickle")
        return value

    def _pop_mark(self) -> list[Any]:
        items: list[Any] = []
        while not isinstance(value := self.stack.pop(), _Mark):
            items.append(value)
        items.reverse()
        return items

    def _ignore(self, _: Any) -> None:
        pass

    def _mark(self, _: Any) -> None:
        self.stack.append(_Mark())

    def _discard(self, _: Any) -> None:
        self.stack.pop()

    def _tuple(self, length: int) -> None:
        _expect(len(self.stack) >= length, "an unbalanced pickle")
        items = self.stack[-length:]
        _expect(not any(isinstance(item, _Mark) for item in items), "an unbalanced pickle")
        self.stack[-length:] = [tuple(items)]

    def _mark_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._pop_mark()))

    def _mark_list(self, _: Any) -> None:
        self.stack.append(self._pop_mark())

    def _empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def _empty_list(self, _: Any) -> None:
        self.stack.append([])

    def _mark_dict(self, _: Any) -> None:
        items = self._pop_mark()
        self.stack.append({})
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        _expect(type(target) is dict and len(items) % 2 == 0, "an unbalanced pickle")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a deeply nested tuple would exhaust the stack of the process.
            _expect(type(key) in (str, int), "a dictionary key that is no text")
            target[key] = value

    def _setitem(self, _: Any) -> None:
        value = self._pop()
        self._update([self._pop(), value])

    def _setitems(self, _: Any) -> None:
        self._update(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        _expect(type(self.stack[-1]) is list, "an unbalanced pickle")
        self.stack[-1].extend(items)

    def _append(self, _: Any) -> None:
        self._extend([self._pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._pop_mark())

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _memoize(self, _: Any) -> None:
        self._put(len(self.memo))

    def _get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def _push_global(self, module: object, name: object) -> None:
        asked = (module, name) if type(module) is str and type(name) is str else ("", "")
        found = _STANDS_FOR.get(asked, asked)
        shown = f"{str(module)[:80]}.{str(name)[:80]}"
        _expect(found in _GLOBALS, f"the name {shown}, which is not allowed")
        self.stack.append(_Global(*found))

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push_global(module, name)

    def _stack_global(self, _: Any) -> None:
        name = self._pop()
        module = self._pop()
        _expect(type(module) is str and type(name) is str, "a name that is no text")
        self._push_global(module, name)

    def _persistent(self, _: Any) -> None:
        record = self._pop()
        _expect(
            type(record) is tuple and len(record) in (5, 6) and record[0] == "storage",
            "an unknown reference",
        )
        _, kind, key, _, numel, *views = record
        _expect(views in ([], [None]), "a view of a storage")
        _expect(
            isinstance(kind, _Global) and kind.name in _STORAGE_DTYPES and type(key) is str,
            "an unknown storage",
        )
        _expect(_is_size(numel), "an impossible storage size")
        dtype = _STORAGE_DTYPES[kind.name]
        storage = self.storages.setdefault(key, _Storage(key, dtype, numel))
        _expect((storage.dtype, storage.numel) == (dtype, numel), "two storages of one name")
        self.stack.append(storage)

    def _new(self, _: Any) -> None:
        args = self._pop()
        target = self._pop()
        _expect(
            isinstance(target, _Global) and target.module == _RECIPE_MODULE and type(args) is tuple,
            "an object of an unknown class",
        )
        self.stack.append(Instance(target.name, args))

    def _build(self, _: Any) -> None:
        state = self._pop()
        target = self.stack[-1]
        if type(state) is tuple and len(state) == 2 and state[0] is None:
            state = state[1]
        _expect(isinstance(target, Instance) and type(state) is dict, "an unknown object state")
        target.state.update(state)

    def _reduce(self, _: Any) -> None:
        args = self._pop()
        target = self._pop()
        _expect(isinstance(target, _Global) and type(args) is tuple, "a call of an unknown object")
        self.stack.append(self._call(target, args))

    def _call(self, target: _Global, args: tuple[Any, ...]) -> Any:
        if target.module == _RECIPE_MODULE:
            return Instance(target.name, args)
        if target.name == "OrderedDict":
            _expect(not args, "an ordered dictionary with items")
            return {}
        if target.name == "_rebuild_tensor_v2":
            return _tensor_record(args)
        if target.name == "getattr":
            _expect(
                len(args) == 2 and args[0] == _Global(_RECIPE_MODULE, "Format"),
                "a look-up of an attribute",
            )
            return Instance("Format", args[1:])
        _expect(target.name == "_load_from_bytes", f"a call of {target.module}.{target.name}")
        _expect(not self.nested, "a saved object inside a saved storage")
        _expect(len(args) == 1 and type(args[0]) is bytes, "an unreadable storage")
        storage = _read_legacy(io.BytesIO(args[0]), nested=True)
        _expect(isinstance(storage, _Storage), "a saved object that is no storage")
        return storage


def _tensor_record(args: tuple[Any, ...]) -> TensorRecord:
    _expect(len(args) in (6, 7), "an unknown kind of tensor")
    storage, offset, size, stride = args[:4]
    _expect(
        isinstance(storage, _Storage)
        and _is_size(offset)
        and _is_sizes(size)
        and _is_sizes(stride)
        and len(size) == len(stride),
        "an impossible tensor",
    )
    return TensorRecord(storage, offset, size, stride)


_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine._ignore,
    "FRAME": _Machine._ignore,
    "MARK": _Machine._mark,
    "POP": _Machine._discard,
    "TUPLE": _Machine._mark_tuple,
    "LIST": _Machine._mark_list,
    "DICT": _Machine._mark_dict,
    "EMPTY_DICT": _Machine._empty_dict,
    "EMPTY_LIST": _Machine._empty_list,
    "SETITEM": _Machine._setitem,
    "SETITEMS": _Machine._setitems,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "PUT": _Machine._put,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._memoize,
    "GET": _Machine._get,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "BINPERSID": _Machine._persistent,
    "NEWOBJ": _Machine._new,
    "BUILD": _Machine._build,
    "REDUCE": _Machine._reduce,
}


def _read_legacy(stream: io.BytesIO, *, nested: bool) -> Any:
    """Read what ``torch.save`` wrote before it wrote archives: five pickles, then the storages."""
    storages: dict[str, _Storage] = {}

    def pickled() -> Any:
        return _Machine(storages, nested=nested).run(stream)

    _expect(pickled() == _LEGACY_MAGIC, "no saved tensor")
    pickled()  # protocol
    system = pickled()
    _expect(type(system) is dict and system.get("little_endian") is True, "big-endian tensors")
    root = pickled()
    keys = pickled()
    _expect(type(keys) is list, "no list of storages")
    for key in keys:
        _expect(type(key) is str and key in storages, "an unknown storage")
        storage = storages[key]
        numel = int.from_bytes(stream.read(8), "little")
        data = stream.read(numel * storage.dtype.itemsize)
        _expect(numel == storage.numel, "a storage of another size")
        _expect(len(data) == numel * storage.dtype.itemsize, "a truncated storage")
        storage.data = data
    _expect(not stream.read(1), "trailing bytes")
    return root


def _read_archive(data: bytes) -> Any:
    """Read the zip archive that ``torch.save`` writes."""
    storages: dict[str, _Storage] = {}
    left = len(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}

        def member(name: str) -> bytes:
            nonlocal left
            entry = entries[name]
            # Entries might overlap, so their sum must not be longer than the file.
            left -= entry.file_size
            _expect(entry.compress_type == zipfile.ZIP_STORED and left >= 0, "a compressed member")
            return archive.read(entry)

        roots = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
        _expect(len(roots) == 1, "an archive that torch.save did not write")
        prefix = roots[0].removesuffix("data.pkl")
        if f"{prefix}byteorder" in entries:
            _expect(member(f"{prefix}byteorder") == b"little", "big-endian tensors")
        stream = io.BytesIO(member(roots[0]))
        root = _Machine(storages, nested=False).run(stream)
        _expect(not stream.read(1), "trailing bytes")
        for storage in storages.values():
            storage.data = member(f"{prefix}data/{storage.key}")
            size = storage.numel * storage.dtype.itemsize
            _expect(len(storage.data) == size, "a storage of another size")
    return root


def read(data: bytes) -> Any:
    """Read a pickle, or what ``torch.save`` wrote.

    Parameters
    ----------
    data : bytes
        The whole file.

    Returns
    -------
    object
        Built-in containers and numbers, :class:`Instance` and :class:`TensorRecord`.

    Raises
    ------
    StateError
        If the file holds other objects, or is damaged.
    """
    if data.startswith(b"PK\x03\x04"):
        return _read_archive(data)
    stream = io.BytesIO(data)
    root = _Machine({}, nested=False).run(stream)
    if root == _LEGACY_MAGIC:
        stream.seek(0)
        return _read_legacy(stream, nested=False)
    _expect(not stream.read(1), "trailing bytes")
    return root
