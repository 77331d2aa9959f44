"""torch's operations on quantised tensors: a table of handlers, and one path for all other operations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from te_fast.errors import QuantizedTensorError, UnsupportedError
from te_fast.runtime import native
from te_fast.runtime.layouts import BLOCK, columnwise_shape
from te_fast.tensor.quantizer import check_whole, note_write, requantize, update_many
from te_fast.tensor.storage import QuantizedTensorStorage, copy_values, has_native_value
from te_fast.tensor.traced import OF_PROGRAMS, taken_apart

aten = torch.ops.aten

#: Operators of other modules that take quantised tensors as they are.
passthrough_ops: set[Any] = set()

#: Types that are quantised and dequantised.
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Handler = Callable[..., Any]
_handlers: dict[Any, Handler] = {}


def shares_versions(func: Any, args: Any) -> bool:
    """Tell whether an operator in inference mode makes a view of a tensor that has versions.

    A tensor and its views count versions together, and tensors that are made in inference mode count none. So the view
    is made outside of this mode.
    """
    return bool(func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference())


def dispatch(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator with a quantised tensor among its arguments.

    Parameters
    ----------
    func : torch._ops.OpOverload
        The operator.
    types, args, kwargs
        As ``__torch_dispatch__`` passes them.
    """
    handler = _handlers.get(func)
    is_shared = shares_versions(func, args)
    if handler is not None:
        with torch.inference_mode(mode=False) if is_shared else nullcontext():
            result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return in_high_precision(func, types, args, kwargs, is_shared=is_shared)


def in_high_precision(
    func: Any,
    types: Any,
    args: Any,
    kwargs: dict[str, Any],
    *,
    is_shared: bool = False,
    is_native: bool = True,
) -> Any:
    """Dequantise, run the operator, and quantise again what it wrote.

    Parameters
    ----------
    func : torch._ops.OpOverload
        The operator.
    types, args, kwargs
        As ``__torch_dispatch__`` passes them.
    is_shared : bool
        Whether a view of a tensor with versions is asked for in inference mode.
    is_native : bool, default = True
        Whether the tensors that the operator writes have native values.

    Raises
    ------
    UnsupportedError
        If the operator is a collective, te_fast's and takes no quantised tensors, or changes a shape in place.
    """
    if func in passthrough_ops:
        return torch.Tensor.__torch_dispatch__(func, types, args, kwargs)
    if func.namespace == "te_fast":
        if func.name() in OF_PROGRAMS:
            return func(*taken_apart(func, args))
        message = f"{func}: this operator of te_fast takes no quantised tensors; dequantize() them"
        raise UnsupportedError(message)
    if func.namespace == "c10d":
        message = (
            f"{func}: a collective may end after the call, when a quantised tensor would have been written already; "
            "communicate its get_data_tensors(), or its dequantize()"
        )
        raise UnsupportedError(message)
    if func._schema.is_mutable:
        if torch.Tag.inplace_view in func.tags and func.overloadpacket is not aten.set_:
            return inplace_view(func, args[0])
        write = _write_in_place if is_native else _write_in_place_generally
        return write(func, args, kwargs)
    result = func(
        *(_plain(arg) for arg in args), **{key: _plain(arg) for key, arg in kwargs.items()}
    )
    if not is_shared:
        return result
    with torch.inference_mode(mode=False):
        return tree_map_only(torch.Tensor, torch.clone, result)


def inplace_view(func: Any, tensor: Any) -> Any:
    """Return a tensor that an operator detaches in place; refuse operators that change its shape or strides in place.

    Other tensors may share the bytes, and would be written if the bytes changed places.

    Raises
    ------
    UnsupportedError
        If the operator is not ``detach_``.
    """
    if func == aten.detach_.default:
        return tensor
    message = (
        f"{func}: the shape of a quantised tensor ({type(tensor).__name__}) is not changed in place; use the function "
        "without _"
    )
    raise UnsupportedError(message)


