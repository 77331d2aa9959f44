"""Quantised tensors as torch sees them: they have a high-precision type, and hold FP8 bytes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch

from te_fast.errors import (
    DtypeError,
    MissingAttributeError,
    QuantizedTensorError,
    ShapeError,
    UnsupportedError,
)
from te_fast.runtime import native
from te_fast.tensor.operations import dispatch, is_written_alone, moved
from te_fast.tensor.quantizer import Quantizer, note_write, plain_values
from te_fast.tensor.sharded import after_gather, before_gather
from te_fast.tensor.storage import QuantizedTensorStorage, Tensors
from te_fast.tensor.traced import dequantized


class _Identity(torch.autograd.Function):
    """The same values in a new tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Dequantize(torch.autograd.Function):
    """Dequantises; the gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        values: torch.Tensor = tensor._plain_values(dtype)
        return values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class QuantizedTensor(torch.Tensor):
    """A tensor of FP8 bytes and scales.

    To torch it is of its nominal type. Views, copies and moves between devices keep the class. Operations in place
    dequantise, run, and quantise again. All other operations dequantise, and their results are plain.

    Parameters
    ----------
    shape : sequence of int
        Shape.
    dtype : torch.dtype
        Nominal type.
    fake_dtype : torch.dtype, optional
        The same.
    requires_grad : bool, default = False
        As of any tensor.
    device : torch.device, optional
        Device; by default the current GPU, or the CPU without a GPU.
    stride : sequence of int, optional
        Strides; those of a contiguous tensor by default.
    storage_offset : int, optional
        Offset in the storage.

    Raises
    ------
    ShapeError
        If `fake_dtype` is another type than `dtype`.

    See Also
    --------
    Quantizer : Makes one.
    QuantizedTensorStorage : The bytes and scales.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    >>> isinstance(quantizer(torch.ones(16, 16)), te.QuantizedTensor)
    True
    """

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        fake_dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: Sequence[int] | None = None,
        storage_offset: int | None = None,
    ) -> Any:
        """Make the tensor that torch sees."""
        if fake_dtype is not None and fake_dtype != dtype:
            message = f"{cls.__name__}: fake_dtype {fake_dtype} does not match dtype {dtype}"
            raise ShapeError(message)
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=stride,
            storage_offset=storage_offset,
            dtype=dtype,
            layout=torch.strided,
            requires_grad=requires_grad,
            device=device,
        )

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch's on quantised tensors."""
        return dispatch(func, types, args, kwargs or {})

    # Values --------------------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values in high precision."""
        message = f"{type(self).__name__} class does not implement dequantize function"
        raise UnsupportedError(message)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Write the values of a tensor."""
        message = f"{type(self).__name__} class does not implement quantize_ function"
        raise UnsupportedError(message)

    def _viewed(self, size: Sequence[int]) -> Any:
        message = f"{type(self).__name__} class does not support tensor views"
        raise UnsupportedError(message)

    def float(self) -> torch.Tensor:
        """Return the values in float32."""
        return self.dequantize(dtype=torch.float32)

    def half(self) -> torch.Tensor:
        """Return the values in float16."""
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self) -> torch.Tensor:
        """Return the values in bfloat16."""
        return self.dequantize(dtype=torch.bfloat16)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """Expand; to its own shape, as code that looks for gradient accumulators does, without dequantising."""
        if other is self:
            result: torch.Tensor = _Identity.apply(self)
            return result
        return super().expand_as(other)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return an empty storage, since inner tensors own the bytes."""
        return torch.UntypedStorage(0, device=self.device)

    # Other libraries -----------------------------------------------------------------------------
    #
    # torch hands out the address of a tensor's memory, which is null here.

    def share_memory_(self) -> Any:
        """Do nothing on a GPU, as torch.

        Raises
        ------
        UnsupportedError
            On the CPU: torch would move the empty storage to shared memory, and no values.
        """
        if self.device.type != "cpu":
            return self
        message = (
            f"{type(self).__name__}: processes do not share FP8 values; share those in high precision, and quantise "
            "them in each process"
        )
        raise UnsupportedError(message)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array of NumPy, as ``torch.Tensor.numpy`` does."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.dequantize().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule of the dequantised values."""
        return self.dequantize().__dlpack__(**options)

    #: Consumers with this interface, which skips ``__dlpack__``, fall back to that.
    __dlpack_c_exchange_api__: Any = None

    @property
    def __cuda_array_interface__(self) -> Any:
        """No address; an array of the dequantised values would outlive them.

        Raises
        ------
        MissingAttributeError
            Always.
        """
        message = f"{type(self).__name__} has no __cuda_array_interface__, since its values are FP8; dequantize() it"
        raise MissingAttributeError(message)


