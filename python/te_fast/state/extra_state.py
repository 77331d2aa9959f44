"""The ``_extra_state`` of layers: the state of delayed scaling in checkpoints.

te_fast writes its own format: a fixed header, the recipe's plain fields, and the scales and histories as raw FP32,
checked by a CRC. Its size depends only on the number of tensors and the length of the histories. After
:func:`write_as`, te_fast writes Transformer Engine's pickles. It always reads these pickles, without executing them.
Recipes that keep nothing between steps have a state of no bytes.
"""

from __future__ import annotations

import ctypes
import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from te_fast.errors import ArgumentError, RecipeError, StateError
from te_fast.recipe import DelayedScaling, Format
from te_fast.state import pickle_writer
from te_fast.state.pickle_reader import Instance, TensorRecord, read

_MAGIC = b"te_fast\0"
_VERSION = 1
# magic, version, CRC of what follows it; format, algorithm, reduce_amax, fp8_dpa, fp8_mha, padding,
# margin, then history length and number of tensors of each direction.
_PREFIX = struct.Struct("<8sII")
_HEADER = struct.Struct("<5B3xi4I")
_FORMATS = (Format.E4M3, Format.HYBRID)
# Users' algorithms cannot be written; a loaded recipe has the default instead.
_ALGORITHMS = ("max", "most_recent")
_KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
LIBRARIES = ("te_fast", "transformer_engine")
_written_as = "te_fast"
_RECIPE_FIELDS = ("margin", "amax_compute_algo", "reduce_amax", "fp8_dpa", "fp8_mha")


@dataclass
class ExtraState:
    """Delayed scaling's state of one layer, on the CPU.

    Attributes
    ----------
    recipe : DelayedScaling
        Recipe of the state. Its ``amax_history_len`` is the length of the histories.
    scale_fwd, scale_bwd : torch.Tensor
        FP32 ``(tensors,)``.
    amax_history_fwd, amax_history_bwd : torch.Tensor
        FP32 ``(history_len, tensors)``.
    """

    recipe: DelayedScaling
    scale_fwd: torch.Tensor
    amax_history_fwd: torch.Tensor
    scale_bwd: torch.Tensor
    amax_history_bwd: torch.Tensor


