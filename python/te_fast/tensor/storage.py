"""Quantised values without torch's tensor interface, and the base class of tensors and storages.

Storages are for internal use: they are cheaper to make than tensors, and unknown to autograd. Tensors and storages have
one native value (``_value``), which owns bytes and scales; attributes with Transformer Engine's field names read and
write it.
"""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import (
    ArgumentError,
    DtypeError,
    MissingAttributeError,
    QuantizedTensorError,
    ShapeError,
    TeFastError,
)
from te_fast.runtime import native
from te_fast.runtime.compiling import is_traced
from te_fast.runtime.layouts import make_columnwise
from te_fast.tensor.dtypes import FROM_NATIVE, DType, fp8_name

if TYPE_CHECKING:
    from te_fast.tensor.quantizer import Quantizer

Tensors = list[torch.Tensor | None]


def has_native_value(tensor: Any) -> bool:
    """Tell whether a tensor or storage has FP8 bytes in a native value of its own."""
    return isinstance(tensor, QuantizedTensorStorage) and "_value" in tensor.__dict__


def check_bytes(
    tensors: Iterable[torch.Tensor | None], owner: str, shape: torch.Size | None = None
) -> None:
    """Refuse data with wider elements, since kernels read bytes, and data of another size than a shape.

    Raises
    ------
    DtypeError
        If elements are not one byte wide.
    ShapeError
        If their number is not that of `shape`; flattened data fits.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype.itemsize != 1:
            message = f"{owner}: data must be torch.uint8, got {tensor.dtype}"
            raise DtypeError(message)
        # A comparison of a trace's symbolic sizes would become a guard.
        if shape is not None and not is_traced(tensor) and tensor.numel() != shape.numel():
            message = (
                f"{owner} of shape {list(shape)}: data must be of {shape.numel()} bytes, got a tensor of shape "
                f"{list(tensor.shape)}; make a new tensor for another shape"
            )
            raise ShapeError(message)


def field(name: str, doc: str) -> Any:
    """Return an attribute that forwards to a field of the native value."""
    holds_bytes = name in ("row", "col")

    def write(self: QuantizedTensorStorage, tensor: torch.Tensor | None) -> None:
        if holds_bytes:
            shape = self.shape if isinstance(self, torch.Tensor) else None
            check_bytes((tensor,), type(self).__name__, shape)
        setattr(self._value, name, tensor)
        if name == "row":
            # The bytes are the caller's, who gathers them again for each use as Megatron-FSDP does: backward reads the
            # bytes that are there then.
            self._value.keeps_col = False

    def delete(self: QuantizedTensorStorage) -> None:
        setattr(self._value, name, None)

    return property(attrgetter(f"_value.{name}"), write, delete, doc)


def whole_size(shape: Sequence[int], size: Sequence[int]) -> torch.Size:
    """Return the size of a view, with -1 resolved as torch does."""
    if -1 not in size:
        return torch.Size(size)
    return torch.empty(tuple(shape), device="meta").view(tuple(size)).shape


class QuantizedTensorStorage:
    """A quantised value: FP8 bytes and inverse scales, in row layout, column layout or both.

    Attributes
    ----------
    _quantizer : Quantizer or None
        The quantizer that writes new values.
    _dtype : torch.dtype
        The nominal type, which is the type of the dequantised values.

    See Also
    --------
    QuantizedTensor : With torch's interface.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> x = quantizer(torch.ones(16, 16))
    >>> isinstance(x, te.QuantizedTensorStorage), x.get_metadata()["fp8_dtype"].name
    (True, 'kFloat8E4M3')
    """

    _value: native.QuantizedValue
    _quantizer: Quantizer | None
    _dtype: torch.dtype

    @classmethod
    def _storage_of(
        cls, value: native.QuantizedValue, dtype: torch.dtype, quantizer: Quantizer | None
    ) -> Any:
        """Return a storage over a value, with a copy of a quantizer."""
        made = object.__new__(cls)
        made._value = value
        made._dtype = dtype
        made._quantizer = None if quantizer is None else quantizer.copy()
        return made

    @property
    def _fp8_dtype(self) -> DType:
        """Type of the bytes."""
        return FROM_NATIVE[self._value.fp8]

    @_fp8_dtype.setter
    def _fp8_dtype(self, dtype: Any) -> None:
        self._value.fp8 = fp8_name(dtype)

    # Layouts -------------------------------------------------------------------------------

    def get_usages(self) -> dict[str, bool]:
        """Return which layouts the value has."""
        value = self._value
        return {"rowwise": value.row is not None, "columnwise": value.col_is_valid}

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """Return the bytes of both layouts, or of one of them.

        Raises
        ------
        ArgumentError
            If neither layout is requested.
        """
        value = self._value
        if rowwise_data and columnwise_data:
            return value.row, value.col
        if not rowwise_data and not columnwise_data:
            message = f"{type(self).__name__}: ask for rowwise_data or columnwise_data"
            raise ArgumentError(message)
        return value.row if rowwise_data else value.col

    def get_metadata(self) -> dict[str, Any]:
        """Return the constructor's keywords for the same value."""
        raise NotImplementedError

    def _shape(self) -> torch.Size:
        value = self._value
        if value.row is not None:
            return torch.Size(value.row.shape)
        if value.col is not None:
            return torch.Size((*value.col.shape[1:], *value.col.shape[:1]))
        message = f"{type(self).__name__}: no data is there, so that it has no shape"
        raise QuantizedTensorError(message)

    def _shape_of_blocks(self) -> torch.Size:
        """Return the shape that has the blocks; a flat view keeps its bytes in their rows."""
        shape = self.shape
        return QuantizedTensorStorage._shape(self) if len(shape) == 1 else shape

    @property
    def shape(self) -> torch.Size:
        """The shape."""
        return self._shape()

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one dimension of it."""
        shape = self._shape()
        return shape if dim is None else shape[dim]

    @property
    def device(self) -> torch.device:
        """Device of the bytes."""
        for tensor in (self._value.row, self._value.col):
            if tensor is not None:
                return tensor.device
        message = f"{type(self).__name__}: no data is there, so that it has no device"
        raise QuantizedTensorError(message)

    # Reading and writing -------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values.

        Parameters
        ----------
        dtype : torch.dtype, optional
            float32, float16 or bfloat16; the nominal type by default.

        Returns
        -------
        torch.Tensor
            ``float(byte) * scale_inv``, rounded once.
        """
        return self._value.dequantize(self._dtype if dtype is None else dtype)

    def _get_quantizer(self) -> Quantizer:
        if self._quantizer is None:
            message = (
                f"{type(self).__name__}: new values need a quantizer, and this tensor has none; "
                "make one with a quantizer, or copy quantised values into it"
            )
            raise QuantizedTensorError(message)
        return self._quantizer

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Write the values of a tensor, quantised by this tensor's quantizer.

        Parameters
        ----------
        tensor : torch.Tensor
            Of the same shape.
        noop_flag : torch.Tensor, optional
            One float32; if it is 1, everything stays as it is.
        """
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Replace the quantizer that writes new values.

        Raises
        ------
        QuantizedTensorError
            If the value has no quantizer.
        """
        if self._quantizer is None:
            message = f"{type(self).__name__}: there is no quantizer that could be updated"
            raise QuantizedTensorError(message)
        if type(self._quantizer) is not type(quantizer):
            message = "Quantizer is being updated, this may affect model behavior"
            warnings.warn(message, UserWarning, stacklevel=2)
        self._quantizer = quantizer

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Copy bytes and scales of the layouts that both have.

        Raises
        ------
        DtypeError
            If the other one is of another class.
        QuantizedTensorError
            If it is scaled otherwise, of another FP8 type, or of another size or other rows of blocks.
        """
        if getattr(src, "_PARTS", None) != self._PARTS:
            expected, got = type(self).__name__, type(src).__name__
            message = f"{expected}: copy_from_storage takes values of the same class, got {got}"
            raise DtypeError(message)
        own, other = self._value, src._value
        if (own.block, own.fp8, own.groups) != (other.block, other.fp8, other.groups):
            message = (
                f"{type(self).__name__}: copy_from_storage takes values of the same scaling and FP8 type, got "
                f"{type(src).__name__} of {other.fp8}"
            )
            raise QuantizedTensorError(message)
        shapes = self._shape_of_blocks(), src._shape_of_blocks()
        kept, given = ((shape.numel(), shape[-1:] if own.block else ()) for shape in shapes)
        if kept != given:
            message = (
                f"{type(self).__name__} of shape {list(shapes[0])}: copy_from_storage takes values of that shape, got "
                f"{list(shapes[1])}"
            )
            raise QuantizedTensorError(message)
        copy_values(own, other)

    # Layouts -------------------------------------------------------------------------------------

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make requested layouts, and drop the others.

        Parameters
        ----------
        rowwise_usage, columnwise_usage : bool, optional
            Whether the layout is requested; None leaves it as it is.

        Raises
        ------
        QuantizedTensorError
            If a requested layout cannot be made, or no layout would be left.
        """
        value = self._value
        usages = self.get_usages()
        row = usages["rowwise"] if rowwise_usage is None else rowwise_usage
        col = usages["columnwise"] if columnwise_usage is None else columnwise_usage
        name = type(self).__name__
        if not row and not col:
            message = f"{name}: one layout must stay; both were asked to go"
            raise QuantizedTensorError(message)
        if row and not usages["rowwise"]:
            message = f"{name}: the row layout is gone, and cannot be made from the column layout"
            raise QuantizedTensorError(message)
        if col and not usages["columnwise"]:
            make_columnwise(value, name)
        if not row:
            value.row = None
            if value.block:
                value.row_scale = None
        if not col:
            self._drop_columnwise()

    def _drop_columnwise(self) -> None:
        self._value.col = None
        self._value.col_scale = None

    def clear(self) -> None:
        """Free the bytes, of this value and of all that share them."""
        for tensor in self._freed():
            if tensor is not None:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._value.col_is_valid = False

    def _freed(self) -> Iterable[torch.Tensor | None]:
        value = self._value
        return (value.row, value.col)

    # For backward --------------------------------------------------------------------------------

    _PARTS: tuple[str, ...] = ()

    def prepare_for_saving(self) -> tuple[Tensors, Any]:
        """Return the tensors to save for backward; the value is empty until they are restored."""
        parts = [getattr(self._value, name) for name in self._PARTS]
        self._valid_when_saved = self._value.col_is_valid
        for name in self._PARTS:
            setattr(self._value, name, None)
        return parts, self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """Restore the tensors, and return the remaining ones."""
        for name, tensor in zip(self._PARTS, tensors, strict=False):
            setattr(self._value, name, tensor)
        self._value.col_is_valid = getattr(self, "_valid_when_saved", True)
        return tensors[len(self._PARTS) :]

    def __repr__(self) -> str:
        """Class, type and values."""
        return self._shown()

    def _shown(self) -> str:
        try:
            values = str(self.dequantize())
        except TeFastError as error:  # a repr must also work for broken values
            values = f"<not to be read: {error}>"
        return f"{type(self).__name__}(fp8_dtype={self._fp8_dtype!r}, data={values})"