def _is_basic(index: Any) -> bool:
    """Tell whether an index asks for a view, and so costs little."""
    several = index if isinstance(index, tuple) else (index,)
    return all(isinstance(one, int | slice | EllipsisType | None) for one in several)


class TensorOverStorage(QuantizedTensorStorage, QuantizedTensor):
    """Base class of tensors that are storages, too: torch sees their shape, type and device, and not what they hold."""

    #: Attributes that a copy has of its own.
    _HELD: tuple[str, ...] = ()

    @property
    def _dtype(self) -> torch.dtype:
        """The nominal type."""
        return self.dtype

    @_dtype.setter
    def _dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            message = f"{type(self).__name__}: the nominal type {self.dtype} cannot become {dtype}; make a new tensor"
            raise DtypeError(message)

    def _shape(self) -> torch.Size:
        return self.shape

    shape: Any = torch.Tensor.shape
    size: Any = torch.Tensor.size
    device: Any = torch.Tensor.device
    view: Any = torch.Tensor.view

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values.

        Parameters
        ----------
        dtype : torch.dtype, optional
            float32, float16 or bfloat16; the nominal type by default.

        Returns
        -------
        torch.Tensor
            Of FP8 bytes ``float(byte) * scale_inv``, rounded once; an :class:`IdentityTensor` gives its own memory. The
            gradient is that of this tensor.
        """
        dtype = self.dtype if dtype is None else dtype
        if torch.is_grad_enabled() and self.requires_grad:
            values: torch.Tensor = _Dequantize.apply(self, dtype)
            return values
        return self._plain_values(dtype)

    def _plain_values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values without autograd."""
        raise NotImplementedError

    # torch writes to views of the tensor in the following methods. A view that comes dequantised is a copy, so that the
    # write would be lost.

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write a part: alone if it has scales of its own, or takes bytes of its scale; else the whole is written.

        Raises
        ------
        QuantizedTensorError
            If this tensor itself is a part that cannot be written.
        """
        if _is_basic(index) and is_written_alone(self[index], value):
            super().__setitem__(index, value)
            return

        def write(values: torch.Tensor) -> None:
            values[index] = value

        self._rewrite(write)

    def fill_diagonal_(self, fill_value: Any, wrap: bool = False) -> Any:
        """Fill the diagonal, as ``torch.Tensor.fill_diagonal_`` does.

        Raises
        ------
        QuantizedTensorError
            If this tensor is a part that cannot be written.
        """
        self._rewrite(lambda values: values.fill_diagonal_(fill_value, wrap))
        return self

    # torch's loops read and write the address of the memory, which is null here.

    def apply_(self, callable: Callable[[float], float]) -> Any:
        """Apply a function to each value on the CPU, as ``torch.Tensor.apply_`` does."""
        self._rewrite(lambda values: values.apply_(callable))
        return self

    def map_(self, tensor: torch.Tensor, callable: Callable[..., float]) -> Any:
        """Apply a function to each pair of values on the CPU, as ``torch.Tensor.map_`` does."""
        other = plain_values(tensor)
        self._rewrite(lambda values: values.map_(other, callable))
        return self

    def map2_(self, x: torch.Tensor, y: torch.Tensor, callable: Callable[..., float]) -> Any:
        """Apply a function to each three values on the CPU, as ``torch.Tensor.map2_`` does."""
        others = plain_values(x), plain_values(y)
        self._rewrite(lambda values: values.map2_(*others, callable))
        return self

    def _rewrite(self, write: Callable[[torch.Tensor], Any]) -> None:
        """Dequantise, write, and quantise again."""
        values = self.dequantize()
        write(values)
        self.copy_(values)

    def prepare_for_saving(self) -> tuple[Tensors, Any]:
        """Return the inner tensors, and a tensor that restores them; the user's tensor stays whole."""
        rest: Any = self.detach()
        saved: tuple[Tensors, Any] = super(TensorOverStorage, rest).prepare_for_saving()
        return saved

    @property
    def data(self) -> Any:
        """The same values in a tensor outside of autograd."""
        return self.detach()

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        """Take over the values of another tensor."""
        if not isinstance(tensor, torch.Tensor):
            message = (
                f"{type(self).__name__}.data: expected a torch.Tensor, got {type(tensor).__name__}"
            )
            raise DtypeError(message)
        self._take_over(tensor)

    def _take_over(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError

    def _reduced(self) -> Any:
        """Return a function and arguments that make the tensor again, for pickles."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor; a parameter as torch does, so that it stays a parameter."""
        if not isinstance(self, torch.nn.Parameter):
            return self._reduced()
        rebuild: Any = torch._utils._rebuild_parameter
        return rebuild, (self.detach(), self.requires_grad, OrderedDict())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy all that the tensor holds; a copy of a parameter is a parameter."""
        if id(self) in memo:
            return memo[id(self)]
        if self.grad_fn is not None:
            message = f"{type(self).__name__}: only tensors that no operation computed can be copied deeply"
            raise QuantizedTensorError(message)
        with torch.no_grad():
            made = self.detach().clone()
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        for name, attribute in self.__dict__.items():
            if name not in self._HELD:
                made.__dict__[name] = copy.deepcopy(attribute, memo)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Class, type and values."""
        with torch.no_grad():
            return self._shown()


def _outside(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape


class Float8TensorBase(TensorOverStorage):
    """Base class of tensors over a native value."""

    _storage_class: type[QuantizedTensorStorage]
    _HELD = ("_value", "_is_part", "_loaded")

    @classmethod
    def _of_value(
        cls,
        value: native.QuantizedValue,
        shape: Sequence[int],
        dtype: torch.dtype,
        quantizer: Quantizer | None,
        *,
        device: torch.device | None = None,
        stride: Sequence[int] | None = None,
    ) -> Any:
        """Return a tensor over a value, with a copy of a quantizer; its strides are those of the row layout."""
        row = value.row
        if device is None:
            data = row if row is not None else value.col
            device = None if data is None else data.device
        if stride is None and row is not None and not row.is_contiguous():
            stride = row.stride()
        made = QuantizedTensor.__new__(cls, shape, dtype, device=device, stride=stride)
        made._value = value
        made._quantizer = None if quantizer is None else quantizer.copy()
        return made

    def _like(self, value: native.QuantizedValue, shape: Sequence[int], **options: Any) -> Any:
        """Return a tensor of this one's class, nominal type and quantizer over another value."""
        return self._of_value(value, shape, self.dtype, self._quantizer, **options)

    @property
    def _dtype(self) -> torch.dtype:
        """The nominal type."""
        return self.dtype

    @_dtype.setter
    def _dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            _exchange_outside(self, self.to_dtype(dtype))

    def _plain_values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values without autograd."""
        values = dequantized(self._value, dtype)
        if self.dim() == 1 and values.numel() == self.numel():
            return values.view(self.shape)
        if values.shape != self.shape:
            message = (
                f"{type(self).__name__} of shape {list(self.shape)}: its bytes are of shape {list(values.shape)}; "
                "they were freed or exchanged"
            )
            raise QuantizedTensorError(message)
        return values

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """Return a tensor of another nominal type over the same bytes."""
        made = self._of_value(self._value.share(), self.shape, dtype, self._quantizer)
        if "_is_part" in self.__dict__:
            made._is_part = self._is_part
        return made

    @classmethod
    def make_like(
        cls,
        tensor: Any,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **fields: Any,
    ) -> Any:
        """Return a tensor with the fields of another one, except the given fields."""
        dtype = tensor.dtype if dtype is None else dtype
        shape = cls._shape_of_fields(tensor, fields) if shape is None else shape
        options = {"requires_grad": requires_grad, "device": tensor.device}
        made = cls(
            shape, dtype, **tensor.get_metadata() | fields | {"fake_dtype": dtype}, **options
        )
        made._share_writes(tensor)
        return made

    def _share_writes(self, tensor: Any) -> None:
        """Let a write of this tensor be one of another tensor, too, if it has the other one's bytes."""
        value, other = self._value, tensor._value
        if value.row is None or value.row is not other.row:
            return
        value.note_same_bytes(other)
        if value.col is not other.col:
            value.col = value.col  # a column layout of its own
        if "_is_part" in tensor.__dict__:
            self._is_part = tensor._is_part

    @classmethod
    def _shape_of_fields(cls, tensor: Any, fields: dict[str, Any]) -> Sequence[int]:
        """Return the shape of a tensor like another one, except some fields."""
        shape: Sequence[int] = tensor.shape
        return shape

    # Exchanging the values -----------------------------------------------------------------------

    def _take_over(self, tensor: torch.Tensor) -> None:
        """Take over the bytes of a quantised tensor, or quantise a plain tensor into new bytes.

        Views keep the former values, as for any tensor. A tensor with one scale takes over the nominal type, too; a
        tensor of blocks keeps its own.
        """
        if isinstance(tensor, Float8TensorBase) and tensor._value.block == self._value.block:
            fresh: Any = tensor.detach()
        else:
            quantizer = moved(self._get_quantizer(), tensor.device).copy()
            quantizer.internal = False
            with torch.no_grad():
                fresh = quantizer.quantize_impl(tensor)
        if self._value.block and fresh.dtype != self.dtype:
            fresh = fresh.to_dtype(self.dtype)
        if _outside(fresh) != _outside(self):
            _exchange_outside(self, fresh)
            if self._quantizer is not None:
                self._quantizer = moved(self._quantizer, self.device)
        self._value = fresh._value
        note_write(self)

    # Sharding ------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Return the tensors that FSDP2 gathers: bytes, and scales of blocks.

        Raises
        ------
        UnsupportedError
            For a stack of experts' weights.
        """
        if self._value.groups != 1:
            message = (
                f"{type(self).__name__}: FSDP2 gathers no stack of experts' weights in FP8; make the layer without "
                "single_grouped_weight, or without quantized_model_init"
            )
            raise UnsupportedError(message)
        return before_gather(self, mesh, orig_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Return the parameter that FSDP2 has gathered, or update a former one."""
        return after_gather(self, all_gather_outputs, metadata, param_dtype, out)

    # Compilers -----------------------------------------------------------------------------------

    _INNER_TENSORS: tuple[str, ...] = ()

    def __get_tensor_shard__(self, index: Any) -> Any:
        """Return the tensor for a distributed checkpoint, which writes its parts one by one, each with its scale."""
        made: Any = self.detach()
        made._loaded = self._value
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Return the names of the inner tensors, and the tensor's other properties."""
        names = [name for name in self._INNER_TENSORS if getattr(self, name) is not None]
        quantizer = self._quantizer
        plain = None if getattr(quantizer, "scale", None) is not None else quantizer
        value = self._value
        return names, {"block": value.block, "fp8": value.fp8, "quantizer": plain} | {
            "dtype": self.dtype,
            "valid": value.col_is_valid,
            "groups": value.groups,
        }

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], about: dict[str, Any], size: Any, stride: Any
    ) -> Any:
        """Make a tensor from inner tensors; delayed scaling's quantizer is not among them."""
        kind = about["block"], about["fp8"]
        value = native.QuantizedValue(*kind, None, None, None, None, about["groups"])
        made = cls._of_value(
            value,
            size,
            about["dtype"],
            about["quantizer"],
            device=next(iter(inner.values())).device,
            stride=stride,
        )
        for name in cls._INNER_TENSORS:
            if name in inner:
                setattr(made, name, inner[name])
        value.col_is_valid = about["valid"]
        return made


def exchange_outside(tensor: Any, fresh: Any) -> None:
    """Give a tensor the type, device and shape of another one, which gets the former ones; it keeps its attributes.

    Raises
    ------
    QuantizedTensorError
        If autograd or another object holds the tensor.
    """
    attributes, requires_grad = dict(tensor.__dict__), tensor.requires_grad
    fresh.requires_grad_(requires_grad)
    try:
        torch.utils.swap_tensors(tensor, fresh)
    except RuntimeError as error:
        message = (
            f"{type(tensor).__name__}.data: autograd or another object holds the tensor, so that its type, shape "
            f"or device cannot change ({error}); make a new parameter"
        )
        raise QuantizedTensorError(message) from error
    tensor.__dict__.update(attributes)


def _exchange_outside(tensor: Any, fresh: Any) -> None:
    """Do the same for tensors over native values."""
    value = fresh.__dict__["_value"]
    exchange_outside(tensor, fresh)
    # A value may know the former type and shape of its tensor; one that shares its bytes does not.
    tensor._value = tensor._value.share()
    fresh.__dict__["_value"] = value.share()