def _plain(arg: Any) -> Any:
    """Return an argument with quantised tensors dequantised; operators' arguments nest only lists."""
    if isinstance(arg, QuantizedTensorStorage):
        return arg.dequantize()
    if isinstance(arg, list | tuple) and any(
        isinstance(one, QuantizedTensorStorage) for one in arg
    ):
        return type(arg)([_plain(one) for one in arg])
    return arg


class _Writes(NamedTuple):
    """Description of an operator that writes in place."""

    #: Index and name of each argument that it writes.
    arguments: tuple[tuple[int, str], ...]
    #: The indices as bits.
    places: int
    #: Whether it returns the first of them.
    returns_first: bool
    #: The function to call.
    call: Callable[..., Any]


@functools.cache
def writes_of(func: Any) -> _Writes:
    """Return which arguments an operator writes."""
    schema = func._schema
    written = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    returns = schema.returns
    first = bool(written) and len(returns) == 1 and returns[0].alias_info is not None
    # torch's own function reads long lists of tensors in a third of the time. Only the overloads of optimizers'
    # operators differ this little in their arguments.
    name = func.name().partition("::")[2].partition(".")[0]
    direct = getattr(torch, name, func) if name.startswith("_fused_") else func
    return _Writes(written, sum(1 << index for index, _ in written), first, direct)


