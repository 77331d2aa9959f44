"""FP8 with one scale for a tensor: delayed scaling's, or the tensor's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from te_fast.errors import QuantizedTensorError, RanksError, ShapeError, UnsupportedError
from te_fast.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_fast.runtime import native
from te_fast.runtime.layouts import columnwise_shape, make_columnwise
from te_fast.tensor.dtypes import DType, fp8_name
from te_fast.tensor.operations import pass_on
from te_fast.tensor.quantizer import (
    Cast,
    ComparedBySettings,
    Float8QuantizerBase,
    Rule,
    check_epsilon,
    check_quantizer,
)
from te_fast.tensor.storage import (
    QuantizedTensorStorage,
    check_bytes,
    field,
    whole_size,
)
from te_fast.tensor.tensor import Float8TensorBase

_BYTES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 bytes with one scale, without torch's tensor interface.

    Parameters
    ----------
    data : torch.Tensor or None
        Bytes (uint8) of the tensor's shape.
    fp8_scale_inv : torch.Tensor
        One float32, the factor of the bytes.
    fp8_dtype : DType
        ``kFloat8E4M3`` or ``kFloat8E5M2``.
    data_transpose : torch.Tensor, optional
        The bytes with the last dimension first.
    quantizer : Quantizer, optional
        The quantizer that writes new values; a copy of it is kept.
    fake_dtype : torch.dtype, default = torch.float32
        Nominal type.
    transpose_invalid : bool, optional
        Whether `data_transpose` holds other values than `data`; False by default.

    See Also
    --------
    Float8Tensor : The same with torch's interface.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> quantizer.internal = True
    >>> type(quantizer(torch.ones(16, 32))).__name__
    'Float8TensorStorage'
    """

    _PARTS = ("row", "col", "row_scale")

    _data = field("row", "Bytes in row layout.")
    _transpose = field("col", "Bytes in column layout.")
    _scale_inv = field("row_scale", "The inverse scale of both layouts.")
    # Plain attribute look-up is a third of the time of a function's.
    _transpose_invalid = property(
        lambda self: not self._value.col_is_valid,
        lambda self, invalid: setattr(self._value, "col_is_valid", not invalid),
        doc="Whether the column layout is missing, or holds other values than the row layout.",
    )

    def __new__(
        cls,
        *args: Any,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any,
        data_transpose: torch.Tensor | None = None,
        quantizer: Any = None,
        fake_dtype: torch.dtype | None = None,
        transpose_invalid: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a storage over these tensors."""
        check_quantizer(quantizer, cls.__name__)
        value = _value_of(fp8_dtype, data, fp8_scale_inv, data_transpose, transpose_invalid)
        return cls._storage_of(value, fake_dtype or torch.float32, quantizer)

    def get_metadata(self) -> dict[str, Any]:
        """Return the constructor's keywords for the same value."""
        valid = self._value.col_is_valid
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "data_transpose": self._transpose if valid else None,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
        }

    def view(self, *shape: Any) -> Any:
        """Return a storage of another shape over the same bytes."""
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return Float8TensorStorage._storage_of(
            viewed(self._value, size), self._dtype, self._quantizer
        )

    def _create_transpose(self) -> None:
        """Make the column layout, in existing memory."""
        make_columnwise(self._value, type(self).__name__)

    def _reset_caches(self) -> None:
        """Note that the bytes of the row layout were written, so that the column layout is out of date."""
        self._value.note_write()

    def remove_caches(self) -> None:
        """Free the column layout."""
        self._value.col = None

    def _drop_columnwise(self) -> None:
        self._value.col = None


def _value_of(
    fp8_dtype: Any,
    data: Any,
    scale_inv: torch.Tensor | None,
    transpose: Any,
    transpose_invalid: bool | None,
) -> native.QuantizedValue:
    """Return a value of these tensors; several scales make it a stack of as many values."""
    check_bytes((data, transpose), "Float8Tensor")
    groups = 1 if scale_inv is None else max(scale_inv.numel(), 1)
    if groups != 1 and data is not None and data.shape[:-1].numel() % groups:
        message = f"Float8Tensor: {groups} scales ask for a stack of {groups} values, got data of {list(data.shape)}"
        raise ShapeError(message)
    tensors = data, scale_inv, transpose, None
    value = native.QuantizedValue(0, fp8_name(fp8_dtype), *tensors, groups)
    if transpose_invalid:
        value.col_is_valid = False
    return value