def copy_values(own: native.QuantizedValue, other: native.QuantizedValue) -> None:
    """Copy bytes and scales of the layouts that both values have; a layout that the other lacks becomes stale."""
    pairs = [("row", "row_scale"), ("col", "col_scale")]
    has_col = other.col_is_valid
    was = own.row is not None, own.col is not None
    for data, scale in pairs if has_col else pairs[:1]:
        for name in (data, scale):
            target, source = getattr(own, name), getattr(other, name)
            if target is not None and source is not None:
                target.detach().copy_(source.detach().view(target.shape))
    if own.block == 0 and own.row_scale is not None and other.row_scale is not None and not was[0]:
        own.row_scale.detach().copy_(other.row_scale.detach().view(own.row_scale.shape))
    own.note_write()
    own.col_is_valid = has_col and was[1]


def _value_of_fields(
    fields: tuple[Any, ...], col_is_valid: bool, keeps_col: bool
) -> native.QuantizedValue:
    made = native.QuantizedValue(*fields)
    made.col_is_valid, made.keeps_col = col_is_valid, keeps_col
    return made


def _reduced_value(value: native.QuantizedValue) -> tuple[Any, ...]:
    """Return how a copy of a value is made, whose tensors are copied first.

    torch copies the attributes of a tensor one by one when it saves a checkpoint in the background.
    """
    col_scale = value.col_scale if value.block else None
    layouts = value.row, value.row_scale, value.col, col_scale
    fields = value.block, value.fp8, *layouts, value.groups
    return _value_of_fields, (fields, value.col_is_valid, value.keeps_col)


