"""FP8 with a scale for each block of a tensor: 1x128 for inputs and gradients, 128x128 for weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from te_fast.errors import ArgumentError, QuantizedTensorError, UnsupportedError
from te_fast.recipe import Float8BlockScaling, Recipe
from te_fast.runtime import native
from te_fast.runtime.layouts import BLOCK, columnwise_shape, make_columnwise
from te_fast.tensor.dtypes import DType, fp8_name
from te_fast.tensor.quantizer import (
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

#: The last dimension of scales is a multiple of this.
_SCALE_ALIGN = 4


def scale_shape(shape: Sequence[int], *, columnwise: bool, is_2d: bool) -> tuple[int, int]:
    """Return the shape of a layout's scales, as its GEMM reads them.

    Parameters
    ----------
    shape : sequence of int
        Of the tensor, ``(*lead, cols)``; all leading dimensions together are its rows.
    columnwise : bool
        The column layout's.
    is_2d : bool
        Blocks are 128x128.
    """
    cols = shape[-1] if len(shape) > 0 else 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if columnwise:
        rows, cols = cols, rows
    if is_2d:
        return -(-rows // BLOCK), _up(-(-cols // BLOCK))
    return -(-cols // BLOCK), _up(rows)


def _up(size: int) -> int:
    return -(-size // _SCALE_ALIGN) * _SCALE_ALIGN


def _stacked_scale_shape(
    shape: Sequence[int], groups: int, *, columnwise: bool, is_2d: bool
) -> tuple[int, ...]:
    """Return the shape of the scales of a stack of values: :func:`scale_shape` for each value."""
    one = scale_shape(shape if groups == 1 else shape[1:], columnwise=columnwise, is_2d=is_2d)
    return one if groups == 1 else (groups, *one)


def _value_of(
    is_2d: bool,
    fp8_dtype: Any,
    tensors: tuple[
        torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
    ],
) -> native.QuantizedValue:
    """Return a value of bytes and scales in both layouts; scales of three dimensions make it a stack."""
    check_bytes(tensors[::2], "Float8BlockwiseQTensor")
    scale = tensors[1] if tensors[1] is not None else tensors[3]
    groups = scale.shape[0] if scale is not None and scale.dim() == 3 else 1
    return native.QuantizedValue(_block_of(is_2d), fp8_name(fp8_dtype), *tensors, groups)


def _size_of(shape: Sequence[Any]) -> Any:
    """Return the size in the arguments of ``view``: several numbers, or one sequence of them."""
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape


def _block_of(is_2d: bool) -> int:
    return 2 if is_2d else 1


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """FP8 bytes with a scale for each block, without torch's tensor interface.

    Parameters
    ----------
    rowwise_data : torch.Tensor or None
        Bytes (uint8) of the tensor's shape.
    rowwise_scale_inv : torch.Tensor or None
        float32: ``(ceil(cols/128), rows up to 4)`` for 1x128, ``(ceil(rows/128), ceil(cols/128) up to 4)`` for 128x128.
    columnwise_data : torch.Tensor or None
        Bytes with the last dimension first.
    columnwise_scale_inv : torch.Tensor or None
        As `rowwise_scale_inv`, of the transposed tensor.
    fp8_dtype : DType
        ``kFloat8E4M3`` or ``kFloat8E5M2``.
    quantizer : Quantizer or None
        The quantizer that writes new values; the storage keeps a copy of it.
    is_2D_scaled : bool
        Blocks are 128x128.
    fake_dtype : torch.dtype, default = torch.float32
        Nominal type.

    See Also
    --------
    Float8BlockwiseQTensor : The same with torch's interface.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    >>> quantizer.internal = True
    >>> type(quantizer(torch.ones(128, 256))).__name__
    'Float8BlockwiseQTensorStorage'
    """

    _PARTS = ("row", "col", "row_scale", "col_scale")

    _rowwise_data = field("row", "Bytes in row layout.")
    _rowwise_scale_inv = field("row_scale", "Its inverse scales.")
    _columnwise_data = field("col", "Bytes in column layout.")
    _columnwise_scale_inv = field("col_scale", "Its inverse scales.")

    @property
    def _is_2D_scaled(self) -> bool:
        """Whether blocks are 128x128."""
        return self._value.block == 2

    def __new__(
        cls,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
        *args: Any,
        fake_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a storage over these tensors."""
        check_quantizer(quantizer, cls.__name__)
        tensors = rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv
        value = _value_of(is_2D_scaled, fp8_dtype, tensors)
        return cls._storage_of(value, fake_dtype or torch.float32, quantizer)

    def get_metadata(self) -> dict[str, Any]:
        """Return the constructor's keywords for the same value."""
        columns, scales = self._valid_columns()
        return {
            "rowwise_data": self._rowwise_data,
            "rowwise_scale_inv": self._rowwise_scale_inv,
            "columnwise_data": columns,
            "columnwise_scale_inv": scales,
            "fp8_dtype": self._fp8_dtype,
            "quantizer": self._quantizer,
            "is_2D_scaled": self._is_2D_scaled,
            "fake_dtype": self._dtype,
        }

    def _valid_columns(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return bytes and scales of the column layout, unless it is older than the row layout."""
        value = self._value
        return (value.col, value.col_scale) if value.col_is_valid else (None, None)

    def view(self, *shape: Any) -> Any:
        """Return a storage of another shape over the same bytes, whose blocks stay whole.

        Raises
        ------
        UnsupportedError
            If a block would be cut.
        """
        size = whole_size(self.shape, _size_of(shape))
        if len(size) == 1 and len(self.shape) != 1:
            raise self._cuts_blocks(size)
        value = self._viewed_value(size)
        return Float8BlockwiseQTensorStorage._storage_of(value, self._dtype, self._quantizer)

    def _keeps_blocks(self, size: Sequence[int]) -> bool:
        """Tell whether blocks stay whole."""
        own = self._shape_of_blocks()
        if self._value.groups != 1:
            return tuple(size) == tuple(own)
        is_flat = len(size) == 1 and size[0] == own.numel()
        return (
            is_flat
            or tuple(size) == tuple(own)
            or (bool(own) and bool(size) and size[-1] == own[-1])
        )

    def _cuts_blocks(self, size: Sequence[int]) -> UnsupportedError:
        return UnsupportedError(
            f"view: shape {list(size)} cuts the blocks of a {type(self).__name__} of shape {list(self.shape)}; "
            "dequantize() it first"
        )

    def _viewed_value(self, size: Sequence[int]) -> native.QuantizedValue:
        """Return the value in another shape.

        Raises
        ------
        UnsupportedError
            If that would cut blocks.
        """
        if not self._keeps_blocks(size):
            raise self._cuts_blocks(size)
        made = self._value.share()
        if len(size) == 1 and len(self._shape_of_blocks()) != 1:
            return made  # The bytes keep their rows and columns, and so their blocks.
        valid = self._value.col_is_valid
        if made.row is not None:
            made.row = made.row.view(size)
        if made.col is not None:
            made.col = made.col.view(columnwise_shape(tuple(size)))
        made.note_same_bytes(self._value)
        made.col_is_valid = valid
        return made

    def _create_columnwise(self) -> None:
        """Make the column layout of 128x128 blocks, in existing memory."""
        make_columnwise(self._value, type(self).__name__)

    def _transpose_columnwise_data(self) -> None:
        """Exchange rows and columns of the column layout's bytes."""
        col = self._columnwise_data
        if col is not None:
            self._columnwise_data = col.reshape(col.shape[0], -1).t().contiguous()

    def _freed(self) -> tuple[torch.Tensor | None, ...]:
        value = self._value
        return (value.row, value.col, value.row_scale, value.col_scale)


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, Float8TensorBase):
    """A tensor of FP8 bytes with a scale for each block.

    Parameters
    ----------
    shape : sequence of int
        Shape.
    dtype : torch.dtype
        Nominal type: float32, float16 or bfloat16.
    rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer, is_2D_scaled
        As of :class:`Float8BlockwiseQTensorStorage`.
    requires_grad : bool, default = False
        As of any tensor.
    device : torch.device, optional
        That of the bytes.
    stride : sequence of int, optional
        Strides; those of a contiguous tensor by default.
    fake_dtype : torch.dtype, optional
        The same as `dtype`.

    See Also
    --------
    Float8BlockQuantizer : Makes one.
    Float8BlockwiseQTensorStorage : The same without torch's interface.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    >>> x = quantizer(torch.ones(128, 256))
    >>> type(x).__name__, x.shape, (x + 1).mean().item()
    ('Float8BlockwiseQTensor', torch.Size([128, 256]), 2.0)
    """

    _storage_class = Float8BlockwiseQTensorStorage

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: Sequence[int] | None = None,
        fake_dtype: torch.dtype | None = None,
    ) -> Any:
        """Make a tensor over these tensors."""
        if fake_dtype is not None and fake_dtype != dtype:
            message = (
                f"Float8BlockwiseQTensor: fake_dtype {fake_dtype} does not match dtype {dtype}"
            )
            raise QuantizedTensorError(message)
        tensors = rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv
        check_quantizer(quantizer, cls.__name__)
        check_bytes(tensors[::2], cls.__name__, torch.Size(shape))
        value = _value_of(is_2D_scaled, fp8_dtype, tensors)
        made = cls._of_value(value, shape, dtype, quantizer, device=device, stride=stride)
        return made.requires_grad_() if requires_grad else made

    # Shapes --------------------------------------------------------------------------------------

    def view(self, *shape: Any) -> Any:
        """Return the tensor in another shape; dequantised, with a warning, if that would cut blocks."""
        size = _size_of(shape)
        if isinstance(size, torch.dtype):
            return torch.Tensor.view(self, size)
        size = whole_size(self.shape, size)
        if self._keeps_blocks(size):
            return torch.Tensor.view(self, size)
        message = (
            f"Float8BlockwiseQTensor: shape {list(size)} cuts the blocks of {list(self.shape)}; the result is "
            "dequantised"
        )
        warnings.warn(message, UserWarning, stacklevel=2)
        return self.dequantize().view(size)

    def reshape(self, *shape: Any) -> Any:
        """Do as :meth:`view`."""
        return self.view(*shape)

    def _viewed(self, size: Sequence[int]) -> Any:
        size = whole_size(self.shape, size)
        return self._like(self._viewed_value(size), size, device=self.device)

    def _remake_columnwise(self) -> None:
        if self._columnwise_data is not None and not self._value.col_is_valid:
            self._create_columnwise()

    def _allocate_scales(self, value: Any, size: Any, make: Any, place: dict[str, Any]) -> None:
        for name, data, columnwise in (
            ("row_scale", value.row, False),
            ("col_scale", value.col, True),
        ):
            options = {"columnwise": columnwise, "is_2d": self._is_2D_scaled}
            shape = _stacked_scale_shape(size, value.groups, **options)
            made = None if data is None else make(shape, dtype=torch.float32, **place)
            setattr(value, name, made)

    def _reduced(self) -> Any:
        """Bytes, scales and quantizer."""
        fields = (
            *(self.shape, self._rowwise_data, self._rowwise_scale_inv),
            *(*self._valid_columns(), self._fp8_dtype, self.dtype),
            *(self._quantizer, self._is_2D_scaled, None),
        )
        return _make_float8_blockwise_tensor_in_reduce_ex, fields

    @classmethod
    def _make_in_reduce_ex(cls, *fields: Any) -> Float8BlockwiseQTensor:
        """Make a tensor from the data of an older pickle."""
        return _make_float8_blockwise_tensor_in_reduce_ex(*fields)

    _INNER_TENSORS = (
        "_rowwise_data",
        "_rowwise_scale_inv",
        "_columnwise_data",
        "_columnwise_scale_inv",
    )