def viewed(value: Any, size: Sequence[int]) -> Any:
    """Return the bytes of a value with one scale in another shape; the column layout stays if it fits.

    Raises
    ------
    UnsupportedError
        If another shape is asked for of a column layout alone.
    QuantizedTensorError
        If it is asked for of a stack of experts' weights.
    """
    if value.groups != 1:
        if value.row is not None and tuple(size) == tuple(value.row.shape):
            return value.share()
        message = "view: a stack of experts' weights has no other shape; dequantize() it first"
        raise QuantizedTensorError(message)
    if value.row is None:
        message = "view: a tensor without row layout can only be seen in its own shape"
        shape = value.col.shape
        if tuple(size) != (*shape[1:], *shape[:1]):
            raise UnsupportedError(message)
        return value.share()
    made = value.share()
    row = value.row.view(size)
    col = value.col if value.col_is_valid else None
    if col is not None:
        fits = row.shape[-1:] == col.shape[:1]
        col = col.view(columnwise_shape(row.shape)) if fits else None
    made.row, made.col = row, col
    made.note_same_bytes(value)  # a write of either is a write of both
    if col is None:
        made.col = None  # a column layout that it makes is its own
    return made


class Float8Tensor(Float8TensorStorage, Float8TensorBase):
    """A tensor of FP8 bytes with one scale.

    Parameters
    ----------
    shape : sequence of int
        Shape.
    dtype : torch.dtype
        Nominal type: float32, float16 or bfloat16.
    data : torch.Tensor or None
        Bytes (uint8) of that shape.
    fp8_scale_inv : torch.Tensor
        One float32, the factor of the bytes.
    fp8_dtype : DType
        ``kFloat8E4M3`` or ``kFloat8E5M2``.
    data_transpose : torch.Tensor, optional
        The bytes with the last dimension first.
    quantizer : Quantizer, optional
        The quantizer that writes new values; a copy of it is kept.
    requires_grad : bool, default = False
        As of any tensor.
    device : torch.device, optional
        That of the bytes.
    stride : sequence of int, optional
        Strides; those of a contiguous tensor by default.
    fake_dtype : torch.dtype, optional
        The same as `dtype`.
    transpose_invalid : bool, optional
        Whether `data_transpose` holds other values than `data`; False by default.

    See Also
    --------
    Float8Quantizer : Makes one.
    Float8TensorStorage : The same without torch's interface.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> x = quantizer(torch.ones(16, 32))
    >>> x.shape, x.dtype, (x * 2).mean().item()
    (torch.Size([16, 32]), torch.float32, 2.0)
    """

    _storage_class = Float8TensorStorage
    view: Any = torch.Tensor.view

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any,
        data_transpose: torch.Tensor | None = None,
        quantizer: Any = None,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: Sequence[int] | None = None,
        fake_dtype: torch.dtype | None = None,
        transpose_invalid: bool | None = None,
    ) -> Any:
        """Make a tensor over these tensors."""
        if fake_dtype is not None and fake_dtype != dtype:
            message = f"Float8Tensor: fake_dtype {fake_dtype} does not match dtype {dtype}"
            raise QuantizedTensorError(message)
        check_quantizer(quantizer, cls.__name__)
        check_bytes((data, data_transpose), cls.__name__, torch.Size(shape))
        value = _value_of(fp8_dtype, data, fp8_scale_inv, data_transpose, transpose_invalid)
        made = cls._of_value(value, shape, dtype, quantizer, device=device, stride=stride)
        return made.requires_grad_() if requires_grad else made

    @classmethod
    def _shape_of_fields(cls, tensor: Any, fields: dict[str, Any]) -> Sequence[int]:
        """Take other bytes; the former column layout does not belong to them."""
        data = fields.get("data")
        if data is None:
            return super()._shape_of_fields(tensor, fields)
        fields.setdefault("data_transpose", None)
        shape: Sequence[int] = data.shape
        return shape

    def _viewed(self, size: Sequence[int]) -> Any:
        size = whole_size(self.shape, size)
        made = self._like(viewed(self._value, size), size, device=self.device)
        pass_on(self, made)
        return made

    def _remake_columnwise(self) -> None:
        if self._transpose is not None and self._transpose_invalid:
            self._create_transpose()

    def _allocate_scales(self, value: Any, size: Any, make: Any, place: dict[str, Any]) -> None:
        value.row_scale = make(value.groups, dtype=torch.float32, **place)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        """Return a tensor with contiguous bytes: this one if they are contiguous."""
        return super().contiguous(memory_format=memory_format)

    def _reduced(self) -> Any:
        """Return bytes, scale and quantizer; the column layout only if there is no row layout."""
        alone = self._transpose if self._data is None else None
        fields = (self._data, self._fp8_dtype, self._scale_inv, self.dtype, self.shape, alone)
        return _make_float8_tensor_in_reduce_ex, (*fields, self._quantizer)

    @classmethod
    def _make_in_reduce_ex(cls, *fields: Any) -> Float8Tensor:
        """Make a tensor from the data of an older pickle."""
        return _make_float8_tensor_in_reduce_ex(*fields)

    _INNER_TENSORS = ("_data", "_transpose", "_scale_inv")