copyreg.pickle(native.QuantizedValue, _reduced_value)


def prepare_for_saving(*tensors: Any) -> tuple[Tensors, list[Any]]:
    """Take storages apart, so that ``save_for_backward`` can save their tensors.

    Parameters
    ----------
    *tensors : torch.Tensor, QuantizedTensorStorage or None
        Tensors, including quantised ones, stay as they are. A storage is empty until it is restored.

    Returns
    -------
    list of torch.Tensor, list
        The tensors to save, and the objects that :func:`restore_from_saved` needs.

    See Also
    --------
    restore_from_saved : The way back.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> quantizer.internal = True
    >>> x = quantizer(torch.ones(16, 16))
    >>> tensors, objects = te.prepare_for_saving(x, torch.ones(2))
    >>> [tensor is None or tensor.dtype for tensor in tensors]
    [torch.uint8, torch.uint8, torch.float32, torch.float32]
    """
    saved: Tensors = []
    objects: list[Any] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            saved.append(tensor)
            objects.append(None)
        else:
            parts, rest = tensor.prepare_for_saving()
            saved.extend(parts)
            objects.append(rest)
    return saved, objects


def restore_from_saved(
    tensors: Sequence[Any],
    saved_tensors: Sequence[torch.Tensor | None],
    return_saved_tensors: bool = False,
) -> Any:
    """Restore the objects that :func:`prepare_for_saving` took apart.

    Parameters
    ----------
    tensors : sequence
        The second result of :func:`prepare_for_saving`.
    saved_tensors : sequence of torch.Tensor
        Its first result, as autograd returns it.
    return_saved_tensors : bool, default = False
        Also return the remaining tensors.

    See Also
    --------
    prepare_for_saving : What it takes back.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> quantizer.internal = True
    >>> x = quantizer(torch.ones(16, 16))
    >>> tensors, objects = te.prepare_for_saving(x)
    >>> te.restore_from_saved(objects, tensors)[0].dequantize().sum().item()
    256.0
    """
    restored: list[Any] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            restored.append(saved_tensors[0])
            saved_tensors = saved_tensors[1:]
        else:
            saved_tensors = tensor.restore_from_saved(saved_tensors)
            restored.append(tensor)
    return (restored, saved_tensors) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """Restore ``tensor_objects`` and ``saved_tensors`` of an autograd context, and drop the objects.

    Raises
    ------
    MissingAttributeError
        If the context has no objects.

    See Also
    --------
    restore_from_saved : Without a context.

    Examples
    --------
    >>> import torch
    >>> from types import SimpleNamespace
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> quantizer.internal = True
    >>> x = quantizer(torch.ones(16, 16))
    >>> tensors, objects = te.prepare_for_saving(x)
    >>> ctx = SimpleNamespace(saved_tensors=tensors, tensor_objects=objects)
    >>> te.restore_from_func_ctx(ctx)[0].dequantize().sum().item()
    256.0
    """
    if getattr(ctx, "tensor_objects", None) is None:
        message = "restore_from_func_ctx: ctx.tensor_objects must be the second result of prepare_for_saving"
        raise MissingAttributeError(message)
    result = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return result


def clear_columnwise_cache(tensor: Any) -> None:
    """Free the column layout of a quantised tensor.

    Parameters
    ----------
    tensor : QuantizedTensorStorage or torch.Tensor
        Any tensor; plain tensors stay as they are.

    See Also
    --------
    QuantizedTensorStorage.update_usage : Makes or frees either layout.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.tensor.utils import clear_columnwise_cache
    >>> x = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")(torch.ones(16, 16))
    >>> clear_columnwise_cache(x)
    >>> x.get_usages()
    {'rowwise': True, 'columnwise': False}
    """
    if isinstance(tensor, QuantizedTensorStorage):
        tensor._drop_columnwise()