def _make_float8_blockwise_tensor_in_reduce_ex(
    shape: Sequence[int],
    rowwise_data: torch.Tensor | None,
    rowwise_scale_inv: torch.Tensor | None,
    columnwise_data: torch.Tensor | None,
    columnwise_scale_inv: torch.Tensor | None,
    fp8_dtype: Any,
    dtype: torch.dtype,
    quantizer: Any,
    is_2D_scaled: bool,
    data_format: Any = None,
) -> Float8BlockwiseQTensor:
    """Make a tensor from the data of a pickle; the last argument comes from an older format."""
    tensors = rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv
    kind = DType.cast(fp8_dtype)
    made: Float8BlockwiseQTensor = Float8BlockwiseQTensor(
        shape, dtype, *tensors, kind, quantizer, is_2D_scaled
    )
    return made


class Float8BlockQuantizer(ComparedBySettings, Float8QuantizerBase):
    """Quantise with a scale for each block.

    Parameters
    ----------
    fp8_dtype : DType
        ``kFloat8E4M3`` or ``kFloat8E5M2``.
    rowwise, columnwise : bool
        Layouts to make.
    amax_epsilon : float, default = 0.0
        Least maximum.
    force_pow_2_scales : bool, default = True
        Round scales down to powers of two.
    block_scaling_dim : {1, 2}, default = 2
        Blocks are 1x128, or 128x128.

    Attributes
    ----------
    block_len : int
        128.

    See Also
    --------
    Float8BlockwiseQTensor : What it makes.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    >>> x = quantizer(torch.ones(128, 256))
    >>> x.dequantize().sum().item()
    32768.0
    """

    _tensor_class = Float8BlockwiseQTensor
    _storage_class = Float8BlockwiseQTensorStorage

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            message = (
                f"Float8BlockQuantizer: block_scaling_dim must be 1 or 2, got {block_scaling_dim!r}"
            )
            raise ArgumentError(message)
        check_epsilon("Float8BlockQuantizer", amax_epsilon)
        self.block_len = BLOCK
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim

    @property
    def _block(self) -> int:  # type: ignore[override]
        return self.block_scaling_dim

    def _rule(self) -> Rule:
        return (False, self.amax_epsilon, self.force_pow_2_scales)

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """Return the class of the quantised tensors, and the keywords of its constructor that are no tensors."""
        made = super().storage_metadata(fake_dtype)
        made["nontensor_kwargs"]["is_2D_scaled"] = self._block == 2
        return made

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
        """Return the shape of a layout's scales.

        Parameters
        ----------
        shape : sequence of int
            Of the tensor.
        columnwise : bool
            The column layout's.
        """
        return scale_shape(shape, columnwise=columnwise, is_2d=self.block_scaling_dim == 2)

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the column layout's bytes: the last dimension comes first."""
        return columnwise_shape(tuple(shape))

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether blocks fit: two dimensions or more, rows and columns multiples of 128."""
        if inp.dim() < 2 or inp.shape[-1] == 0:
            return False
        return inp.shape[-1] % BLOCK == 0 and (inp.numel() // inp.shape[-1]) % BLOCK == 0

    def inner_tensor_specs(
        self, shape: Sequence[int]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of each inner tensor that a tensor of a shape has."""
        shape, groups = tuple(shape), self._groups
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, wanted, size in (
            ("rowwise", self.rowwise_usage, shape),
            ("columnwise", self.columnwise_usage, columnwise_shape(shape, stack=groups != 1)),
        ):
            if wanted:
                options = {"columnwise": name == "columnwise", "is_2d": self._block == 2}
                scales = _stacked_scale_shape(shape, groups, **options)
                specs[f"_{name}_data"] = tuple(size), torch.uint8
                specs[f"_{name}_scale_inv"] = scales, torch.float32
        return specs

    def is_requantization_safe(self) -> bool:
        """Tell whether quantising dequantised values again depends only on these values: yes."""
        return True

    def _get_compatible_recipe(self) -> type[Recipe]:
        return Float8BlockScaling

    _SETTINGS = ("force_pow_2_scales", "amax_epsilon", "block_scaling_dim")
