"""Quantises master weights, of which each rank has slices, into whole weights, with the maxima of all ranks.

A distributed optimizer keeps, on each rank, a slice of a weight's elements in float32. The quantised weight is whole on
every rank; after a step each rank writes the bytes of its slice, and an all-gather of bytes brings the others'. Scales
follow from the maxima of all slices. One reduction finds these for all weights together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, index
from typing import Any

import torch

from te_fast.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from te_fast.runtime import native
from te_fast.runtime.layouts import BLOCK, make_columnwise
from te_fast.tensor.blockwise import Float8BlockwiseQTensor
from te_fast.tensor.dtypes import TE_DType_To_Torch
from te_fast.tensor.float8 import Float8Quantizer, Float8Tensor
from te_fast.tensor.hybrid_tensor import HybridQuantizedTensorStorage
from te_fast.tensor.identity_tensor import IdentityTensorStorage
from te_fast.tensor.quantizer import count_write, note_write
from te_fast.tensor.storage import QuantizedTensorStorage
from te_fast.tensor.tensor import Float8TensorBase

_F32_MAX = torch.finfo(torch.float32).max
_HAS_DISTRIBUTED = torch.distributed.is_available()
#: Types of master weights that a native call casts.
_CASTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
# Maps of these take half of a loop's time.
_dtype_of, _is_meta = attrgetter("dtype"), attrgetter("is_meta")


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Move the bytes of a quantised tensor to other memory, for example into a larger buffer.

    Parameters
    ----------
    tensor : Float8Tensor, Float8BlockwiseQTensor, IdentityTensor or HybridQuantizedTensor
        A quantised tensor with a row layout, or one that holds values. Of a tensor of two values, the one that forward
        reads is moved.
    new_raw_data : torch.Tensor
        uint8 of the same shape, or of the values' type. The data is copied into it, and it is the row layout from now
        on.

    Raises
    ------
    ArgumentError
        If `tensor` is of another class, or `new_raw_data` is not a tensor.
    UnsupportedError
        If a HybridQuantizedTensor has no value that forward reads.
    ShapeError, DtypeError
        If the memory does not fit.

    See Also
    --------
    quantize_master_weights : Writes master weights into such weights.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.tensor.utils import replace_raw_data
    >>> weight = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(torch.ones(16, 16))
    >>> buffer = torch.zeros(256, dtype=torch.uint8)
    >>> replace_raw_data(weight, buffer.view(16, 16))
    >>> weight.dequantize().mean(), bool((buffer > 0).all())
    (tensor(1.), True)
    """
    if not isinstance(new_raw_data, torch.Tensor):
        message = (
            f"replace_raw_data: expected a tensor as new memory, got {type(new_raw_data).__name__}"
        )
        raise ArgumentError(message)
    if isinstance(tensor, HybridQuantizedTensorStorage):
        if tensor._rowwise_storage is None:
            message = (
                f"replace_raw_data: the {type(tensor).__name__} has no rowwise sub-storage; call it before "
                "update_usage drops that"
            )
            raise UnsupportedError(message)
        tensor = tensor._rowwise_storage
    if isinstance(tensor, IdentityTensorStorage):
        former = tensor._values()
        if new_raw_data.stride() != former.stride():
            message = (
                f"replace_raw_data: expected strides {former.stride()}, got {new_raw_data.stride()}"
            )
            raise ShapeError(message)
        _move(former, new_raw_data)
        tensor._hp_data = new_raw_data.detach() if new_raw_data.requires_grad else new_raw_data
        return
    if not isinstance(tensor, Float8TensorBase):
        message = f"replace_raw_data: expected a quantised tensor, got {type(tensor).__name__}"
        raise ArgumentError(message)
    value = tensor._value
    if value.row is None:
        message = "replace_raw_data: the tensor has no row layout"
        raise ShapeError(message)
    valid = value.col_is_valid
    _move(value.row, new_raw_data)
    value.row = new_raw_data
    value.col_is_valid = valid