def _write_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Dequantise, run, and quantise again the tensors that were written."""
    writes = writes_of(func)
    taken = native.plain_arguments(args, kwargs, writes.places)
    if taken is None:
        return _write_in_place_generally(func, args, kwargs)
    plain_args, tensors, sources = taken
    result = writes.call(*plain_args, **kwargs)
    # A tensor that set_ has exchanged may have any strides.
    requantize(tensors, [source.contiguous() for source in sources])
    if not writes.returns_first:
        return result
    index, name = writes.arguments[0]
    return args[index] if index < len(args) else kwargs.get(name)


def _write_in_place_generally(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do the same for traced calls, views and keyword arguments."""
    plain_args = [_plain(arg) for arg in args]
    plain_kwargs = {key: _plain(arg) for key, arg in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    writes = writes_of(func)
    first: Any = None
    values: list[tuple[Any, torch.Tensor]] = []
    for number, (index, name) in enumerate(writes.arguments):
        given = args[index] if index < len(args) else kwargs.get(name)
        plain = plain_args[index] if index < len(args) else plain_kwargs.get(name)
        if number == 0:
            first = given
        if plain is not given:
            values.extend(_to_quantize(given, plain))
    if len(values) == 1:
        ((tensor, source),) = values
        tensor.quantize_(source)
    elif values:
        update_many(*zip(*values, strict=True))
    return first if writes.returns_first else result


def _to_quantize(given: Any, plain: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Return the quantised tensors that were written, and their values."""
    if isinstance(given, list | tuple):
        for one, values in zip(given, plain, strict=True):
            yield from _to_quantize(one, values)
    elif isinstance(given, QuantizedTensorStorage):
        check_whole(given)
        yield given, plain


def is_written_alone(part: Any, source: Any) -> bool:
    """Tell whether a view of a tensor can take values without new scales for the rest of the tensor.

    Parameters
    ----------
    part : torch.Tensor
        Result of a slice; a plain tensor is a copy of the values.
    source : Any
        What is written.
    """
    if not has_native_value(part):
        return False
    if not part.__dict__.get("_is_part", False):
        return True
    return _takes_bytes(part, source) and _takes_scale(part, source)


def expanded(values: torch.Tensor, target: Any) -> torch.Tensor:
    """Return values in the shape of the tensor that they are copied to.

    Raises
    ------
    QuantizedTensorError
        If they cannot be expanded to it.
    """
    if values.shape == target.shape:
        return values
    try:
        return values.expand(target.shape)
    except RuntimeError as error:
        message = (
            f"{type(target).__name__}: copy_ takes values of shape {list(target.shape)}, or of one that expands to it, "
            f"got {list(values.shape)}"
        )
        raise QuantizedTensorError(message) from error


def _handles(*operators: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for operator in operators:
            _handlers[operator] = handler
        return handler

    return register


# The same bytes ----------------------------------------------------------------------------------


@_handles(aten.detach.default, aten.alias.default)
def _detach(tensor: Any) -> Any:
    made = tensor._like(tensor._value.share(), tensor.shape, device=tensor.device)
    pass_on(tensor, made)
    return made


@_handles(aten.view.default, aten._unsafe_view.default)
def _view(tensor: Any, size: Sequence[int]) -> Any:
    return tensor._viewed(size)


def pass_on(tensor: Any, view: Any) -> None:
    """Let a view know what its tensor is a part of."""
    for name in ("_is_part", "_loaded"):
        if name in tensor.__dict__:
            setattr(view, name, tensor.__dict__[name])


def _row_view(tensor: Any, func: Any, *args: Any) -> Any:
    """Return a part of a tensor with one scale, or other strides; the result has only the row layout."""
    value = tensor._value
    if value.block or value.row is None or value.groups != 1:
        return NotImplemented
    return _of_row(tensor, func(value.row, *args))


def _set_part(value: Any, row: torch.Tensor, whole: Any) -> None:
    """Let a value have a part of the row layout of another one, or other strides, and no column layout."""
    value.row = row
    value.note_same_bytes(whole)  # a write of the part is a write of the whole
    value.col = None


def _of_row(tensor: Any, row: torch.Tensor) -> Any:
    value = tensor._value.share()
    is_whole = row.shape == tensor.shape and row.stride() == tensor.stride()
    if not is_whole:
        _set_part(value, row, tensor._value)
    made = tensor._like(value, row.shape, device=tensor.device, stride=row.stride())
    pass_on(tensor, made)
    if row.numel() != tensor.numel():
        made._is_part = True
    return made


@_handles(aten.slice.Tensor)
def _slice(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if tensor._value.block:
        if _is_no_slice(tensor, *args, **kwargs):
            return _detach(tensor)
        return _rows_of_blocks(tensor, *args, **kwargs)
    return _row_view(tensor, lambda row: aten.slice.Tensor(row, *args, **kwargs))


def _is_no_slice(
    tensor: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> bool:
    size = tensor.shape[dim]
    return (start or 0) in (0, -size) and (end is None or end >= size) and step == 1


def _rows_of_blocks(
    tensor: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Return rows of a tensor of 128x128 blocks, beginning at the first row of a block."""
    value, rows = tensor._value, tensor.shape[0]
    start, stop, _ = slice(start, end).indices(rows)
    if (value.block, dim, step, tensor.dim()) != (2, 0, 1, 2) or start % BLOCK or value.row is None:
        return NotImplemented
    if stop != rows and stop % BLOCK:
        return NotImplemented
    made = value.share()
    _set_part(made, value.row[start:stop], value)
    made.row_scale = value.row_scale[start // BLOCK : -(-stop // BLOCK)]
    made.col_scale = None
    return tensor._like(made, made.row.shape, device=tensor.device)


@_handles(aten.select.int)
def _select(tensor: Any, dim: int, index: int) -> Any:
    return _row_view(tensor, aten.select.int, dim, index)


@_handles(aten.as_strided.default)
def _as_strided(
    tensor: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    if tuple(size) == tensor.shape and tuple(stride) == tensor.stride() and not storage_offset:
        return _detach(tensor)
    return _row_view(tensor, aten.as_strided.default, size, stride, storage_offset)


@_handles(aten.split.Tensor, aten.split_with_sizes.default)
def _split(tensor: Any, sizes: Any, dim: int = 0) -> Any:
    value = tensor._value
    if value.row is None or value.groups != 1:
        return NotImplemented
    if value.block:
        return _split_blocks(tensor, sizes, dim)
    return [_of_row(tensor, row) for row in torch.split(value.row, sizes, dim)]


def _split_blocks(tensor: Any, sizes: Any, dim: int) -> Any:
    rows = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, rows - start) for start in range(0, rows, max(sizes, 1))]
    ends = list(itertools.accumulate(sizes))
    parts = [_slice(tensor, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return NotImplemented if any(part is NotImplemented for part in parts) else parts


# Bytes of their own ------------------------------------------------------------------------------


def _mapped(tensor: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with a function applied to the inner tensors."""
    value, made = tensor._value, tensor._value.share()
    valid = value.col_is_valid
    for name in ("row", "row_scale", "col", "col_scale"):
        inner = getattr(value, name)
        if inner is not None and (value.block or name != "col_scale"):
            setattr(made, name, function(inner.detach()))
    made.col_is_valid = valid
    return made


def moved(quantizer: Any, device: torch.device) -> Any:
    """Return a quantizer for tensors on a device, with delayed scaling's scales on that device."""
    scale = getattr(quantizer, "scale", None)
    if quantizer is None or scale is None or scale.device == device:
        return quantizer
    made = quantizer.copy()
    made.scale, made.amax = scale.to(device), quantizer.amax.to(device)
    return made


def _kept(tensor: Any, value: Any, device: torch.device) -> Any:
    quantizer = moved(tensor._quantizer, device)
    return tensor._of_value(value, tensor.shape, tensor.dtype, quantizer, device=device)


@_handles(aten.clone.default)
def _clone(tensor: Any, *, memory_format: Any = None) -> Any:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    copy = _mapped(tensor, lambda inner: inner.clone(memory_format=torch.contiguous_format))
    return _kept(tensor, copy, tensor.device)


@_handles(aten._to_copy.default)
def _to_copy(tensor: Any, **options: Any) -> Any:
    dtype, device = options.get("dtype"), options.get("device")
    if dtype not in (None, tensor.dtype) or options.get("layout") not in (None, torch.strided):
        return NotImplemented
    device = tensor.device if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    non_blocking, pin = options.get("non_blocking", False), options.get("pin_memory", False)

    def copied(inner: torch.Tensor) -> torch.Tensor:
        made = inner.to(device, non_blocking=non_blocking, copy=True)
        return made.pin_memory() if pin else made

    return _kept(tensor, _mapped(tensor, copied), device)


@_handles(aten._pin_memory.default)
def _pin_memory(tensor: Any, device: Any = None) -> Any:
    return _kept(tensor, _mapped(tensor, lambda inner: inner.pin_memory()), tensor.device)


@_handles(aten.is_pinned.default)
def _is_pinned(tensor: Any, device: Any = None) -> bool:
    inner = tensor._value.row if tensor._value.row is not None else tensor._value.col
    return inner is not None and inner.is_pinned()


@_handles(aten.record_stream.default)
def _record_stream(tensor: Any, stream: Any) -> None:
    for name in ("row", "row_scale", "col", "col_scale"):
        inner = getattr(tensor._value, name)
        if inner is not None:
            inner.record_stream(stream)


def _new(tensor: Any, size: Sequence[int], options: dict[str, Any], make: Handler) -> Any:
    """Return empty memory, or zeros, for a tensor with this one's format."""
    if options.get("dtype") not in (None, tensor.dtype):
        return NotImplemented
    if options.get("layout") not in (None, torch.strided):
        return NotImplemented
    device = options.get("device")
    place: dict[str, Any] = {"device": tensor.device if device is None else torch.device(device)}
    if options.get("pin_memory"):
        place["pin_memory"] = True
    old, value = tensor._value, tensor._value.share()
    size = torch.Size(size)
    is_stack = old.groups != 1
    if is_stack and size != tensor.shape:
        return NotImplemented
    value.row = None if old.row is None else make(size, dtype=torch.uint8, **place)
    columns = columnwise_shape(size, stack=is_stack)
    value.col = None if old.col is None else make(columns, dtype=torch.uint8, **place)
    tensor._allocate_scales(value, size, make, place)
    value.col_is_valid = True
    quantizer = moved(tensor._quantizer, place["device"])
    return tensor._of_value(value, size, tensor.dtype, quantizer, device=place["device"])


@_handles(aten.empty_like.default)
def _empty_like(tensor: Any, **options: Any) -> Any:
    return _new(tensor, tensor.shape, options, torch.empty)


@_handles(aten.new_empty.default)
def _new_empty(tensor: Any, size: Sequence[int], **options: Any) -> Any:
    return _new(tensor, size, options, torch.empty)


@_handles(aten.new_zeros.default)
def _new_zeros(tensor: Any, size: Sequence[int], **options: Any) -> Any:
    if tensor._value.block == 1:
        return NotImplemented
    return _new(tensor, size, options, torch.zeros)


# Writing -----------------------------------------------------------------------------------------


def _takes_scale(target: Any, source: Any) -> bool:
    """Tell whether the scale of bytes that a part takes is that of the other parts, or those are zeros without one."""
    if not target.__dict__.get("_is_part", False):
        return True
    own, other = target._value.row_scale, source._value.row_scale.to(target.device)
    return bool(((own == other) | (own == 0)).all())


def _take_scale(part: Any, source: Any) -> None:
    """Let the whole of a part that is loaded have the scale of the bytes that the part takes.

    Raises
    ------
    QuantizedTensorError
        If no checkpoint is loaded, whose parts all come, and with one scale.
    """
    whole = part.__dict__.get("_loaded")
    if whole is None:
        check_whole(part)
        return
    scale = source._value.row_scale.to(part.device).reciprocal()
    rule = False, 0.0, False
    whole.quantize(whole.dequantize(torch.float32), (True, False), rule, scale, None, None)


@_handles(aten.copy_.default)
def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not has_native_value(target):
        dtype = target.dtype if target.dtype in _FLOATS else None
        return target.copy_(source._plain_values(dtype or torch.float32), non_blocking)
    if _takes_bytes(target, source):
        if not _takes_scale(target, source):
            _take_scale(target, source)
        copy_values(target._value, source._value)
        target._remake_columnwise()
        note_write(target)
        return target
    check_whole(target)
    target.quantize_(expanded(_castable(_plain(source), target), target))
    return target


def _castable(source: torch.Tensor, target: Any) -> torch.Tensor:
    """Return plain values in a type that can be quantised: the target's, if the source's cannot."""
    return source if source.dtype in _FLOATS else source.to(target.dtype)


@_handles(aten._foreach_copy_.default)
def _copy_each(targets: Sequence[Any], sources: Sequence[Any], non_blocking: bool = False) -> None:
    """Copy as `_copy` does; plain values are quantised together, and nothing is read of what they overwrite."""
    written = {id(target) for target in targets}
    if len(targets) != len(sources) or any(id(source) in written for source in sources):
        return NotImplemented  # an error of torch's; or the order of the copies matters
    together, plain, others = [], [], []
    for target, source in zip(targets, sources, strict=True):
        if not (has_native_value(target) or has_native_value(source)):
            plain.append((target, source))
        elif has_native_value(source) or source.shape != target.shape:
            others.append((target, source))
        else:
            together.append((target, _castable(source, target)))
    for target, _ in together:
        check_whole(target)
    if plain:
        aten._foreach_copy_.default(*map(list, zip(*plain, strict=True)), non_blocking)
    for target, source in others:
        target.copy_(source, non_blocking)
    if together:
        update_many(*zip(*together, strict=True))
    return None


def _takes_bytes(target: Any, source: Any) -> bool:
    """Tell whether the bytes and scales of one tensor can be copied to the other."""
    if not has_native_value(source) or source.shape != target.shape:
        return False
    own, other = target._value, source._value
    if (own.block, own.fp8, own.groups) != (other.block, other.fp8, other.groups):
        return False
    if own.block and target._shape_of_blocks() != source._shape_of_blocks():
        return False  # flat views of different rows
    if own.row is None:
        return own.col is not None and bool(other.col_is_valid)
    is_missed = own.block == 1 and own.col is not None and not other.col_is_valid
    return other.row is not None and not is_missed