def _make_float8_tensor_in_reduce_ex(
    data: torch.Tensor | None,
    fp8_dtype: Any,
    fp8_scale_inv: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    data_transpose: torch.Tensor | None = None,
    quantizer: Any = None,
) -> Float8Tensor:
    """Make a tensor from the data of a pickle; streams of Transformer Engine have no quantizer."""
    made: Float8Tensor = Float8Tensor(
        shape=shape,
        dtype=dtype,
        data=data,
        fp8_scale_inv=fp8_scale_inv,
        fp8_dtype=DType.cast(fp8_dtype),
        data_transpose=data_transpose,
        quantizer=quantizer,
    )
    return made


class _PerTensorQuantizer(Float8QuantizerBase):
    """A quantizer of tensors with one scale."""

    _tensor_class = Float8Tensor
    _storage_class = Float8TensorStorage

    def inner_tensor_specs(
        self, shape: Sequence[int]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of each inner tensor that a tensor of a shape has."""
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.rowwise_usage:
            specs["_data"] = tuple(shape), torch.uint8
        if self.columnwise_usage:
            columns = columnwise_shape(tuple(shape), stack=self._groups != 1)
            specs["_transpose"] = tuple(columns), torch.uint8
        specs["_scale_inv"] = (self._groups,), torch.float32
        return specs

    def get_columnwise_shape(self, rowwise_data_shape: Sequence[int]) -> list[int]:
        """Return the shape of the column layout's bytes: the last dimension comes first."""
        return list(columnwise_shape(tuple(rowwise_data_shape)))

    def _scale_inv_of_data(self, data: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """Make a tensor of FP8 bytes.

        Parameters
        ----------
        data : torch.Tensor
            Bytes, or torch's FP8 numbers.
        fake_dtype : torch.dtype, default = torch.float32
            Nominal type.
        requires_grad : bool, default = False
            As of any tensor.
        internal : bool, default = False
            Make a storage.

        Raises
        ------
        QuantizedTensorError
            If `data` has another type.
        """
        if data.dtype not in _BYTES:
            expected = "torch.uint8 or an FP8 type of torch's"
            message = f"{type(self).__name__}: data must be {expected}, got {data.dtype}"
            raise QuantizedTensorError(message)
        fields: dict[str, Any] = {
            "data": data.view(torch.uint8),
            "fp8_scale_inv": self._scale_inv_of_data(data),
            "fp8_dtype": self.dtype,
            "quantizer": self,
        }
        if internal:
            return Float8TensorStorage(**fields, fake_dtype=fake_dtype)
        return Float8Tensor(
            shape=data.shape, dtype=fake_dtype, requires_grad=requires_grad, **fields
        )

    def supports_only_rowwise_all_gather(self) -> bool:
        """Tell whether only the row layout is gathered: yes."""
        return True


class Float8Quantizer(_PerTensorQuantizer):
    """Quantise with a given scale: delayed scaling.

    Parameters
    ----------
    scale : torch.Tensor
        One float32, the factor of the values.
    amax : torch.Tensor
        One float32, raised to the largest magnitude of each tensor.
    fp8_dtype : DType
        ``kFloat8E4M3`` or ``kFloat8E5M2``.
    rowwise, columnwise : bool, default = True
        Layouts to make.

    See Also
    --------
    Float8CurrentScalingQuantizer : With the tensor's own scale.
    Float8Tensor : What it makes.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> scale, amax = torch.ones(1), torch.zeros(1)
    >>> quantizer = te.Float8Quantizer(scale, amax, te.DType.kFloat8E4M3)
    >>> x = quantizer(torch.full((16, 16), 3.0))
    >>> x.dequantize().unique(), amax
    (tensor([3.]), tensor([3.]))
    """

    scale: torch.Tensor
    amax: torch.Tensor

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax

    def _rule(self) -> Rule:
        return (False, 0.0, False)

    def _scale_and_amax(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.scale, self.amax

    def _scale_inv_of_data(self, data: torch.Tensor) -> torch.Tensor:
        return (1 / self.scale.detach()).to(data.device).reshape(1)

    def copy(self) -> Float8Quantizer:
        """Return another quantizer over the same scale and maximum."""
        made = Float8Quantizer(
            self.scale,
            self.amax,
            self.dtype,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
        )
        made.internal, made._groups = self.internal, self._groups
        return made

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set the maximum to the largest magnitude of a tensor."""
        if tensor.numel():
            low, high = tensor.detach().aminmax()
            self.amax.copy_(torch.maximum(-low, high).reshape(self.amax.shape))

    def _get_compatible_recipe(self) -> type[Recipe]:
        return DelayedScaling


class Float8CurrentScalingQuantizer(ComparedBySettings, _PerTensorQuantizer):
    """Quantise with a scale from the tensor's own maximum: current scaling.

    Parameters
    ----------
    fp8_dtype : DType
        ``kFloat8E4M3`` or ``kFloat8E5M2``.
    device : torch.device
        No effect; kept for Transformer Engine's sake.
    rowwise, columnwise : bool, default = True
        Layouts to make.
    use_existing_amax : bool, default = False
        No effect; True warns, as in Transformer Engine, which no longer uses it.
    with_amax_reduction : bool, default = False
        Take the largest maximum of `amax_reduction_group`.
    amax_reduction_group : torch.distributed.ProcessGroup, optional
        Ranks that have parts of the tensor.
    force_pow_2_scales : bool, default = False
        Round scales down to powers of two.
    amax_epsilon : float, default = 0.0
        Least maximum.
    scale, amax : torch.Tensor, optional
        No effect, as `use_existing_amax`.

    See Also
    --------
    Float8Quantizer : With a scale that is given.
    Float8Tensor : What it makes.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> quantizer(torch.full((16, 16), 3.0)).dequantize().unique()
    tensor([3.])
    """

    def __init__(
        self,
        fp8_dtype: Any,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            message = (
                "Float8CurrentScalingQuantizer: use_existing_amax, scale and amax have no effect; "
                "the scale follows from each tensor"
            )
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        check_epsilon("Float8CurrentScalingQuantizer", amax_epsilon)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    def _rule(self) -> Rule:
        return (True, self.amax_epsilon, self.force_pow_2_scales)

    def _write(
        self, src: torch.Tensor, value: native.QuantizedValue, noop: torch.Tensor | None
    ) -> None:
        if not self.with_amax_reduction:
            super()._write(src, value, noop)
            return
        if self.amax_reduction_group is None and not _has_group():
            message = (
                f"{type(self).__name__}: with_amax_reduction needs a process group, and torch.distributed has none; "
                "initialise it, or leave with_amax_reduction out"
            )
            raise RanksError(message)
        amax = native.amax(src)
        torch.distributed.all_reduce(
            amax, op=torch.distributed.ReduceOp.MAX, group=self.amax_reduction_group
        )
        name = fp8_name(self.dtype)
        scale = native.scale_of_amax(amax, name, self.amax_epsilon, self.force_pow_2_scales)
        usage = (self.rowwise_usage, self.columnwise_usage)
        value.quantize(src, usage, (False, 0.0, False), scale, None, noop)

    def _cast(self) -> Cast | None:
        return None if self.with_amax_reduction else Float8QuantizerBase._cast(self)

    def _scale_inv_of_data(self, data: torch.Tensor) -> torch.Tensor:
        return torch.empty(1, dtype=torch.float32, device=data.device)

    def is_requantization_safe(self) -> bool:
        """Tell whether quantising dequantised values again depends only on these values: yes."""
        return True

    def _get_compatible_recipe(self) -> type[Recipe]:
        return Float8CurrentScaling

    _SETTINGS = (
        "with_amax_reduction",
        "amax_reduction_group",
        "force_pow_2_scales",
        "amax_epsilon",
    )

    def __getstate__(self) -> dict[str, Any]:
        """Leave the process group out, which cannot be pickled."""
        return self.__dict__ | {"amax_reduction_group": None}

    # Copies of a tensor have copies of its quantizer, and their ranks are the same.

    def __copy__(self) -> Any:
        """Return another quantizer with the same settings and process group."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy with the same process group, which cannot be copied."""
        memo[id(self.amax_reduction_group)] = self.amax_reduction_group
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made
