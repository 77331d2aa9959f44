"""Quantised parameters under FSDP2: the tensors that ranks gather, and the parameter made from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_fast.errors import UnsupportedError
from te_fast.runtime.collectives import get_distributed_world_size, named
from te_fast.runtime.layouts import BLOCK

#: The gathered tensors; then shape, scales that are not gathered, and quantizer of the whole parameter.
Gathered = tuple[tuple[torch.Tensor, ...], tuple[Sequence[int], torch.Tensor | None, Any]]


def before_gather(shard: Any, mesh: Any, whole: Sequence[int]) -> Gathered:
    """Return the bytes of a shard, with the scales of its blocks.

    Parameters
    ----------
    shard : Float8Tensor or Float8BlockwiseQTensor
        Rows of the parameter.
    mesh : DeviceMesh
        Ranks that have the other rows.
    whole : sequence of int
        Shape of the parameter.
    """
    value, ranks = shard._value, mesh.size()
    _settle(shard, mesh)
    if value.row is None:
        message = f"{type(shard).__name__}: FSDP2 gathers the row layout, which this shard lacks"
        raise UnsupportedError(message)
    if value.block == 0:
        return (padded(value.row, whole, mesh),), (whole, value.row_scale, shard._quantizer)
    is_in_blocks = whole[0] % (ranks * BLOCK) == 0 and shard.shape[0] != whole[0]
    if value.block == 1 or (ranks > 1 and (len(whole) != 2 or not is_in_blocks)):
        message = (
            f"{type(shard).__name__}: FSDP2 gathers blocks of 128x128, of {BLOCK} rows or a multiple a rank; a "
            f"parameter of shape {list(whole)} does not split so over {ranks} ranks, of which this one has "
            f"{list(shard.shape)}. Use another number of ranks, shard rows, or leave out quantized_model_init"
        )
        raise UnsupportedError(message)
    if ranks == 1:  # FSDP2 then copies only the first tensor
        return (value.row,), (whole, value.row_scale, shard._quantizer)
    return (value.row, value.row_scale), (whole, None, shard._quantizer)


def _settle(shard: Any, mesh: Any) -> None:
    """Bring a shard into FSDP2's form: only its row layout, with the scale of the whole parameter."""
    value, quantizer = shard._value, shard._quantizer
    if value.col is not None:
        value.col, value.keeps_col = None, False
        if value.block:
            value.col_scale = None
    if quantizer is None:
        return
    quantizer.set_usage(rowwise=True, columnwise=False)
    measure_together(shard, mesh.get_group())


def reduce_maximum(quantizer: Any, group: Any) -> bool:
    """Let a quantizer take the maximum of all ranks from now on; tell whether it measures, and did so alone before."""
    if getattr(quantizer, "with_amax_reduction", None) is not False:
        return False
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, group
    measures: bool = quantizer.with_amax_reduction  # of two quantizers, neither may measure
    return measures


def measure_together(shard: Any, group: Any) -> None:
    """Let ranks quantise their shards by one maximum from now on, and give the values that they have one scale.

    Their scales differ if each rank has made and quantised a weight of its own before it was sharded.
    """
    if not reduce_maximum(shard._quantizer, group):
        return
    own = torch.stack([value.row_scale for value in _of_one_scale(shard)])
    scales = [torch.empty_like(own) for _ in range(get_distributed_world_size(group))]
    with named("FSDP2", "the comparison of a weight's scales"):
        torch.distributed.all_gather(scales, own, group=group)
    if any(not torch.equal(own, other) for other in scales):
        shard.quantize_(shard.dequantize())


def _of_one_scale(shard: Any) -> list[Any]:
    """Return the values of a shard, one or two, that have one scale for all elements."""
    both = shard._both() if hasattr(shard, "_both") else (shard,)
    values = [getattr(one, "_value", None) for one in both]
    return [value for value in values if value is not None and value.block == 0]


