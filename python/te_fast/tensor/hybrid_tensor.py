"""Tensors of two quantised values: one that forward reads by rows, and one that backward reads by columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch

from te_fast.errors import ArgumentError, DtypeError, QuantizedTensorError, UnsupportedError
from te_fast.recipe import CustomRecipe, Recipe
from te_fast.recipe.roles import QuantizerRequest
from te_fast.tensor.operations import (
    expanded,
    in_high_precision,
    moved,
    shares_versions,
)
from te_fast.tensor.quantizer import (
    ComparedBySettings,
    Quantizer,
    check_whole,
    count_write,
    device_of,
    plain_values,
)
from te_fast.tensor.sharded import after_gather_of_both, before_gather_of_both
from te_fast.tensor.storage import QuantizedTensorStorage, Tensors
from te_fast.tensor.tensor import QuantizedTensor, TensorOverStorage

aten = torch.ops.aten

_DIRECTIONS = ("rowwise", "columnwise")


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two quantised values of the same numbers, without torch's tensor interface.

    Parameters
    ----------
    rowwise_storage, columnwise_storage : QuantizedTensorStorage or None
        The values that forward and backward read.
    quantizer : HybridQuantizer
        The quantizer that writes new values.
    fake_dtype : torch.dtype, optional
        The nominal type; that of either value by default.

    Raises
    ------
    DtypeError
        If `quantizer` is no HybridQuantizer.

    See Also
    --------
    HybridQuantizedTensor : With torch's interface.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.HybridQuantizer(
    ...     rowwise_quantizer=te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu"),
    ...     columnwise_quantizer=te.IdentityQuantizer(),
    ... )
    >>> quantizer.internal = True
    >>> quantizer(torch.ones(16, 16)).get_usages()
    {'rowwise': True, 'columnwise': True}
    """

    _rowwise_storage: QuantizedTensorStorage | None
    _columnwise_storage: QuantizedTensorStorage | None

    def __init__(
        self,
        *,
        rowwise_storage: QuantizedTensorStorage | None,
        columnwise_storage: QuantizedTensorStorage | None,
        quantizer: Quantizer | None,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        self._hold(rowwise_storage, columnwise_storage, quantizer)
        if fake_dtype is None:
            fake_dtype = next((one._dtype for one in self._held()), torch.float32)
        self._dtype = fake_dtype

    def _hold(self, rowwise: Any, columnwise: Any, quantizer: Quantizer | None) -> None:
        _check_parent(type(self), quantizer)
        self._rowwise_storage, self._columnwise_storage = rowwise, columnwise
        self._quantizer = quantizer.copy()  # type: ignore[union-attr]

    @property
    def rowwise_sub_storage(self) -> QuantizedTensorStorage | None:
        """The value that forward reads."""
        return self._rowwise_storage

    @property
    def columnwise_sub_storage(self) -> QuantizedTensorStorage | None:
        """The value that backward reads."""
        return self._columnwise_storage

    def _held(self) -> Iterator[Any]:
        """Return the values that are there, the rows' first."""
        for one in (self._rowwise_storage, self._columnwise_storage):
            if one is not None:
                yield one

    def _first(self) -> Any:
        first = next(self._held(), None)
        if first is None:
            message = f"{type(self).__name__}: no data is there; both directions were dropped"
            raise QuantizedTensorError(message)
        return first

    # Layouts -------------------------------------------------------------------------------------

    def get_usages(self) -> dict[str, bool]:
        """Return which values are there."""
        return {
            "rowwise": self._rowwise_storage is not None,
            "columnwise": self._columnwise_storage is not None,
        }

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop values that are not requested.

        Parameters
        ----------
        rowwise_usage, columnwise_usage : bool, optional
            Whether the value is requested; None leaves it as it is.

        Raises
        ------
        QuantizedTensorError
            If a requested value is not there; then nothing was dropped.
        """
        asked = dict(zip(_DIRECTIONS, (rowwise_usage, columnwise_usage), strict=True))
        usages = self.get_usages()
        for name in _DIRECTIONS:
            if asked[name] and not usages[name]:
                message = (
                    f"{type(self).__name__}: there is no {name} sub-storage, and none can be made of the other one; "
                    "quantise the values anew"
                )
                raise QuantizedTensorError(message)
        if rowwise_usage is False:
            self._rowwise_storage = None
        if columnwise_usage is False:
            self._columnwise_storage = None

    def _drop_columnwise(self) -> None:
        """Drop the value that backward reads."""
        self._columnwise_storage = None

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """Return the data tensors of both values, or of one of them."""
        asked = zip((rowwise_data, columnwise_data), self._both(), strict=True)
        found: list[Any] = []
        for is_asked, one in asked:
            if is_asked and one is not None:
                found.extend(one.get_data_tensors())
        return tuple(found)

    def _both(self) -> tuple[Any, Any]:
        return self._rowwise_storage, self._columnwise_storage

    def get_metadata(self) -> dict[str, Any]:
        """Return the constructor's keywords for the same values."""
        return {
            "rowwise_storage": self._rowwise_storage,
            "columnwise_storage": self._columnwise_storage,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
        }

    def _shape(self) -> torch.Size:
        size: torch.Size = self._first().size()
        return size

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        device: torch.device = self._first().device
        return device

    # Reading and writing -------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values that forward reads; those that backward reads if the former were dropped.

        Parameters
        ----------
        dtype : torch.dtype, optional
            The nominal type by default.
        """
        values: torch.Tensor = self._first().dequantize(
            dtype=self._dtype if dtype is None else dtype
        )
        return values

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Copy the values that both have.

        Raises
        ------
        DtypeError
            If the other one is of another class, or a value of it is.
        """
        if not isinstance(src, HybridQuantizedTensorStorage):
            expected, got = type(self).__name__, type(src).__name__
            message = f"{expected}: copy_from_storage takes values of the same class, got {got}"
            raise DtypeError(message)
        for own, other in zip(self._both(), src._both(), strict=True):
            if own is not None and other is not None:
                own.copy_from_storage(other)

    def clear(self) -> None:
        """Free both values."""
        for one in self._held():
            one.clear()

    # For backward --------------------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[Tensors, Any]:
        """Return the tensors to save for backward; the values are empty until they are restored."""
        tensors: Tensors = []
        rest = []
        for one in self._both():
            saved, remaining = ([], None) if one is None else one.prepare_for_saving()
            tensors.extend(saved)
            rest.append(remaining)
        self._rowwise_storage, self._columnwise_storage = rest
        return tensors, self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """Restore the tensors, and return the remaining ones."""
        left: Any = list(tensors)
        for one in self._held():
            left = one.restore_from_saved(left)
        return list(left)

    def _shown(self) -> str:
        rowwise, columnwise = (None if one is None else type(one).__name__ for one in self._both())
        return f"{type(self).__name__}(rowwise={rowwise}, columnwise={columnwise}, dtype={self._dtype})"


def _check_parent(owner: type, quantizer: Any) -> None:
    if not isinstance(quantizer, HybridQuantizer):
        message = (
            f"{owner.__name__} requires a parent HybridQuantizer, got {type(quantizer).__name__}"
        )
        raise DtypeError(message)


class HybridQuantizedTensor(TensorOverStorage, HybridQuantizedTensorStorage):
    """A tensor of two quantised values, which forward and backward read.

    To torch it is of its nominal type. Copies, moves between devices, and views that both values can have keep the
    class. Operations in place dequantise the rows' value, run, and quantise both values again. All other operations
    dequantise, and their results are plain. A value of an :class:`IdentityQuantizer` has the memory of the tensor that
    was quantised.

    Parameters
    ----------
    shape : sequence of int
        Shape.
    dtype : torch.dtype
        Nominal type.
    rowwise_storage, columnwise_storage : QuantizedTensor, QuantizedTensorStorage or None
        The values that forward and backward read.
    quantizer : HybridQuantizer
        The quantizer that writes new values.
    **outside
        `fake_dtype`, `requires_grad`, `device`, `stride`, `storage_offset` of :class:`QuantizedTensor`.

    Raises
    ------
    DtypeError
        If `quantizer` is no HybridQuantizer.

    See Also
    --------
    HybridQuantizer : Makes one.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> quantizer = te.HybridQuantizer(
    ...     rowwise_quantizer=te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu"),
    ...     columnwise_quantizer=te.IdentityQuantizer(),
    ... )
    >>> type(quantizer(torch.ones(16, 16)).columnwise_sub_storage).__name__
    'IdentityTensor'
    """

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        rowwise_storage: QuantizedTensorStorage | None,
        columnwise_storage: QuantizedTensorStorage | None,
        quantizer: Quantizer | None,
        **outside: Any,
    ) -> Any:
        """Make the tensor that torch sees."""
        _check_parent(cls, quantizer)
        for one in (rowwise_storage, columnwise_storage):
            if one is not None:
                outside["device"] = one.device
        return QuantizedTensor.__new__(cls, shape, dtype, **outside)

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        rowwise_storage: QuantizedTensorStorage | None,
        columnwise_storage: QuantizedTensorStorage | None,
        quantizer: Quantizer | None,
        **_: Any,
    ) -> None:
        self._hold(rowwise_storage, columnwise_storage, quantizer)

    def _over(self, rowwise: Any, columnwise: Any, **outside: Any) -> Any:
        """Return a tensor of this one's class, type and quantizer over other values."""
        shape = outside.pop("shape", self.shape)
        return type(self)(
            shape,
            self.dtype,
            rowwise_storage=rowwise,
            columnwise_storage=columnwise,
            quantizer=self._quantizer,
            **outside,
        )

    def _with(self, function: Callable[[Any], Any], what: str, **outside: Any) -> Any:
        """Return a tensor with a function of both values."""
        made = []
        for name, one in zip(_DIRECTIONS, self._both(), strict=True):
            if one is not None and not isinstance(one, torch.Tensor):
                message = (
                    f"{type(self).__name__}: {what} cannot handle a storage-only {name} sub-storage "
                    f"({type(one).__name__}); leave the quantizer's internal False"
                )
                raise UnsupportedError(message)
            made.append(None if one is None else function(one))
        return self._over(*made, **outside)

    def _plain_values(self, dtype: torch.dtype) -> torch.Tensor:
        values: torch.Tensor = self._first().dequantize(dtype=dtype).detach()
        return values

    def _take_over(self, tensor: torch.Tensor) -> None:
        """Take over the values of a tensor of this class, or quantise a plain tensor into new values."""
        if not isinstance(tensor, HybridQuantizedTensor):
            with torch.no_grad():
                tensor = self._get_quantizer().quantize(tensor, dtype=self.dtype)
        for name in ("shape", "dtype", "device"):
            own, other = getattr(self, name), getattr(tensor, name)
            if own != other:
                message = f"{type(self).__name__}.data: expected {name} {own}, got {other}; make a new tensor"
                raise QuantizedTensorError(message)
        fresh: Any = tensor.detach()
        self._rowwise_storage, self._columnwise_storage = fresh._both()
        count_write(self)

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """Return a tensor of another nominal type over the same values."""
        both: list[Any] = [
            one.detach() if isinstance(one, torch.Tensor) else one for one in self._both()
        ]
        return type(self)(
            self.shape,
            dtype,
            rowwise_storage=both[0],
            columnwise_storage=both[1],
            quantizer=self._quantizer,
            stride=self.stride(),
            storage_offset=self.storage_offset(),
        )

    # torch's operations --------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on both values where both can have its result, else on dequantised values."""
        kwargs = kwargs or {}
        given: Any = args[0] if args else None
        is_shared = shares_versions(func, args)
        if isinstance(given, HybridQuantizedTensor):
            with torch.inference_mode(mode=False) if is_shared else nullcontext():
                result = given._run(func, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        elif func == aten.copy_.default and type(given) is torch.Tensor:
            return given.copy_(args[1]._plain_values(given.dtype), *args[2:])
        elif func == aten._foreach_copy_.default:
            for target, source in zip(given, args[1], strict=True):
                target.copy_(source)
            return None
        return in_high_precision(func, types, args, kwargs, is_shared=is_shared, is_native=False)

    def _run(self, func: Any, others: Any, kwargs: dict[str, Any]) -> Any:
        """Return a result of this class, or NotImplemented."""
        if func in (aten.detach.default, aten.alias.default):
            return self._with(
                lambda one: one.detach(),
                "detach",
                stride=self.stride(),
                storage_offset=self.storage_offset(),
            )
        if func == aten.clone.default:
            return self._with(lambda one: one.clone(), "clone")
        if func == aten._to_copy.default:
            if kwargs.get("dtype") not in (None, self.dtype):
                return NotImplemented
            options = {name: value for name, value in kwargs.items() if name != "dtype"}
            made = self._with(lambda one: func(one, *others, **options), "a move")
            made._quantizer._move(made.device)
            return made
        if func == aten._pin_memory.default:
            return self._with(lambda one: one.pin_memory(), "pinning")
        if func == aten.is_pinned.default:
            return self._first().is_pinned()
        if func == aten.record_stream.default:
            for one in self._held():
                one.record_stream(*others)
            return None
        if func._schema.is_mutable:
            for one in self._held():
                check_whole(one)
        if func == aten.copy_.default:
            return self._copied_from(others[0])
        if func in (aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default):
            return self._new(func, others, kwargs)
        if func.is_view:
            return self._viewed_by(func, others, kwargs)
        return NotImplemented

    def _copied_from(self, source: Any) -> Any:
        if isinstance(source, HybridQuantizedTensor) and source.shape == self.shape:
            pairs = [
                pair
                for pair in zip(self._both(), source._both(), strict=True)
                if pair[0] is not None
            ]
            if all(isinstance(one, torch.Tensor) for pair in pairs for one in pair):
                for own, other in pairs:
                    own.copy_(other)
                return self
        values = source.dequantize() if isinstance(source, QuantizedTensorStorage) else source
        return self.quantize_(expanded(values.to(self.dtype), self))

    def _new(self, func: Any, others: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("dtype") not in (None, self.dtype):
            return NotImplemented
        device = kwargs.get("device") or self.device
        quantizer = self._get_quantizer().copy()
        quantizer.internal = False
        shape = others[0] if others else self.shape
        made = quantizer.make_empty(
            shape, dtype=self.dtype, device=device, pin_memory=bool(kwargs.get("pin_memory"))
        )
        if func == aten.new_zeros.default:
            made.quantize_(torch.zeros(tuple(shape), dtype=self.dtype, device=device))
        return made

    def _viewed_by(self, func: Any, others: Any, kwargs: dict[str, Any]) -> Any:
        """Return views of both values, if their classes have such views."""
        if not all(isinstance(one, torch.Tensor) for one in self._held()):
            return NotImplemented
        try:
            seen = [None if one is None else func(one, *others, **kwargs) for one in self._both()]
        except UnsupportedError:  # a column layout alone has no other shape
            return NotImplemented
        is_list = any(isinstance(one, list | tuple) for one in seen)
        there = [one for one in seen if one is not None]
        parts = list(zip(*there, strict=True)) if is_list else [tuple(there)]
        kinds = [type(one) for one in self._held()]
        if not kinds or any([type(one) for one in part] != kinds for part in parts):
            return NotImplemented
        made = []
        for part in parts:
            left, first = iter(part), part[0]
            values = [None if one is None else next(left) for one in self._both()]
            outside = {"stride": first.stride(), "storage_offset": first.storage_offset()}
            made.append(self._over(*values, shape=first.shape, **outside))
        return made if is_list else made[0]

    # Sharding ------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Return the tensors that FSDP2 gathers: those of both values.

        Raises
        ------
        UnsupportedError
            If a value has no torch interface, or is of FP8 without a row layout.
        """
        about = orig_size, contiguous_orig_stride, module, mp_policy
        return before_gather_of_both(self, mesh, *about)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Return the parameter over gathered values, or move a former one to them."""
        return after_gather_of_both(self, all_gather_outputs, metadata, param_dtype, out)

    # Compilers and copies ------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Return the names of the values that are there, and the tensor's other properties.

        Raises
        ------
        UnsupportedError
            If a value has no torch interface.
        """
        names = [name for name in self._HELD if getattr(self, name) is not None]
        for one in self._held():
            if not isinstance(one, torch.Tensor):
                message = (
                    f"{type(self).__name__}: torch.compile cannot see into a {type(one).__name__}; leave the "
                    "quantizer's internal False"
                )
                raise UnsupportedError(message)
        return names, {"quantizer": self._quantizer, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Any], about: dict[str, Any], size: Any, stride: Any
    ) -> Any:
        """Make a tensor over two values."""
        rowwise, columnwise = map(inner.get, cls._HELD)
        return cls(
            size,
            about["dtype"],
            rowwise_storage=rowwise,
            columnwise_storage=columnwise,
            quantizer=about["quantizer"],
            stride=stride,
        )

    _HELD = ("_rowwise_storage", "_columnwise_storage")

    def _reduced(self) -> Any:
        fields = (*self._both(), self._quantizer, self.dtype, self.shape)
        return _make_hybrid_quantized_tensor_in_reduce_ex, fields


def _make_hybrid_quantized_tensor_in_reduce_ex(
    rowwise_storage: Any,
    columnwise_storage: Any,
    quantizer: Any,
    dtype: torch.dtype,
    shape: Sequence[int],
) -> HybridQuantizedTensor:
    """Make a tensor from the data of a pickle."""
    for one in (rowwise_storage, columnwise_storage):
        if not isinstance(one, QuantizedTensorStorage | None):
            message = f"a pickled HybridQuantizedTensor holds a {type(one).__name__}, expected quantised values"
            raise DtypeError(message)
    made: HybridQuantizedTensor = HybridQuantizedTensor(
        shape,
        dtype,
        rowwise_storage=rowwise_storage,
        columnwise_storage=columnwise_storage,
        quantizer=quantizer,
    )
    return made


class HybridQuantizer(ComparedBySettings, Quantizer):
    """Quantise values differently for forward, which reads rows, and backward, which reads columns.

    Under a :class:`CustomRecipe`, whose factory returns such quantizers, layers and operations take an FP8 quantizer
    for rows together with an equal one, or with an :class:`IdentityQuantizer`, for columns: backward then runs in high
    precision. A call of the quantizer gives a :class:`HybridQuantizedTensor`.

    Parameters
    ----------
    rowwise_quantizer, columnwise_quantizer : Quantizer
        Two objects.
    columnwise_source : {'original', 'rowwise_dequantized'}, default = 'original'
        The values that backward reads: those of the operand, or those that its FP8 numbers stand for.

    Raises
    ------
    ArgumentError
        If a quantizer is not a Quantizer, or both are one object, or the source is unknown.

    See Also
    --------
    te_fast.common.recipe.CustomRecipe : Whose factory returns such quantizers.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> rows = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    >>> te.HybridQuantizer(
    ...     rowwise_quantizer=rows, columnwise_quantizer=te.IdentityQuantizer()
    ... ).columnwise_source
    'original'
    """

    _COLUMNWISE_SOURCES: ClassVar[tuple[str, ...]] = ("original", "rowwise_dequantized")

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: Literal["original", "rowwise_dequantized"] = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        given = (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer))
        for name, quantizer in given:
            if isinstance(quantizer, QuantizerRequest):
                message = (
                    "HybridQuantizer does not support nested QuantizerRequest objects: a factory returns "
                    f"{type(quantizer).__name__} for the whole operand, got one as {name}_quantizer"
                )
                raise ArgumentError(message)
            if not isinstance(quantizer, Quantizer):
                message = f"HybridQuantizer: {name}_quantizer must be a Quantizer, got {type(quantizer).__name__}"
                raise ArgumentError(message)
        if rowwise_quantizer is columnwise_quantizer:
            message = "HybridQuantizer requires distinct rowwise and columnwise quantizers, got one object for both"
            raise ArgumentError(message)
        if columnwise_source not in self._COLUMNWISE_SOURCES:
            known = self._COLUMNWISE_SOURCES
            message = f"HybridQuantizer: columnwise_source must be one of {known}, got {columnwise_source!r}"
            raise ArgumentError(message)
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    def _settings(self) -> tuple[Any, ...]:
        own = self.rowwise_usage, self.columnwise_usage, self.internal, self.columnwise_source
        return (*own, self.rowwise_quantizer, self.columnwise_quantizer)

    def copy(self) -> HybridQuantizer:
        """Return another quantizer with the same settings, over copies of both quantizers."""
        made: HybridQuantizer = super().copy()
        made.rowwise_quantizer = self.rowwise_quantizer.copy()
        made.columnwise_quantizer = self.columnwise_quantizer.copy()
        return made

    def _move(self, device: torch.device) -> None:
        """Let delayed scaling's scales be on a device."""
        self.rowwise_quantizer = moved(self.rowwise_quantizer, device)
        self.columnwise_quantizer = moved(self.columnwise_quantizer, device)

    @property
    def with_amax_reduction(self) -> bool:
        """Whether either quantizer takes the maximum of several ranks; set for both that can."""
        both = (self.rowwise_quantizer, self.columnwise_quantizer)
        return any(getattr(quantizer, "with_amax_reduction", False) for quantizer in both)

    @with_amax_reduction.setter
    def with_amax_reduction(self, reduces: bool) -> None:
        self._set_in_both("with_amax_reduction", reduces)

    @property
    def amax_reduction_group(self) -> Any:
        """The ranks; set for both quantizers that can."""
        both = (self.rowwise_quantizer, self.columnwise_quantizer)
        groups = (getattr(quantizer, "amax_reduction_group", None) for quantizer in both)
        return next((group for group in groups if group is not None), None)

    @amax_reduction_group.setter
    def amax_reduction_group(self, group: Any) -> None:
        self._set_in_both("amax_reduction_group", group)

    def _set_in_both(self, name: str, value: Any) -> None:
        for quantizer in (self.rowwise_quantizer, self.columnwise_quantizer):
            if hasattr(quantizer, name):
                setattr(quantizer, name, value)

    def _columns_of(self, tensor: torch.Tensor, rowwise: Any) -> torch.Tensor:
        """Return the values that the columns' quantizer reads; `rowwise` is the rows' value if it was made."""
        if self.columnwise_source == "original":
            return tensor
        made = self.rowwise_quantizer.quantize_impl(tensor) if rowwise is None else rowwise
        values: torch.Tensor = made.dequantize(dtype=tensor.dtype).detach()
        return values

    def _made(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *values: Any
    ) -> Any:
        rowwise, columnwise = values
        held = {
            "rowwise_storage": rowwise,
            "columnwise_storage": columnwise,
            "quantizer": self,
            "fake_dtype": dtype,
        }
        if self.internal:
            return HybridQuantizedTensorStorage(**held)
        return HybridQuantizedTensor(shape, dtype, device=device, **held)

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """Quantise a tensor for the directions that are used, without autograd."""
        tensor = plain_values(tensor).contiguous()
        rowwise = columnwise = None
        if self.rowwise_usage:
            rowwise = self.rowwise_quantizer.quantize_impl(tensor)
        if self.columnwise_usage:
            columnwise = self.columnwise_quantizer.quantize_impl(self._columns_of(tensor, rowwise))
        return self._made(tensor.shape, tensor.dtype, tensor.device, rowwise, columnwise)

    def update_quantized(
        self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None
    ) -> Any:
        """Write the values of a tensor, for the directions that are used and that are there, and return `dst`.

        Parameters
        ----------
        src : torch.Tensor
            A tensor of the same shape.
        dst : HybridQuantizedTensorStorage
            Written.
        noop_flag : torch.Tensor, optional
            One float32; if it is 1, everything stays as it is.

        Raises
        ------
        ArgumentError
            If `dst` is not a tensor of two values.
        DtypeError
            If `src` is not a tensor.
        """
        if not isinstance(dst, HybridQuantizedTensorStorage):
            message = f"HybridQuantizer can only update a HybridQuantizedTensorStorage, got {type(dst).__name__}"
            raise ArgumentError(message)
        src = plain_values(src)
        rowwise, columnwise = dst._both()
        if self.rowwise_usage and rowwise is not None:
            self.rowwise_quantizer.update_quantized(src, rowwise, noop_flag=noop_flag)
        if self.columnwise_usage and columnwise is not None:
            source = self._columns_of(src, rowwise if self.rowwise_usage else None)
            self.columnwise_quantizer.update_quantized(source, columnwise, noop_flag=noop_flag)
        count_write(dst)
        return dst

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """Make a tensor of any content, for the directions that are used."""
        device = device_of(device)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "pin_memory": pin_memory}
        made = [
            quantizer.make_empty(shape, **options) if is_used else None
            for quantizer, is_used in (
                (self.rowwise_quantizer, self.rowwise_usage),
                (self.columnwise_quantizer, self.columnwise_usage),
            )
        ]
        result = self._made(tuple(shape), dtype, device, *made)
        return result if self.internal else result.requires_grad_(requires_grad)

    def supports_only_rowwise_all_gather(self) -> bool:
        """Tell whether only the row layout is gathered: if it is so for either quantizer."""
        both = (self.rowwise_quantizer, self.columnwise_quantizer)
        return any(quantizer.supports_only_rowwise_all_gather() for quantizer in both)

    def is_requantization_safe(self) -> bool:
        """Tell whether quantising again depends only on the values: if it is so for each quantizer that is used."""
        reads_rows = self.rowwise_usage or self.columnwise_source == "rowwise_dequantized"
        used = (
            (self.rowwise_quantizer, reads_rows),
            (self.columnwise_quantizer, self.columnwise_usage),
        )
        return all(quantizer.is_requantization_safe() for quantizer, is_used in used if is_used)

    def _get_compatible_recipe(self) -> type[Recipe]:
        return CustomRecipe
