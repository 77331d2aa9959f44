"""Tensors that quantise nothing: high-precision values behind the interface of quantised tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from te_fast.errors import ArgumentError, DtypeError, QuantizedTensorError
from te_fast.recipe import CustomRecipe, Recipe
from te_fast.tensor.operations import inplace_view, shares_versions, writes_of
from te_fast.tensor.quantizer import (
    ComparedBySettings,
    Quantizer,
    count_write,
    device_of,
    plain_values,
)
from te_fast.tensor.sharded import padded, whole_of
from te_fast.tensor.storage import QuantizedTensorStorage, Tensors
from te_fast.tensor.tensor import QuantizedTensor, TensorOverStorage, exchange_outside

aten = torch.ops.aten

#: Operators whose results are new tensors of the same kind.
_KEEPS_KIND = {
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
}


class IdentityTensorStorage(QuantizedTensorStorage):
    """Values in high precision, without torch's tensor interface.

    Parameters
    ----------
    hp_data : torch.Tensor or None
        The values, of any shape and type; both layouts read them.
    fake_dtype : torch.dtype, optional
        The nominal type, which :meth:`dequantize` gives; the type of `hp_data` by default.
    quantizer : IdentityQuantizer, optional
        The quantizer that writes new values.

    See Also
    --------
    IdentityTensor : With torch's interface.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage
    >>> IdentityTensorStorage(hp_data=torch.ones(2), fake_dtype=torch.bfloat16).dequantize()
    tensor([1., 1.], dtype=torch.bfloat16)
    """

    _hp_data: torch.Tensor | None

    def __init__(
        self,
        *,
        hp_data: torch.Tensor | None,
        fake_dtype: torch.dtype | None = None,
        quantizer: Quantizer | None = None,
    ) -> None:
        if fake_dtype is None:
            fake_dtype = torch.float32 if hp_data is None else hp_data.dtype
        self._hp_data = hp_data
        self._dtype = fake_dtype
        self._quantizer = None if quantizer is None else quantizer.copy()

    def _values(self) -> torch.Tensor:
        if self._hp_data is None:
            message = f"{type(self).__name__}: no data is there; it was saved for backward or freed"
            raise QuantizedTensorError(message)
        return self._hp_data

    # Layouts -------------------------------------------------------------------------------------

    def get_usages(self) -> dict[str, bool]:
        """Return which layouts can be read: both, or none without values."""
        is_there = self._hp_data is not None
        return {"rowwise": is_there, "columnwise": is_there}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Do nothing: both layouts are the values themselves."""

    def _drop_columnwise(self) -> None:
        """Do nothing."""

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """Return the values, for both layouts together with None.

        Raises
        ------
        ArgumentError
            If neither layout is requested.
        """
        if rowwise_data and columnwise_data:
            return self._hp_data, None
        if not rowwise_data and not columnwise_data:
            message = f"{type(self).__name__}: ask for rowwise_data or columnwise_data"
            raise ArgumentError(message)
        return self._hp_data

    def get_metadata(self) -> dict[str, Any]:
        """Return the constructor's keywords for the same values."""
        return {
            "hp_data": self._hp_data,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
        }

    def _shape(self) -> torch.Size:
        return self._values().shape

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self._values().device

    def view(self, *size: Any) -> IdentityTensorStorage:
        """Return the values in another shape."""
        return IdentityTensorStorage(
            hp_data=self._values().view(*size), fake_dtype=self._dtype, quantizer=self._quantizer
        )

    # Reading and writing -------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values: the tensor itself if it is of that type, else a copy.

        Parameters
        ----------
        dtype : torch.dtype, optional
            The nominal type by default.
        """
        return self._values().to(self._dtype if dtype is None else dtype)

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Copy the values of another one.

        Raises
        ------
        DtypeError
            If the other one is quantised.
        """
        if not isinstance(src, IdentityTensorStorage):
            expected, got = type(self).__name__, type(src).__name__
            message = f"{expected}: copy_from_storage takes values of the same class, got {got}"
            raise DtypeError(message)
        if self._hp_data is not None and src._hp_data is not None:
            self._hp_data.copy_(src._hp_data)

    def clear(self) -> None:
        """Drop the values; tensors that share the memory keep it."""
        if self._hp_data is not None:
            self._hp_data.data = torch.empty(
                0, dtype=self._hp_data.dtype, device=self._hp_data.device
            )

    # For backward --------------------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[Tensors, Any]:
        """Return the tensor to save for backward; the values are gone until they are restored."""
        values, self._hp_data = self._hp_data, None
        return [values], self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """Restore the values, and return the remaining tensors."""
        self._hp_data = tensors[0]
        return tensors[1:]

    def _shown(self) -> str:
        return f"{type(self).__name__}(dtype={self._dtype}, data={self._hp_data})"