def _bytes_of(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def write_as(library: str) -> None:
    """Choose the library whose format modules write into checkpoints from now on.

    Parameters
    ----------
    library : {'te_fast', 'transformer_engine'}
        With ``'transformer_engine'`` every module that has ``_extra_state`` in that library writes this key, with no
        bytes if there is no state. The state of delayed scaling is pickled, as Transformer Engine and Megatron-LM read
        it.

    Raises
    ------
    ArgumentError
        For another name.
    """
    global _written_as
    if library not in LIBRARIES:
        message = f"write_as: expected one of {', '.join(map(repr, LIBRARIES))}, got {library!r}"
        raise ArgumentError(message)
    _written_as = library


def written_as() -> str:
    """Return the library whose format modules write."""
    return _written_as


def pack(state: ExtraState | None, *, of_op: bool = False) -> torch.Tensor:
    """Write a state, in the format that :func:`write_as` chose.

    Parameters
    ----------
    state : ExtraState, optional
        ``None`` for recipes that keep nothing.
    of_op : bool, default = False
        The state belongs to a fusible operation, which Transformer Engine pickles differently.

    Returns
    -------
    torch.Tensor
        CPU bytes; an empty tensor for ``None``.
    """
    if state is None:
        return torch.empty(0, dtype=torch.uint8)
    if _written_as == "te_fast":
        return pack_own(state)
    write = pickle_writer.op_state if of_op else pickle_writer.layer_state
    return _tensor_of(write(state))


def pack_own(state: ExtraState) -> torch.Tensor:
    """Write a state in te_fast's format.

    Parameters
    ----------
    state : ExtraState
        The state.

    Returns
    -------
    torch.Tensor
        CPU bytes.
    """
    recipe = state.recipe
    algorithm = recipe.amax_compute_algo
    header = _HEADER.pack(
        _FORMATS.index(recipe.fp8_format),
        _ALGORITHMS.index(algorithm) if algorithm in _ALGORITHMS else 0,
        bool(recipe.reduce_amax),
        bool(recipe.fp8_dpa),
        bool(recipe.fp8_mha),
        recipe.margin,
        *state.amax_history_fwd.shape,
        *state.amax_history_bwd.shape,
    )
    body = header + b"".join(_bytes_of(getattr(state, key).float()) for key in _KEYS)
    return _tensor_of(_PREFIX.pack(_MAGIC, _VERSION, zlib.crc32(body)) + body)


def unpack(state: torch.Tensor | io.BytesIO | None, *, layer: str) -> ExtraState | None:
    """Read a state that te_fast or Transformer Engine wrote.

    Parameters
    ----------
    state : torch.Tensor or io.BytesIO, optional
        The tensor from the checkpoint.
    layer : str
        Name of the layer, for messages.

    Returns
    -------
    ExtraState or None
        ``None`` if there is nothing to restore.

    Raises
    ------
    StateError
        If the bytes are damaged, or do not hold such a state.
    """
    try:
        data = _data_of(state)
        if not data:
            return None
        return _unpack_own(data) if data.startswith(_MAGIC) else _unpack_pickled(data)
    except Exception as error:
        message = (
            f"{layer}: cannot read _extra_state: {str(error) or type(error).__name__}. The "
            "checkpoint is damaged, or was not written by te_fast or Transformer Engine; remove "
            "this key from the state_dict to start with fresh scales"
        )
        raise StateError(message) from error


def _is_placeholder(state: Any) -> bool:
    """Tell whether a value is what ``torch.distributed.checkpoint.state_dict`` passes for a missing state."""
    kind = type(state)
    return (kind.__module__, kind.__name__) == (
        "torch.distributed.checkpoint.state_dict",
        "_EXTRA_STATE",
    )


def _data_of(state: torch.Tensor | io.BytesIO | None) -> bytes:
    if state is None or _is_placeholder(state):
        return b""
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
        found = getattr(state, "dtype", type(state).__name__)
        message = f"expected a tensor of torch.uint8, got {found}"
        raise StateError(message)
    return _bytes_of(state) if state.numel() else b""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise StateError(message)


def _unpack_own(data: bytes) -> ExtraState:
    start = _PREFIX.size + _HEADER.size
    _require(len(data) >= start, f"expected at least {start} bytes, got {len(data)}")
    _, version, checksum = _PREFIX.unpack_from(data)
    _require(version == _VERSION, f"expected format version {_VERSION}, got {version}")
    fields = _HEADER.unpack_from(data, _PREFIX.size)
    number_format, algorithm, reduce_amax, fp8_dpa, fp8_mha, margin, *lengths = fields
    shapes = ((lengths[1],), tuple(lengths[:2]), (lengths[3],), tuple(lengths[2:]))
    size = start + 4 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    _require(len(data) == size, f"expected {size} bytes, got {len(data)}")
    _require(zlib.crc32(data[_PREFIX.size :]) == checksum, "the checksum does not match")
    _require(
        number_format < len(_FORMATS) and algorithm < len(_ALGORITHMS), "unknown recipe fields"
    )
    recipe = DelayedScaling(
        margin=margin,
        fp8_format=_FORMATS[number_format],
        amax_history_len=lengths[0],
        amax_compute_algo=_ALGORITHMS[algorithm],
        reduce_amax=bool(reduce_amax),
        fp8_dpa=bool(fp8_dpa),
        fp8_mha=bool(fp8_mha),
        backward_override=None,
    )
    values = torch.frombuffer(bytearray(data[start:]), dtype=torch.float32)
    parts = torch.split(values, [torch.Size(shape).numel() for shape in shapes])
    tensors = [part.reshape(shape).clone() for part, shape in zip(parts, shapes, strict=True)]
    return _checked(recipe, tensors)


def _checked(recipe: DelayedScaling, tensors: list[torch.Tensor]) -> ExtraState:
    for index, direction in ((0, "forward"), (2, "backward")):
        scale, history = tensors[index : index + 2]
        _require(
            scale.dtype is torch.float32 and history.dtype is torch.float32,
            f"{direction} scales and histories must be torch.float32",
        )
        _require(
            # Ops that quantise in one direction have no scales for the other.
            history.dim() == 2 and len(history) > 0 and scale.shape == history.shape[1:],
            f"{direction} histories of shape {tuple(history.shape)} do not fit scales of shape "
            f"{tuple(scale.shape)}",
        )
        _require(
            bool(((scale > 0) & scale.isfinite()).all()),
            f"{direction} scales must be positive and finite",
        )
        _require(not bool((history < 0).any()), f"{direction} maxima must not be negative")
    lengths = [len(tensors[i + 1]) for i in (0, 2) if tensors[i].numel()]
    _require(bool(lengths), "expected scales of one tensor at least")
    recipe.amax_history_len = lengths[0]
    return ExtraState(recipe, *tensors)


def _unpack_pickled(data: bytes) -> ExtraState | None:
    root = read(data)
    if root is None:
        return None
    _require(type(root) is dict, "expected a dictionary")
    if root.keys() <= {"forward", "backward"}:
        root = _flattened(root)
        if root is None:
            return None
    recipe = root.get("recipe")
    if isinstance(recipe, Instance) and recipe.name != "DelayedScaling":
        return None
    # Transformer Engine 1.x saved no recipe, since delayed scaling was the only one.
    _require(recipe is None or isinstance(recipe, Instance), "expected a recipe")
    records = [root.get(key) for key in _KEYS]
    tensors = [item.tensor() if isinstance(item, TensorRecord) else item for item in records]
    missing = any(not isinstance(tensor, torch.Tensor) for tensor in tensors)
    _require(not missing, f"expected the tensors {', '.join(_KEYS)}")
    return _checked(_recipe_of(recipe), tensors)


def _flattened(root: dict[Any, Any]) -> dict[Any, Any] | None:
    """Bring the state of a ``transformer_engine.pytorch.ops`` op, by direction, into a layer's form.

    In the op's state, a direction without quantised tensors is absent; in the layer's form it has no scales.
    """
    parts = [root[mode] for mode in ("forward", "backward") if mode in root]
    _require(all(type(part) is dict for part in parts), "expected a dictionary of each direction")
    if not parts:
        return None
    flat: dict[Any, Any] = {"recipe": parts[0].get("recipe")}
    for part in parts:
        flat.update((key, value) for key, value in part.items() if key in _KEYS)
    for (scale, history), other in ((_KEYS[:2], _KEYS[3]), (_KEYS[2:], _KEYS[1])):
        if scale not in flat and history not in flat:
            length = _length_of(flat.get(other))
            flat[scale], flat[history] = torch.empty(0), torch.empty(length, 0)
    return flat


def _length_of(history: Any) -> int:
    """Return the number of rows of a history in the stream; 1 if it is not a history."""
    size = history.size if isinstance(history, TensorRecord) else getattr(history, "shape", ())
    return int(size[0]) if len(size) == 2 else 1


def _recipe_of(instance: Instance | None) -> DelayedScaling:
    recipe = DelayedScaling(backward_override=None)
    if instance is None:
        return recipe
    fields = instance.state
    for name in _RECIPE_FIELDS:
        if name in fields:
            value = fields[name]
            setattr(recipe, name, bool(value) if type(getattr(recipe, name)) is bool else value)
    number_format = fields.get("fp8_format")
    if isinstance(number_format, Instance):
        recipe.fp8_format = _format_of(number_format)
    try:
        recipe._validate()
    except RecipeError as error:
        raise StateError(str(error)) from error
    return recipe


def _format_of(instance: Instance) -> Format:
    """Find a pickled member of ``Format``, which is its value or its name."""
    (value,) = instance.args or (None,)
    if isinstance(value, Instance):
        value = value.args
    for member in Format:
        if value in (member.name, tuple(member.value)):
            return member
    message = "unknown Format"
    raise StateError(message)
