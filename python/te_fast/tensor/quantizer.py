"""The base classes of quantizers, which make quantised tensors from plain ones."""

from __future__ import annotations

import copy
import functools
from abc import ABC
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, ClassVar

import torch

from te_fast.errors import ArgumentError, DtypeError, QuantizedTensorError, UnsupportedError
from te_fast.recipe import Recipe
from te_fast.runtime import native
from te_fast.tensor.dtypes import DType, fp8_name
from te_fast.tensor.storage import QuantizedTensorStorage, has_native_value

#: Scale rule of a native cast: whether from the tensor itself, smallest amax, whether powers of two.
Rule = tuple[bool, float, bool]
#: Block, groups and FP8 type; layouts; rule; scale and maximum of delayed scaling.
Cast = tuple[
    tuple[int, int, str],
    tuple[bool, bool],
    Rule,
    tuple[torch.Tensor | None, torch.Tensor | None],
]


class _Quantize(torch.autograd.Function):
    """A cast whose gradient is that of the identity."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, quantize_impl: Callable[[torch.Tensor], Any]
    ) -> Any:
        return quantize_impl(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Quantizer(ABC):
    """Makes quantised tensors from plain ones.

    Parameters
    ----------
    rowwise, columnwise : bool
        Layouts to make.

    Attributes
    ----------
    rowwise_usage, columnwise_usage : bool
        Layouts to make.
    internal : bool
        Make storages, which autograd does not know, instead of tensors.
    optimize_for_gemm : bool
        No effect, since te_fast's layouts are always those of Hopper's GEMMs.

    See Also
    --------
    Float8Quantizer : With a scale that is given.
    Float8CurrentScalingQuantizer : With the tensor's own.
    Float8BlockQuantizer : With a scale for each block.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> quantizer.set_usage(rowwise=True, columnwise=False)
    >>> quantizer.rowwise_usage, quantizer.columnwise_usage
    (True, False)
    """

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def __repr__(self) -> str:
        """Class and usages."""
        return (
            f"{type(self).__name__}(rowwise_usage={self.rowwise_usage}, "
            f"columnwise_usage={self.columnwise_usage}, internal={self.internal})"
        )

    def _lacks(self, method: str) -> UnsupportedError:
        return UnsupportedError(f"{type(self).__name__} does not implement {method}")

    # Quantising ----------------------------------------------------------------------------------

    def quantize(
        self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Quantise a tensor.

        Parameters
        ----------
        tensor : torch.Tensor
            float32, float16 or bfloat16.
        out : QuantizedTensor, optional
            Quantised tensor that is written and returned; a new one by default.
        dtype : torch.dtype, optional
            Nominal type of a new tensor; by default the type of `tensor`.

        Returns
        -------
        QuantizedTensor or QuantizedTensorStorage
            Its gradient is the gradient of `tensor`.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        if self.internal or not torch.is_grad_enabled():
            return self._named(tensor, dtype)
        return _Quantize.apply(tensor, functools.partial(self._named, dtype=dtype))

    def _named(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> Any:
        """Quantise, with a given nominal type."""
        made = self.quantize_impl(tensor)
        if dtype is None or dtype == made._dtype:
            return made
        if isinstance(made, torch.Tensor):
            return made.to_dtype(dtype)  # type: ignore[attr-defined]
        made._dtype = dtype
        return made

    def __call__(self, tensor: torch.Tensor) -> Any:
        """Quantise a tensor."""
        return self.quantize(tensor)

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """Quantise a tensor without autograd."""
        method = "quantize_impl"
        raise self._lacks(method)

    def multi_quantize(self, list_of_tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Quantise several tensors."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def update_quantized(
        self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None
    ) -> Any:
        """Write the values of a tensor into a quantised one, and return the quantised one."""
        method = "update_quantized"
        raise self._lacks(method)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """Make a quantised tensor of any content."""
        method = "make_empty"
        raise self._lacks(method)

    def inner_tensor_specs(
        self, shape: Sequence[int]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of each inner tensor that a tensor of a shape has."""
        method = "inner_tensor_specs"
        raise self._lacks(method)

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """Return the class of the quantised tensors, and the keywords of its constructor that are no tensors.

        Parameters
        ----------
        fake_dtype : torch.dtype
            Nominal type.

        Returns
        -------
        dict
            ``cls``, and the keywords as ``nontensor_kwargs``.

        Raises
        ------
        UnsupportedError
            If the quantizer makes no tensors of bytes and scales.
        """
        method = "storage_metadata"
        raise self._lacks(method)

    def alloc_tensors(
        self, shape: Sequence[int], *, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor]:
        """Make the inner tensors for a shape, of any content.

        Parameters
        ----------
        shape : sequence of int
            Of the quantised tensor.
        device : torch.device, optional
            By default the current GPU, or the CPU without a GPU.
        """
        return self._allocated(shape, {"device": device_of(device)})

    def _allocated(self, shape: Sequence[int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
        specs = self.inner_tensor_specs(shape)
        return {
            name: torch.empty(size, dtype=dtype, **options) for name, (size, dtype) in specs.items()
        }

    def calibrate(self, tensor: torch.Tensor) -> None:  # noqa: B027 - most note nothing
        """Note the maximum of a tensor without quantising it, if scales follow from earlier maxima."""

    # Settings ----------------------------------------------------------------------------------

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Set which layouts are made; None keeps the setting."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Return which layouts are made."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Any:
        """Return another quantizer with the same settings; scales and maxima stay shared."""
        return copy.copy(self)

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Tell whether blocks of scales fit a tensor that several ranks have parts of."""
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        """Tell whether only the row layout is gathered, from which the column layout is made."""
        return False

    def is_requantization_safe(self) -> bool:
        """Tell whether quantising dequantised values again depends only on these values."""
        return False

    def onnx_quantize(self, tensor: torch.Tensor) -> Any:
        """Raise: te_fast does not export to ONNX.

        Raises
        ------
        UnsupportedError
            Always.
        """
        method = "onnx_quantize"
        raise self._lacks(method)

    def onnx_dequantize(self, tensor: Any) -> torch.Tensor:
        """Raise: te_fast does not export to ONNX.

        Raises
        ------
        UnsupportedError
            Always.
        """
        method = "onnx_dequantize"
        raise self._lacks(method)

    def _get_compatible_recipe(self) -> type[Recipe] | None:
        """Return the class of recipes with this quantizer."""
        method = "_get_compatible_recipe"
        raise self._lacks(method)


class Float8QuantizerBase(Quantizer):
    """A quantizer to FP8: one native cast into a tensor's native value.

    Attributes
    ----------
    dtype : DType
        FP8 type.
    """

    dtype: DType
    #: 0 for one scale, 1 for a scale per 1x128, 2 for one per 128x128.
    _block = 0
    #: Number of values in a stack with scales for each, such as the weights of experts.
    _groups = 1
    _tensor_class: type[Any]
    _storage_class: type[Any]
    _only_casts: ClassVar[bool]

    def __init__(self, fp8_dtype: Any, *, rowwise: bool, columnwise: bool) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        fp8_name(fp8_dtype)
        self.dtype = DType.cast(fp8_dtype)

    def _rule(self) -> Rule:
        raise NotImplementedError

    def _scale_and_amax(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scale to quantise with and maximum to raise, of delayed scaling."""
        return None, None

    def _write(
        self, src: torch.Tensor, value: native.QuantizedValue, noop: torch.Tensor | None
    ) -> None:
        usage = (self.rowwise_usage, self.columnwise_usage)
        value.quantize(src, usage, self._rule(), *self._scale_and_amax(), noop)

    def _cast(self) -> Cast | None:
        """Return the settings of a native cast; None if a subclass updates tensors differently."""
        if not self._only_casts:
            return None
        usage = (self.rowwise_usage, self.columnwise_usage)
        kind = self._block, self._groups, fp8_name(self.dtype)
        return kind, usage, self._rule(), self._scale_and_amax()

    def __init_subclass__(cls, **options: Any) -> None:
        """Note whether a user's subclass updates tensors differently."""
        super().__init_subclass__(**options)
        cls._only_casts = cls.update_quantized is Float8QuantizerBase.update_quantized

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """Return the class of the quantised tensors, and the keywords of its constructor that are no tensors."""
        fields = {"fp8_dtype": self.dtype, "quantizer": self, "fake_dtype": fake_dtype}
        made = self._storage_class if self.internal else self._tensor_class
        return {"cls": made, "nontensor_kwargs": fields}

    def _fresh_value(self) -> native.QuantizedValue:
        kind = self._block, fp8_name(self.dtype)
        return native.QuantizedValue(*kind, None, None, None, None, self._groups)

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """Quantise a tensor without autograd."""
        src = plain_values(tensor).contiguous()
        value = self._value_of(src)
        if self.internal:
            return self._storage_class._storage_of(value, src.dtype, self)
        return self._tensor_class._of_value(value, src.shape, src.dtype, self)

    def _value_of(self, src: torch.Tensor) -> native.QuantizedValue:
        """Return bytes and scales of plain contiguous values."""
        value = self._fresh_value()
        self._write(src, value, None)
        return value

    def update_quantized(
        self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None
    ) -> Any:
        """Write the values of a tensor into a quantised one, and return that.

        Layouts that the quantizer does not make are dropped.

        Parameters
        ----------
        src : torch.Tensor
            A tensor of the same shape, on any device.
        dst : QuantizedTensor or QuantizedTensorStorage
            A tensor of the class that this quantizer makes.
        noop_flag : torch.Tensor, optional
            One float32; if it is 1, everything stays as it is.

        Raises
        ------
        QuantizedTensorError
            If `dst` is of another class, or a part of a tensor with one scale.
        ShapeError, DtypeError
            If `src` does not fit.
        """
        self._check_destination(dst)
        value: native.QuantizedValue = dst._value
        value_type, own_type = value.fp8, fp8_name(self.dtype)
        source = _source_for(src, dst)
        value.fp8 = own_type
        try:
            self._write(source, value, noop_flag)
        except Exception:
            value.fp8 = value_type
            raise
        if isinstance(dst, torch.Tensor):
            note_write(dst)
        return dst

    def _check_destination(self, dst: Any) -> None:
        kind = self._block, self._groups
        if (
            not isinstance(dst, self._storage_class)
            or (dst._value.block, dst._value.groups) != kind
        ):
            expected = self._tensor_class.__name__
            got = type(dst).__name__
            message = (
                f"{type(self).__name__} can only update {expected} of its own scaling, got {got}"
            )
            raise QuantizedTensorError(message)
        check_whole(dst)

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """Make a quantised tensor of any content, with the layouts of the usages.

        Parameters
        ----------
        shape : sequence of int
            Shape.
        dtype : torch.dtype, default = torch.float32
            Nominal type.
        device : torch.device, optional
            By default the current GPU, or the CPU without a GPU.
        requires_grad, pin_memory : bool, default = False
            As of ``torch.empty``.
        """
        shape = torch.Size(shape)
        options: dict[str, Any] = {"device": device_of(device), "pin_memory": pin_memory}
        value = self._fresh_value()
        made: Any
        if self.internal:
            made = self._storage_class._storage_of(value, dtype, self)
        else:
            made = self._tensor_class._of_value(value, shape, dtype, self, device=options["device"])
        for name, inner in self._allocated(shape, options).items():
            setattr(made, name, inner)
        value.col_is_valid = True
        return made.requires_grad_() if requires_grad and not self.internal else made


def check_whole(tensor: Any) -> None:
    """Refuse new scales for a part of a tensor, since the other parts share its scale.

    Raises
    ------
    QuantizedTensorError
        If `tensor` is a part.
    """
    if tensor.__dict__.get("_is_part", False):
        message = (
            f"{type(tensor).__name__}: a part of a tensor cannot be written, since all of it has one scale; write the "
            "whole, or dequantize(), write, and quantize_() the whole"
        )
        raise QuantizedTensorError(message)


def check_quantizer(quantizer: Any, owner: str) -> None:
    """Refuse an object that is no quantizer.

    Raises
    ------
    DtypeError
        If `quantizer` is neither a quantizer nor None.
    """
    if not isinstance(quantizer, Quantizer | None):
        message = f"{owner}: quantizer must be a Quantizer or None, got {type(quantizer).__name__}"
        raise DtypeError(message)


def check_epsilon(owner: str, amax_epsilon: Any) -> None:
    """Refuse a least maximum that is no number.

    Raises
    ------
    ArgumentError
        If `amax_epsilon` is not a number of 0 or more.
    """
    if not isinstance(amax_epsilon, Real) or not float(amax_epsilon) >= 0:
        message = f"{owner}: amax_epsilon must be a number of 0 or more, got {amax_epsilon!r}"
        raise ArgumentError(message)


def device_of(device: torch.device | str | None) -> torch.device:
    """Return a device; by default the current GPU, or the CPU without a GPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def count_write(*tensors: Any) -> None:
    """Increase the versions of written tensors, which graphs may have saved, where they have versions."""
    written = [one for one in tensors if isinstance(one, torch.Tensor) and not one.is_inference()]
    torch.autograd.graph.increment_version(written)


def note_write(tensor: Any) -> None:
    """Increase the versions of a written tensor and of its bytes, which graphs save in its place."""
    value = tensor._value
    valid = value.col_is_valid
    count_write(tensor, value.row, value.col)
    if valid:
        # At the present versions, so that later writes of one layout show.
        value.col_is_valid = True


def update_many(tensors: Sequence[Any], sources: Sequence[torch.Tensor]) -> None:
    """Write the values of tensors into quantised ones, as ``quantize_`` does; one launch for tensors of one format.

    Parameters
    ----------
    tensors : sequence of QuantizedTensor
        Written.
    sources : sequence of torch.Tensor
        As many tensors of the same shapes.
    """
    native_ones = []
    for tensor, source in zip(tensors, sources, strict=True):
        if has_native_value(tensor):
            native_ones.append((tensor, _source_for(source, tensor)))
        else:
            tensor.quantize_(source)
    if native_ones:
        requantize(*map(list, zip(*native_ones, strict=True)))


def requantize(tensors: Sequence[Any], sources: Sequence[torch.Tensor]) -> None:
    """Do the same with plain contiguous values on the tensors' device, in the shapes of their bytes."""
    for number in native.requantize(tensors, sources):
        tensors[number].quantize_(sources[number])


def _source_for(source: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Return plain values in the form for a write into a quantised tensor."""
    value: native.QuantizedValue = tensor._value
    source = _source(source, tensor.device)
    inner = QuantizedTensorStorage._shape(tensor) if value.row is None else value.row.shape
    if source.dim() == 1 and source.shape != inner and source.numel() == inner.numel():
        source = source.view(inner)  # a flat view, whose bytes keep their rows
    return source


def plain_values(tensor: Any) -> torch.Tensor:
    """Return what a quantizer reads: values in high precision, outside of autograd.

    Raises
    ------
    DtypeError
        If `tensor` is not a dense tensor.
    """
    if isinstance(tensor, QuantizedTensorStorage):
        tensor = tensor.dequantize()
    if not isinstance(tensor, torch.Tensor):
        message = f"quantize: expected a torch.Tensor, got {type(tensor).__name__}"
        raise DtypeError(message)
    if tensor.layout is not torch.strided:
        message = f"quantize: expected a dense tensor, got {tensor.layout}; give its to_dense()"
        raise DtypeError(message)
    return tensor.detach()


def _source(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return plain values, contiguous and on a device."""
    tensor = plain_values(tensor)
    if tensor.device != device:
        tensor = tensor.to(device)
    return tensor.contiguous()


class ComparedBySettings:
    """A quantizer without tensors: two quantizers with equal settings give equal results."""

    #: Settings of the class, beside those of all quantizers.
    _SETTINGS: ClassVar[tuple[str, ...]]

    def _settings(self) -> tuple[Any, ...]:
        common = ("dtype", "rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm")
        return tuple(getattr(self, name) for name in (*common, *self._SETTINGS))

    def __eq__(self, other: object) -> bool:
        """Tell whether both quantizers have equal settings."""
        if not isinstance(other, ComparedBySettings) or type(other) is not type(self):
            return NotImplemented
        return self._settings() == other._settings()

    def __hash__(self) -> int:
        """Agree with equality."""
        return hash((type(self), *self._settings()))