class IdentityTensor(TensorOverStorage, IdentityTensorStorage):
    """A tensor of an :class:`IdentityQuantizer`: values in high precision.

    Operations run on the values. Views, copies of the same type and moves between devices keep the class, writes in
    place keep the tensor, and all other results are plain.

    Parameters
    ----------
    shape : sequence of int
        Shape of `hp_data`.
    dtype : torch.dtype
        Nominal type, that of `hp_data`.
    hp_data : torch.Tensor or None
        The values.
    quantizer : IdentityQuantizer, optional
        The quantizer that writes new values.
    **outside
        `fake_dtype`, `requires_grad`, `device`, `stride`, `storage_offset` of :class:`QuantizedTensor`.

    See Also
    --------
    IdentityQuantizer : Makes one.
    HybridQuantizedTensor : Other values for rows than for columns.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> tensor = te.IdentityQuantizer()(torch.ones(2, 2))
    >>> type(tensor).__name__, type(tensor + 1).__name__
    ('IdentityTensor', 'Tensor')
    """

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        hp_data: torch.Tensor | None,
        quantizer: Quantizer | None = None,
        **outside: Any,
    ) -> Any:
        """Make the tensor that torch sees."""
        if hp_data is not None:
            outside["device"] = hp_data.device
        return QuantizedTensor.__new__(cls, shape, dtype, **outside)

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        hp_data: torch.Tensor | None,
        quantizer: Quantizer | None = None,
        **_: Any,
    ) -> None:
        self._hp_data = hp_data
        self._quantizer = None if quantizer is None else quantizer.copy()

    def _over(self, values: torch.Tensor) -> Any:
        """Return a tensor of this one's class and quantizer over other values, which have no gradient."""
        return type(self)(
            values.shape,
            values.dtype,
            hp_data=values,
            quantizer=self._quantizer,
            stride=values.stride(),
            storage_offset=values.storage_offset(),
        )

    def _plain_values(self, dtype: torch.dtype) -> torch.Tensor:
        # Autograd marks what it returns.
        return self._values().detach().to(dtype)

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """Return the values in another type, as a tensor of this class."""
        return self._over(self._values().detach().to(dtype))

    def _take_over(self, tensor: torch.Tensor) -> None:
        """Take over the values of another tensor, of any shape and type."""
        is_quantized = isinstance(tensor, QuantizedTensorStorage)
        self._take((tensor.dequantize() if is_quantized else tensor).detach())

    def _take(self, values: torch.Tensor) -> None:
        """Hold other values; the tensor that torch sees follows their shape, type and device."""
        fresh = self._over(values)
        if _outside_of(fresh) == _outside_of(self):
            self._hp_data = values
            count_write(self, values)
            return
        exchange_outside(self, fresh)
        self._hp_data = values

    # torch's operations --------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the values."""
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            return inplace_view(func, args[0])
        given: Any = args[0] if args else None
        if func in (aten.detach.default, aten.alias.default) and given._hp_data is None:
            return given._emptied()
        met: list[Any] = []

        def inner(tensor: Any) -> torch.Tensor:
            met.append(tensor)
            values: torch.Tensor = tensor._values()
            return values

        with torch.inference_mode(mode=False) if shares_versions(func, args) else nullcontext():
            result = func(
                *tree_map_only(IdentityTensor, inner, args),
                **tree_map_only(IdentityTensor, inner, kwargs),
            )
            if func._schema.is_mutable:
                _note_writes(func, args, kwargs)
                written = {id(tensor._hp_data): tensor for tensor in met}
                return tree_map_only(torch.Tensor, lambda one: written.get(id(one), one), result)
            if isinstance(given, IdentityTensor) and (func.is_view or func in _KEEPS_KIND):
                return tree_map_only(torch.Tensor, given._wrapped, result)
        return result

    def _emptied(self) -> Any:
        """Return another tensor whose values were taken for saving."""
        return type(self)(
            self.shape,
            self.dtype,
            hp_data=None,
            quantizer=self._quantizer,
            device=self.device,
            stride=self.stride(),
            storage_offset=self.storage_offset(),
        )

    # Views are views of the values, so that torch's methods write to them.
    __setitem__: Any = torch.Tensor.__setitem__
    fill_diagonal_: Any = torch.Tensor.fill_diagonal_

    def _wrapped(self, values: torch.Tensor) -> torch.Tensor:
        """Return a result as a tensor of this kind, if it has this one's type."""
        return self._over(values) if values.dtype == self.dtype else values

    # Sharding ------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Return the values, which FSDP2 gathers, in the type of its policy unless the quantizer has one."""
        values = self._values()
        dtype = getattr(mp_policy, "param_dtype", None)
        if dtype is not None and getattr(self._quantizer, "dtype", None) is None:
            values = values.to(dtype)
        return (padded(values, orig_size, mesh),), (orig_size, self._quantizer)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Return the parameter over gathered values, or move a former one to them.

        Raises
        ------
        QuantizedTensorError
            If the gathered values are not of the quantizer's type, or, if it has none, of the parameter's.
        """
        (gathered,), (size, quantizer) = all_gather_outputs, metadata
        values = whole_of(gathered, size)
        expected = getattr(quantizer, "dtype", None) or param_dtype
        if values.dtype != expected:
            message = (
                f"{type(self).__name__}: gathered values of {values.dtype}, expected {expected}"
            )
            raise QuantizedTensorError(message)
        if out is None:
            return self._over(values), all_gather_outputs
        whole = getattr(out, "_local_tensor", out)
        if _outside_of(whole) == _outside_of(values):
            # A gather for backward brings the values of forward: FSDP2 keeps torch's version.
            whole._hp_data = values
        else:
            whole._take(values)
        return out, all_gather_outputs

    # Compilers and copies ------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Return the name of the inner tensor, and the tensor's other properties."""
        return ["_hp_data"], {"quantizer": self._quantizer}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], about: dict[str, Any], size: Any, stride: Any
    ) -> Any:
        """Make a tensor over an inner tensor."""
        values = inner["_hp_data"]
        return cls(
            size,
            values.dtype,
            hp_data=values,
            quantizer=about["quantizer"],
            stride=stride,
            storage_offset=values.storage_offset(),
        )

    _HELD = ("_hp_data",)

    def _reduced(self) -> Any:
        fields = (self._hp_data, self._quantizer, self.dtype, self.shape)
        return _make_identity_tensor_in_reduce_ex, fields