def padded(shard: torch.Tensor, whole: Sequence[int], mesh: Any) -> torch.Tensor:
    """Return a shard with as many rows as FSDP2 gathers from each rank; the last shard of rows may be shorter."""
    # Shards of another dimension have all rows, and are equal.
    rows = whole[0] if shard.shape[0] == whole[0] else -(-whole[0] // mesh.size())
    if shard.shape[0] == rows:
        return shard
    size = (rows, *whole[1:])
    count = torch.Size(size).numel()
    # FSDP2 has left room for the rows.
    if shard.untyped_storage().nbytes() >= (shard.storage_offset() + count) * shard.itemsize:
        return shard.as_strided(size, torch.empty(size, device="meta").stride())
    return torch.cat([shard, shard.new_zeros(rows - shard.shape[0], *whole[1:])])


def whole_of(gathered: torch.Tensor, whole: Sequence[int]) -> torch.Tensor:
    """Return a whole tensor over its gathered memory, which FSDP2 hands over in the form of shards."""
    return gathered.view(-1)[: math.prod(whole)].view(tuple(whole))


def after_gather(
    shard: Any,
    outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    dtype: torch.dtype,
    out: Any,
) -> Any:
    """Return the whole parameter over gathered bytes, or move a former one to them.

    The column layout is made for each backward and freed after it, since FSDP2 frees only the gathered bytes.
    """
    whole, scale, quantizer = metadata
    row = whole_of(outputs[0], whole)
    if out is None:
        value = shard._value.share()
        value.row, value.col = row, None
        made = shard._of_value(value, whole, dtype, quantizer, device=row.device)
    else:
        made = getattr(out, "_local_tensor", out)
        value = made._value
    value.col, value.keeps_col = None, False
    value.row_scale = outputs[1] if scale is None else scale
    if value.block:
        value.col_scale = None
    # Bytes and address may have changed, but FSDP2 keeps torch's version.
    value.note_write()
    return (made, ()) if out is None else None


def before_gather_of_both(shard: Any, mesh: Any, *about: Any) -> tuple[Any, Any]:
    """Return the tensors that FSDP2 gathers of a tensor of two values, and what each value notes with how many tensors.

    Parameters
    ----------
    shard : HybridQuantizedTensor
        Rows of the parameter.
    mesh : DeviceMesh
        Ranks that have the other rows.
    *about
        The other arguments of ``fsdp_pre_all_gather``.
    """
    for name, one in zip(("rowwise", "columnwise"), shard._both(), strict=True):
        _check_half(type(shard).__name__, name, one)
    measure_together(shard, mesh.get_group())
    gathered: list[torch.Tensor] = []
    notes: list[Any] = []
    for one in shard._both():
        if one is None:
            notes.append(None)
            continue
        hooked: Any = one
        tensors, note = hooked.fsdp_pre_all_gather(mesh, *about)
        gathered.extend(tensors)
        notes.append((len(tensors), note))
    return tuple(gathered), tuple(notes)


def _check_half(owner: str, name: str, one: Any) -> None:
    """Raise if FSDP2 cannot gather a value of two."""
    if one is None:
        return
    if not isinstance(one, torch.Tensor):
        message = f"{owner}: FSDP2 cannot gather a storage-only {name} sub-storage; make it with internal=False"
        raise UnsupportedError(message)
    value = getattr(one, "_value", None)
    if value is not None and value.row is None:
        message = (
            f"{owner}: FSDP2 gathers rows, which the FP8 {name} sub-storage lacks; quantise it by an "
            "IdentityQuantizer, or keep the parameter in high precision"
        )
        raise UnsupportedError(message)


def after_gather_of_both(
    shard: Any,
    outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    dtype: torch.dtype,
    out: Any,
) -> Any:
    """Return the whole parameter of two values over gathered tensors, or move a former one to them."""
    whole = None if out is None else getattr(out, "_local_tensor", out)
    left = outputs
    made: list[Any] = []
    for index, (one, noted) in enumerate(zip(shard._both(), metadata, strict=True)):
        if noted is None:
            made.append(None)
            continue
        count, note = noted
        former = None if whole is None else whole._both()[index]
        found = one.fsdp_post_all_gather(left[:count], note, dtype, out=former)
        made.append(found[0] if former is None else former)
        left = left[count:]
    if whole is not None:
        return out, outputs
    first = next(one for one in made if one is not None)
    outside = {"stride": first.stride(), "storage_offset": first.storage_offset()}
    return shard._over(*made, shape=first.shape, **outside), outputs