def _move(former: torch.Tensor, new_raw_data: torch.Tensor) -> None:
    """Copy data to other memory of the same type and shape."""
    if former.dtype != new_raw_data.dtype:
        message = f"replace_raw_data: expected {former.dtype}, got {new_raw_data.dtype}"
        raise _RawDataError(message)
    if former.shape != new_raw_data.shape:
        message = (
            f"replace_raw_data: expected shape {list(former.shape)}, got {list(new_raw_data.shape)}"
        )
        raise ShapeError(message)
    new_raw_data.detach().copy_(former)


class _RawDataError(DtypeError, ValueError):
    """Raw memory of another type; Transformer Engine raises ``ValueError``."""


@dataclass
class _Part:
    """A weight, this rank's slice of it in the weight's nominal type, and the slice's beginning."""

    weight: Any
    values: torch.Tensor | None
    start: int
    #: Memory for the bytes of the slice.
    raw: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether the weight is in high precision."""
        return isinstance(self.weight, IdentityTensorStorage)

    @property
    def is_two(self) -> bool:
        """Whether the weight has two values, which its quantizer writes together."""
        return isinstance(self.weight, HybridQuantizedTensorStorage)

    def round(self) -> None:
        """Write the slice into a weight in high precision, or into its shard."""
        if self.values is not None and self.raw is not None:
            with torch.no_grad():
                self.raw.copy_(self.values.view(torch.uint8))
            count_write(self.weight, self.weight._hp_data)

    @property
    def is_whole(self) -> bool:
        """Whether the slice is the whole weight, and its bytes go into the weight."""
        return (
            self.values is not None
            and self.raw is not None
            and self.values.numel() == self.weight.numel()
            and self.raw.data_ptr() == self.weight._value.row.data_ptr()
        )

    def rule(self) -> tuple[float, float, bool] | None:
        """Arguments of :func:`scales_of`; None if scales are given."""
        quantizer = self.weight._quantizer
        if isinstance(quantizer, Float8Quantizer):
            return None
        largest = torch.finfo(TE_DType_To_Torch[self.weight._fp8_dtype]).max
        return largest, quantizer.amax_epsilon, quantizer.force_pow_2_scales

    def maxima(self) -> torch.Tensor:
        """Maxima of the slice, float32, one in all or one per block; 0 if it has no element there.

        Under delayed scaling the cast raises the maxima, with the existing scale.
        """
        if isinstance(self.weight, Float8BlockwiseQTensor):
            return self._block_maxima()
        quantizer = self.weight._quantizer
        if isinstance(quantizer, Float8Quantizer):
            if self.values is not None:
                _cast(
                    self.values, self.raw, quantizer.scale, quantizer.amax, self.weight._value.fp8
                )
            return quantizer.amax.view(-1).clone()
        if self.values is None:
            return torch.zeros(1, dtype=torch.float32, device=self.weight.device)
        return native.amax(self.values)

    def _rows(self) -> tuple[int, int]:
        """First row, and row after the last one, of the tiles that contain elements of the slice."""
        assert self.values is not None
        cols = self.weight.shape[-1]
        first, last = self.start // cols, (self.start + self.values.numel() - 1) // cols
        return first // BLOCK * BLOCK, last // BLOCK * BLOCK + BLOCK

    def _block_maxima(self) -> torch.Tensor:
        rows, cols = _matrix(self.weight)
        maxima = torch.zeros(
            -(-rows // BLOCK), -(-cols // BLOCK), dtype=torch.float32, device=self.weight.device
        )
        if self.values is not None and self.values.numel():
            first, last = self._rows()
            tiles = self.values.new_zeros((last - first) * cols)
            begin = self.start - first * cols
            tiles[begin : begin + self.values.numel()] = self.values.nan_to_num(
                nan=0.0, posinf=float("inf"), neginf=-float("inf")
            )
            padded = tiles.new_zeros(last - first, maxima.shape[1] * BLOCK)
            padded[:, :cols] = tiles.view(-1, cols).abs()
            found = padded.view(-1, BLOCK, maxima.shape[1], BLOCK).amax((1, 3)).float()
            maxima[first // BLOCK : last // BLOCK] = found
        return maxima.view(-1)

    def write(self, scales: torch.Tensor, inverse: torch.Tensor) -> None:
        """Write the bytes of the slice, and the inverse scales of the whole weight."""
        value = self.weight._value
        if isinstance(self.weight, Float8BlockwiseQTensor):
            rows, cols = _matrix(self.weight)
            tiles = -(-rows // BLOCK), -(-cols // BLOCK)
            value.row_scale[:, : tiles[1]].copy_(inverse.view(tiles))
            if self.values is not None and self.values.numel():
                self._write_blocks(scales.view(tiles))
        else:
            value.row_scale.copy_(inverse.view(value.row_scale.shape))
            if self.values is not None:
                _cast(self.values, self.raw, scales, None, value.fp8)

    def _write_blocks(self, scales: torch.Tensor) -> None:
        assert self.values is not None
        assert self.raw is not None
        cols = self.weight.shape[-1]
        places = torch.arange(
            self.start, self.start + self.values.numel(), device=self.values.device
        )
        spread = scales.view(-1)[
            (places // cols // BLOCK) * scales.shape[1] + places % cols // BLOCK
        ]
        dtype = TE_DType_To_Torch[self.weight._fp8_dtype]
        largest = torch.finfo(dtype).max
        scaled = self.values.float().mul_(spread).clamp_(-largest, largest)
        encoded = scaled.to(dtype).view(torch.uint8)
        self.raw.copy_(torch.where(scaled.isnan(), torch.full_like(encoded, 0x7F), encoded))


def _matrix(weight: torch.Tensor) -> tuple[int, int]:
    cols = weight.shape[-1]
    return weight.numel() // max(cols, 1), cols


def _cast(
    values: torch.Tensor,
    raw: torch.Tensor | None,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    fp8: str,
) -> None:
    """Quantise values with a scale into flat bytes."""
    inverse = torch.empty(1, dtype=torch.float32, device=values.device)
    target = native.QuantizedValue(0, fp8, raw, inverse, None, None)
    target.quantize(values, (True, False), (False, 0.0, False), scale, amax, None)


def scales_of(maxima: torch.Tensor, largest: float, eps: float, pow2: bool) -> torch.Tensor:
    """Scales of current and block scaling that follow from maxima (Transformer Engine's ``recipe_common.cuh``)."""
    maxima = maxima.clamp_min(eps)
    usable = maxima.isfinite() & (maxima > 0)
    # torch would divide a number by a tensor with rounded reciprocals.
    scales = torch.full_like(maxima, largest) / torch.where(usable, maxima, torch.ones_like(maxima))
    scales = scales.clamp_max(_F32_MAX)
    if pow2:
        scales = (scales.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(usable, scales, torch.ones_like(scales))


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write this rank's slices of master weights into quantised weights, scaled by the maxima of all ranks.

    Every rank must call it with the same weights in the same order, even if it has no slice, since the maxima of all
    weights are reduced at once.

    Parameters
    ----------
    model_weights : sequence of Float8Tensor, Float8BlockwiseQTensor, IdentityTensor or HybridQuantizedTensor
        The weights, whole. Those in high precision get their slices rounded to their type. A weight of two values needs
        its whole master weight on one rank, or shards of two values.
    master_weights : sequence of torch.Tensor or None
        This rank's slice of each weight in high precision, flat; None if other ranks have all of the weight. Values are
        rounded to the weight's nominal type first, so that sharded training has the bits of training without shards.
    start_offsets : sequence of int or None
        Index of the slice's first element in the weight; None if there is no slice.
    group : torch.distributed.ProcessGroup or None
        Ranks that have the slices.
    fsdp_shard_model_weights : sequence of torch.Tensor or None, optional
        Memory (uint8) for the slices' bytes, instead of the weights' own.
    manual_post_all_gather_processing : bool, default = False
        The caller makes column layouts by :func:`post_all_gather_processing`; otherwise former column layouts are
        dropped, and made when a backward needs them. If one rank has all of a weight, its column layout is made at once
        in either case.

    Raises
    ------
    ArgumentError, ShapeError, DtypeError, DeviceError
        If the lists, or tensors in them, do not fit; nothing was written then.
    UnsupportedError
        For blocks of 1x128, stacks of experts' weights in slices, and weights of two values whose columns follow from
        the rows, or are in FP8 while ranks share the weight.

    See Also
    --------
    replace_raw_data : Moves the bytes of the weights into one buffer.
    post_all_gather_processing : Makes column layouts after an all-gather.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.tensor.utils import quantize_master_weights
    >>> weight = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(torch.zeros(16, 16))
    >>> quantize_master_weights([weight], [torch.full((256,), 0.5)], [0], None)
    >>> weight.dequantize().mean()
    tensor(0.5000)
    """
    is_alone = _is_alone(group)
    lists = (model_weights, master_weights, start_offsets)
    in_place = is_alone and fsdp_shard_model_weights is None
    if in_place and _may_be_whole(master_weights, start_offsets) and native.quantize_whole(*lists):
        for weight in model_weights:
            if "_high_precision_init_val" in weight.__dict__:
                weight.clear_high_precision_init_val()
        return
    parts = _parts(
        model_weights, master_weights, start_offsets, fsdp_shard_model_weights, is_alone=is_alone
    )
    for part in parts:
        if part.is_plain:
            part.round()
        elif part.is_two:
            _quantize_alone(part)
    parts = [part for part in parts if not (part.is_plain or part.is_two)]
    for weight in model_weights:
        if isinstance(weight, HybridQuantizedTensorStorage):
            count_write(weight)
    if is_alone:
        for part in parts:
            if part.is_whole:
                _quantize_alone(part)
        parts = [part for part in parts if not part.is_whole]
    if not parts:
        return
    maxima = [part.maxima() for part in parts]
    sizes = [one.numel() for one in maxima]
    reduced = torch.cat(maxima)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=group)
    alike: dict[tuple[Any, ...] | None, list[tuple[_Part, torch.Tensor]]] = {}
    for part, found in zip(parts, reduced.split(sizes), strict=True):
        alike.setdefault(part.rule(), []).append((part, found))
    for rule, members in alike.items():
        if rule is None:
            _note_maxima(members)
        else:
            _write_alike(members, rule)
    for part in parts:
        part.weight._value.note_write()
        note_write(part.weight)
        if not manual_post_all_gather_processing:
            part.weight._value.col = None
            if isinstance(part.weight, Float8BlockwiseQTensor):
                part.weight._value.col_scale = None
        getattr(part.weight, "clear_high_precision_init_val", lambda: None)()


def _note_maxima(members: Sequence[tuple[_Part, torch.Tensor]]) -> None:
    """Store the ranks' maxima and the inverse scales of weights whose bytes are written."""
    quantizers = [part.weight._quantizer for part, _ in members]
    inverse = [part.weight._value.row_scale for part, _ in members]
    torch._foreach_copy_([one.amax.view(-1) for one in quantizers], [found for _, found in members])
    scales = torch._foreach_reciprocal([one.scale.view(-1) for one in quantizers])
    torch._foreach_copy_([one.view(-1) for one in inverse], scales)


def _write_alike(members: Sequence[tuple[_Part, torch.Tensor]], rule: tuple[Any, ...]) -> None:
    """Write weights whose scales follow from maxima by one rule."""
    scales = scales_of(torch.cat([found for _, found in members]), *rule)
    sizes = [found.numel() for _, found in members]
    each = zip(members, scales.split(sizes), scales.reciprocal().split(sizes), strict=True)
    for (part, _), of_part, inverse in each:
        part.write(of_part, inverse)


def _is_alone(group: Any) -> bool:
    """Whether no other rank has a slice."""
    if not (_HAS_DISTRIBUTED and torch.distributed.is_initialized()):
        return True
    return torch.distributed.get_world_size(group=group) == 1


def _may_be_whole(masters: Sequence[Any], starts: Sequence[Any]) -> bool:
    """Whether all master weights can be cast, and begin where their weights do; other arguments are checked later."""
    try:
        if any(map(index, starts)) or any(map(_is_meta, masters)):
            return False
        return _CASTABLE.issuperset(map(_dtype_of, masters))
    except (TypeError, AttributeError):  # None among them, or objects of other classes
        return False


def _quantize_alone(part: _Part) -> None:
    """Quantise a weight that only this rank has, both layouts at once."""
    weight = part.weight
    assert part.values is not None
    weight.quantize_(part.values.view(weight.shape))
    getattr(weight, "clear_high_precision_init_val", lambda: None)()


def _parts(
    weights: Sequence[Any],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    shards: Sequence[torch.Tensor | None] | None,
    *,
    is_alone: bool,
) -> list[_Part]:
    shards = [None] * len(weights) if shards is None else shards
    if not len(weights) == len(masters) == len(starts) == len(shards):
        message = (
            f"quantize_master_weights: {len(weights)} weights, {len(masters)} master weights, {len(starts)} offsets "
            f"and {len(shards)} shards; expected as many of each"
        )
        raise ArgumentError(message)
    made = []
    for weight, master, start, shard in zip(weights, masters, starts, shards, strict=True):
        if isinstance(weight, HybridQuantizedTensorStorage):
            made.extend(_parts_of_two(weight, master, start, shard, is_alone=is_alone))
            continue
        _check_weight(weight)
        made.append(_part(weight, master, start, shard))
    return made


def _parts_of_two(
    weight: Any, master: Any, start: Any, shard: Any, *, is_alone: bool
) -> list[_Part]:
    """Return the parts of a weight of two values: the weight itself if one rank has all of it, else each value."""
    both = weight._both()
    held = [one for one in both if one is not None]
    if not held:
        message = "quantize_master_weights: a weight of two values has neither; both directions were dropped"
        raise ArgumentError(message)
    quantizer: Any = weight._get_quantizer()
    if both[1] is not None and quantizer.columnwise_source != "original":
        message = (
            "quantize_master_weights: a weight of two values whose columns follow from its rows "
            f"(columnwise_source={quantizer.columnwise_source!r}) is not supported; use 'original', or drop the "
            "columns by update_usage(columnwise_usage=False)"
        )
        raise UnsupportedError(message)
    if master is not None:
        begin = _begin(master, start)
        is_whole = begin == 0 and master.numel() == weight.size().numel()
        if is_whole and is_alone and shard is None:
            values = master.detach().to(weight.device, weight._dtype).contiguous().view(-1)
            return [_Part(weight, values, 0, None)]
        is_of_both = isinstance(shard, HybridQuantizedTensorStorage)
        if len(held) == 2 and not (is_whole or is_of_both):
            message = (
                "quantize_master_weights: a slice of a weight of two values, of which an all-gather brings one; give "
                "the whole master weight, a shard of two values, or drop a value by update_usage"
            )
            raise ArgumentError(message)
    shards = shard._both() if isinstance(shard, HybridQuantizedTensorStorage) else (shard, shard)
    parts = []
    for one, own in zip(both, shards, strict=True):
        if one is None:
            continue
        if isinstance(one, Float8TensorBase) and one._value.row is None:
            message = (
                "quantize_master_weights: a weight of two values has columns in FP8, which are written only together "
                "with its rows, by one rank from the whole master weight"
            )
            raise UnsupportedError(message)
        _check_weight(one)
        parts.append(_part(one, master, start, None if own is None else _bytes_of(own)))
    return parts


def _bytes_of(shard: Any) -> Any:
    """Return the memory of a shard that is a quantised tensor; other tensors are memory themselves."""
    if isinstance(shard, IdentityTensorStorage):
        return shard._values()
    return shard._value.row if isinstance(shard, Float8TensorBase) else shard


def _check_weight(weight: Any) -> None:
    if isinstance(weight, IdentityTensorStorage):
        return
    if not isinstance(weight, Float8Tensor | Float8BlockwiseQTensor):
        message = (
            f"quantize_master_weights: expected quantised weights, got {type(weight).__name__}"
        )
        raise ArgumentError(message)
    if weight._quantizer is None or weight._value.row is None:
        message = "quantize_master_weights: a weight needs a quantizer and its row layout"
        raise ArgumentError(message)
    if weight._value.groups != 1:
        message = (
            "quantize_master_weights: a stack of experts' weights is not supported; make the layer without "
            "single_grouped_weight"
        )
        raise UnsupportedError(message)
    if weight._value.block == 1:
        message = (
            "quantize_master_weights: weights in blocks of 1x128 are not supported, only of 128x128"
        )
        raise UnsupportedError(message)


def _begin(master: Any, start: Any) -> int:
    """Return where a master weight begins in its weight, after a check of both.

    Raises
    ------
    ArgumentError, DtypeError, DeviceError
        If the weight cannot be quantised from it.
    """
    if not isinstance(master, torch.Tensor):
        message = f"quantize_master_weights: expected tensors as master weights, got {type(master).__name__}"
        raise ArgumentError(message)
    if not master.is_floating_point():
        message = f"quantize_master_weights: expected a floating type of master weights, got {master.dtype}"
        raise DtypeError(message)
    if master.is_meta:
        message = (
            "quantize_master_weights: a master weight is on the meta device, where it has no values"
        )
        raise DeviceError(message)
    try:
        return index(start)
    except TypeError as error:
        message = (
            f"quantize_master_weights: start_offset must be an int where a master weight is given, got {start!r}; "
            "give the index of the slice's first element in the weight"
        )
        raise ArgumentError(message) from error


def _part(weight: Any, master: Any, start: Any, shard: torch.Tensor | None) -> _Part:
    if master is None:
        return _Part(weight, None, 0, None)
    begin = _begin(master, start)
    values = master.detach().to(weight.device, weight.dtype).contiguous().view(-1)
    if begin < 0 or begin + values.numel() > weight.numel():
        message = (
            f"quantize_master_weights: a slice of {values.numel()} elements at {begin} of a weight that has "
            f"{weight.numel()}"
        )
        raise ShapeError(message)
    is_plain = isinstance(weight, IdentityTensorStorage)
    raw = shard
    if raw is None:
        data = weight._values() if is_plain else weight._value.row
        if not data.is_contiguous():
            message = f"quantize_master_weights: expected a contiguous weight, got strides {data.stride()}"
            raise ShapeError(message)
        raw = data.view(-1)[begin : begin + values.numel()]
    raw = raw.view(-1).view(torch.uint8)
    if raw.numel() != values.numel() * (values.element_size() if is_plain else 1):
        message = f"quantize_master_weights: a shard of {raw.numel()} bytes for a slice of {values.numel()} elements"
        raise ShapeError(message)
    if raw.device != values.device:
        message = (
            f"quantize_master_weights: expected a shard on {values.device}, got one on {raw.device}"
        )
        raise DeviceError(message)
    return _Part(weight, values, begin, raw)


def cast_master_weights_to_fp8(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Call :func:`quantize_master_weights`; this is its former name.

    See Also
    --------
    quantize_master_weights : The same.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.tensor.utils import cast_master_weights_to_fp8
    >>> weight = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(torch.zeros(16, 16))
    >>> cast_master_weights_to_fp8([weight], [torch.ones(256)], [0], None)
    >>> weight.dequantize().mean()
    tensor(1.)
    """
    quantize_master_weights(
        model_weights,
        master_weights,
        start_offsets,
        group,
        fsdp_shard_model_weights,
        manual_post_all_gather_processing,
    )


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the column layouts of weights after an all-gather of their bytes; plain weights stay as they are.

    Parameters
    ----------
    model_weights : torch.Tensor or sequence of torch.Tensor
        The weights. Weights without a column layout whose quantizer makes none get none. The value that backward reads
        of a HybridQuantizedTensor stays as it is, since no bytes of it are gathered.

    See Also
    --------
    quantize_master_weights : Writes the bytes that are gathered.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.tensor.utils import post_all_gather_processing
    >>> weight = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(torch.ones(16, 16))
    >>> weight.update_usage(rowwise_usage=True, columnwise_usage=False)
    >>> post_all_gather_processing([weight])
    >>> weight.get_usages()
    {'rowwise': True, 'columnwise': True}
    """
    is_one = isinstance(model_weights, torch.Tensor | QuantizedTensorStorage)
    for weight in (model_weights,) if is_one else model_weights:
        is_hybrid = isinstance(weight, HybridQuantizedTensorStorage)
        gathered = weight._rowwise_storage if is_hybrid else weight
        if not isinstance(gathered, Float8TensorBase):
            continue
        quantizer, value = gathered._quantizer, gathered._value
        value.note_write()
        if value.col is not None or (quantizer is not None and quantizer.columnwise_usage):
            make_columnwise(value, type(gathered).__name__)