def _outside_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _note_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Note that an operator has written its arguments: torch counts no versions of the values, and none in lists."""
    for index, name in writes_of(func).arguments:
        given = args[index] if index < len(args) else kwargs.get(name)
        for one in given if isinstance(given, list | tuple) else (given,):
            if not isinstance(one, IdentityTensor):
                continue
            values = one._values()
            if values.shape != one.shape:
                shapes = list(values.shape), list(one.shape)
                message = f"{func}: the result has shape {shapes[0]}, and out= is an IdentityTensor of {shapes[1]}"
                raise QuantizedTensorError(message)
            count_write(one, values)


def _make_identity_tensor_in_reduce_ex(
    hp_data: torch.Tensor | None, quantizer: Any, dtype: torch.dtype, shape: Sequence[int]
) -> IdentityTensor:
    """Make a tensor from the data of a pickle."""
    outside: dict[str, Any] = {}
    if hp_data is not None:
        outside = {"stride": hp_data.stride(), "storage_offset": hp_data.storage_offset()}
    made: IdentityTensor = IdentityTensor(
        shape, dtype, hp_data=hp_data, quantizer=quantizer, **outside
    )
    return made


class IdentityQuantizer(ComparedBySettings, Quantizer):
    """Keep values in high precision.

    Under a :class:`CustomRecipe`, whose factory returns such quantizers, layers and operations compute with the plain
    operand. A call of the quantizer gives an :class:`IdentityTensor` over the same memory.

    Parameters
    ----------
    dtype : torch.dtype, optional
        A type that values are cast to, into memory of their own; None keeps their type. Layers and operations only take
        None.
    rowwise, columnwise : bool, default = True
        No effect, since both layouts are the values themselves.

    See Also
    --------
    te_fast.common.recipe.CustomRecipe : Whose factory returns such quantizers.
    HybridQuantizer : High precision in backward alone.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.common.recipe import CustomRecipe
    >>> layer, x = te.Linear(32, 16, device="cpu"), torch.rand(8, 32)
    >>> with te.autocast(recipe=CustomRecipe(qfactory=lambda role: te.IdentityQuantizer())):
    ...     y = layer(x)
    >>> torch.equal(y, layer(x))
    True
    """

    _SETTINGS = ()

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        values = plain_values(tensor)
        return values if self.dtype is None else values.to(self.dtype)

    def _made(self, values: torch.Tensor) -> Any:
        if self.internal:
            return IdentityTensorStorage(hp_data=values, quantizer=self)
        return _make_identity_tensor_in_reduce_ex(values, self, values.dtype, values.shape)

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """Return a tensor over the values, or over their cast, without autograd."""
        return self._made(self._cast(tensor))

    def update_quantized(
        self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None
    ) -> Any:
        """Write the values of a tensor into an identity tensor, and return that.

        Parameters
        ----------
        src : torch.Tensor
            Values; if their shape, type or device is another one, they replace the former ones.
        dst : IdentityTensorStorage
            Written.
        noop_flag : torch.Tensor, optional
            One float32; if it is 1, everything stays as it is.

        Raises
        ------
        ArgumentError
            If `dst` is not an identity tensor.
        DtypeError
            If `src` is not a tensor.
        """
        if not isinstance(dst, IdentityTensorStorage):
            message = f"IdentityQuantizer can only update an IdentityTensorStorage, got {type(dst).__name__}"
            raise ArgumentError(message)
        values, former = self._cast(src), dst._hp_data
        outside = (values.shape, values.dtype, values.device)
        if former is None or outside != (former.shape, former.dtype, former.device):
            if noop_flag is not None and bool(noop_flag.item()):
                return dst
            if isinstance(dst, IdentityTensor):
                dst._take(values)
            else:
                dst._hp_data, dst._dtype = values, values.dtype
            return dst
        with torch.no_grad():
            kept = values if noop_flag is None else torch.where(noop_flag == 0, values, former)
            (dst if isinstance(dst, IdentityTensor) else former).copy_(kept)
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
        """Make an identity tensor of any content."""
        values = torch.empty(
            tuple(shape),
            dtype=self.dtype or dtype,
            device=device_of(device),
            pin_memory=pin_memory,
        )
        made = self._made(values)
        return made if self.internal else made.requires_grad_(requires_grad)

    def is_requantization_safe(self) -> bool:
        """Tell whether quantising dequantised values again depends only on these values: yes."""
        return True

    def _get_compatible_recipe(self) -> type[Recipe]:
        return CustomRecipe
