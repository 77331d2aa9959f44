"""Calls of the kernels for the functions of ``permutation`` and the modules of ``padding``.

Eager calls go to the native module, through an autograd function if a gradient is needed; under ``torch.compile`` the
same calls are operators of ``torch.library``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast import _config
from te_fast.errors import ShapeError, StateError
from te_fast.moe import operators as compiled
from te_fast.moe import quantized
from te_fast.runtime import native
from te_fast.runtime.compiling import is_watched
from te_fast.runtime.second_order import no_forward_mode, refuse_second_order
from te_fast.tensor.primary import as_read, is_quantized
from te_fast.tensor.storage import QuantizedTensorStorage

#: Rows, probabilities, row_id_map, pad_offsets, padded tokens per expert.
Permuted = tuple[torch.Tensor, Any, torch.Tensor, Any, Any]

PAD, UNPAD, SORT, UNSORT = range(4)
#: The public function of each mode, for messages.
_MOVES = ("Fp8Padding", "Fp8Unpadding", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index")

_is_grad_enabled = torch.is_grad_enabled


def _ends_of(row_id_map: torch.Tensor) -> torch.Tensor | None:
    """Find the ends of the experts' rows that a permutation left with its map, unless it has changed."""
    kept = row_id_map.__dict__.get("_te_fast_ends")
    return kept[0] if kept is not None and kept[1] == row_id_map._version else None


def _name_of_permute(ctx: Any) -> str:
    """Return the public function that made a node."""
    if ctx.saved_tensors[1] is not None:  # pad_offsets
        return "moe_permute_and_pad_with_probs"
    return "moe_permute_with_probs" if ctx.like[-1] else "moe_permute"


def _moved_gradients(name: str | Callable[[Any], str], ctx: Any, dout: Any, dprobs: Any) -> Any:
    """Return the gradient's rows for a backward that moves rows; zeros if only the probabilities have a gradient."""
    if _is_grad_enabled():
        refuse_second_order(name if isinstance(name, str) else name(ctx))
    if dout is None and dprobs is not None:
        rows, cols, dtype, device, _ = ctx.like
        return torch.zeros((rows, cols), dtype=dtype, device=device)
    return dout


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        probs: torch.Tensor | None,
        routing_map: torch.Tensor,
        rows: int,
        align: int,
        index: bool,
    ) -> Any:
        out, permuted_probs, row_id_map, pad_offsets, padded, ends = _permuted(
            inp, routing_map, probs, rows, align, index
        )
        if not index:
            row_id_map._te_fast_ends = (ends, row_id_map._version)
        ctx.save_for_backward(row_id_map, pad_offsets)
        ctx.tokens = inp.size(0)
        ctx.top_k = routing_map.size(1) if index else 0
        ctx.like = (rows, inp.size(1), inp.dtype, inp.device, probs is not None)
        ctx.set_materialize_grads(False)
        return out, permuted_probs, row_id_map, pad_offsets, padded

    jvp = no_forward_mode("moe_permute")

    @staticmethod
    def backward(ctx: Any, dout: Any, dprobs: Any, *_: Any) -> Any:
        dout = quantized.plain(_moved_gradients(_name_of_permute, ctx, dout, dprobs))
        if dout is None:
            return None, None, None, None, None, None
        row_id_map, pad_offsets = ctx.saved_tensors
        grad, probs_grad = native.moe_unpermute(
            dout, row_id_map, None, pad_offsets, dprobs, ctx.tokens, ctx.top_k
        )
        return grad, probs_grad, None, None, None, None


class _Apply(torch.autograd.Function):
    """The second half of :class:`_Permute`, for a map that exists."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        probs: torch.Tensor | None,
        row_id_map: torch.Tensor,
        pad_offsets: torch.Tensor | None,
        ends: torch.Tensor,
        rows: int,
    ) -> Any:
        ctx.save_for_backward(row_id_map, pad_offsets)
        ctx.like = (rows, inp.size(1), inp.dtype, inp.device, probs is not None)
        ctx.tokens = inp.size(0)
        ctx.top_k = 0
        ctx.set_materialize_grads(False)
        return _applied(inp, probs, row_id_map, pad_offsets, ends, rows, 0)

    jvp = no_forward_mode("moe_permute")
    backward = _Permute.backward


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        probs: torch.Tensor | None,
        row_id_map: torch.Tensor,
        pad_offsets: torch.Tensor | None,
        tokens: int,
        top_k: int,
    ) -> torch.Tensor:
        out, _ = native.moe_unpermute(inp, row_id_map, probs, pad_offsets, None, tokens, top_k)
        ctx.save_for_backward(None if probs is None else inp, probs, row_id_map, pad_offsets)
        ctx.ends = _ends_of(row_id_map) if top_k == 0 else None
        ctx.rows = inp.size(0)
        ctx.top_k = top_k
        return out

    jvp = no_forward_mode("moe_unpermute")

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        refuse_second_order("moe_unpermute")
        inp, probs, row_id_map, pad_offsets = ctx.saved_tensors
        probs_grad = None
        if probs is None:
            grad, _ = _applied(dout, None, row_id_map, pad_offsets, ctx.ends, ctx.rows, ctx.top_k)
        else:
            grad, probs_grad = native.moe_unpermute_backward(
                quantized.plain(dout), inp, row_id_map, probs, pad_offsets, ctx.ends, ctx.top_k
            )
        return grad, probs_grad, None, None, None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        probs: torch.Tensor | None,
        splits: Any,
        index: torch.Tensor | None,
        mode: int,
        align: int,
        rows: int,
    ) -> Any:
        # Saved like tensors, or copied, so that backward finds the values that forward read.
        listed = type(splits) is list
        ctx.save_for_backward(None if listed else splits, index)
        ctx.splits = splits.copy() if listed else None
        ctx.mode = mode
        ctx.align = align
        ctx.like = (rows, inp.size(1), inp.dtype, inp.device, probs is not None)
        ctx.rows = inp.size(0)
        ctx.set_materialize_grads(False)
        return _moved(inp, probs, splits, index, mode, align, rows)

    jvp = no_forward_mode(lambda ctx: _MOVES[ctx.mode])

    @staticmethod
    def backward(ctx: Any, dout: Any, dprobs: Any, _: Any) -> Any:
        dout = _moved_gradients(_MOVES[ctx.mode], ctx, dout, dprobs)
        if dout is None:
            return None, None, None, None, None, None, None
        splits, index = ctx.saved_tensors
        # PAD and UNPAD, SORT and UNSORT differ in the last bit.
        grad, probs_grad, _ = _moved(
            dout,
            dprobs,
            ctx.splits if splits is None else splits,
            index,
            ctx.mode ^ 1,
            ctx.align,
            ctx.rows,
        )
        return grad, probs_grad, None, None, None, None, None


def _permuted(
    inp: torch.Tensor, routing_map: Any, probs: Any, rows: int, align: int, index: bool
) -> Any:
    """Permute, FP8 as FP8: as ``native.moe_permute``, with the ends of the experts' rows."""
    data, scales, given = quantized.split(inp)
    out, *rest, scales = native.moe_permute(
        data, routing_map, probs, rows, align, index, True, scales
    )
    if given is not None:
        out = quantized.join(given, out, scales)
    return out, *rest


def _applied(
    inp: torch.Tensor,
    probs: Any,
    row_id_map: Any,
    pad_offsets: Any,
    ends: Any,
    rows: int,
    top_k: int,
) -> Any:
    """Move rows by a map, FP8 as FP8: as ``native.moe_apply``."""
    data, scales, given = quantized.split(inp)
    out, permuted, scales = native.moe_apply(
        data, probs, row_id_map, pad_offsets, ends, rows, top_k, scales
    )
    if given is not None:
        out = quantized.join(given, out, scales)
    return out, permuted


def _moved(
    inp: torch.Tensor, probs: Any, splits: Any, index: Any, mode: int, align: int, rows: int
) -> Any:
    """Move rows in segments, FP8 as FP8: as ``native.moe_pad``."""
    data, scales, given = quantized.split(inp)
    out, *rest = native.moe_pad(data, probs, splits, index, mode, align, rows)
    if given is not None:
        if scales is not None:
            scales = quantized.rows_of_scales(scales, inp.shape[0])
            scales, *_ = native.moe_pad(scales, None, splits, index, mode, align, rows)
            scales = quantized.lines_of_scales(scales)
        out = quantized.join(given, out, scales)
    return out, *rest


def _apply_of(function: Any) -> Any:
    """``torch._C._FunctionBase.apply``: Function.apply's Python frame costs two microseconds."""
    return super(torch.autograd.Function, function).apply


_permute_apply = _apply_of(_Permute)
_apply_apply = _apply_of(_Apply)
_unpermute_apply = _apply_of(_Unpermute)
_move_apply = _apply_of(_Move)


def _wants_grad(inp: torch.Tensor, probs: torch.Tensor | None) -> bool:
    return _is_grad_enabled() and (inp.requires_grad or (probs is not None and probs.requires_grad))


def permute(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    rows: int,
    align: int,
    *,
    index: bool,
) -> Permuted:
    """Permute into ``rows`` rows; a negative number counts them first."""
    inp = as_read(inp)
    if rows < 0:
        return permute_exact(inp, probs, routing_map, align)
    if is_watched(inp):
        return compiled.permute(inp, probs, routing_map, rows, align, index)
    dropped = _dropped_so_far(inp) if _config.DEBUG else 0
    if _wants_grad(inp, probs):
        result: Permuted = _permute_apply(inp, probs, routing_map, rows, align, index)
    elif is_quantized(inp):
        result = _permuted(inp, routing_map, probs, rows, align, index)[:5]
    else:
        result = native.moe_permute(inp, routing_map, probs, rows, align, index, False)[:5]
    if _config.DEBUG and not index:  # an index map may leave rows out on purpose
        _raise_on_drops(inp, rows, dropped)
    return result


def permute_exact(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    align: int,
    counts: torch.Tensor | None = None,
) -> Permuted:
    """Permute into the exact number of rows: one synchronisation, after the map.

    Under ``torch.compile`` the number comes from `counts`, by default the counts of the routing map, and
    ``pad_offsets`` is never None.
    """
    inp = as_read(inp)
    if is_watched(inp):
        if counts is None:
            counts = (routing_map != 0).sum(0)
        if align > 0:
            counts = (counts + (align - 1)) // align * align
        rows = int(counts.sum().item())
        torch._check(rows >= 0)
        return compiled.permute(inp, probs, routing_map, rows, align, False)
    row_id_map, pad_offsets, padded, ends, totals = native.moe_map(routing_map, align, False)
    rows, routed = totals.tolist()
    if align > 0 and rows == routed:
        pad_offsets = None
    if _wants_grad(inp, probs):
        row_id_map._te_fast_ends = (ends, row_id_map._version)
        out, permuted_probs = _apply_apply(inp, probs, row_id_map, pad_offsets, ends, rows)
    else:
        out, permuted_probs = _applied(inp, probs, row_id_map, pad_offsets, ends, rows, 0)
    return out, permuted_probs, row_id_map, pad_offsets, padded


def permute_cast(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    rows: int,
    align: int,
    cast: tuple[bool, torch.Tensor | None, torch.Tensor | None, float, bool],
) -> Any:
    """Permute into FP8 rows."""
    inp = as_read(inp)
    if is_watched(inp):
        return compiled.permute_cast(inp, probs, routing_map, rows, align, cast)
    dropped = _dropped_so_far(inp) if _config.DEBUG else 0
    result = native.moe_permute_cast(inp, routing_map, probs, rows, align, cast)
    if _config.DEBUG:
        _raise_on_drops(inp, rows, dropped)
    return result


def unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    tokens: int,
    top_k: int,
) -> torch.Tensor:
    """Merge rows back; ``top_k`` is 0 for a mask map."""
    if isinstance(inp, QuantizedTensorStorage):
        inp = inp.dequantize()
    if is_watched(inp):
        return compiled.unpermute(inp, row_id_map, probs, pad_offsets, tokens, top_k)
    if _wants_grad(inp, probs):
        out: torch.Tensor = _unpermute_apply(inp, probs, row_id_map, pad_offsets, tokens, top_k)
        return out
    out, _ = native.moe_unpermute(inp, row_id_map, probs, pad_offsets, None, tokens, top_k)
    return out


def move_rows(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    splits: Any,
    index: torch.Tensor | None,
    mode: int,
    align: int,
    rows: int,
) -> Any:
    """Move rows in segments: rows, probabilities and, for padding by a tensor, the padded splits."""
    inp = as_read(inp)
    if rows < 0:
        msg = f"{_MOVES[mode]}: num_out_tokens must not be negative, got {rows}"
        raise ShapeError(msg)
    if is_watched(inp):
        return compiled.move(inp, probs, splits, index, mode, align, rows)
    if _wants_grad(inp, probs):
        return _move_apply(inp, probs, splits, index, mode, align, rows)
    return _moved(inp, probs, splits, index, mode, align, rows)


def _padded_splits(
    splits: list[int], mode: int, align: int, in_rows: int
) -> tuple[int | None, list[int]]:
    """Trace the native ``moe_padded_splits``."""
    padded = [-(-rows // align) * align for rows in splits]
    taken, made = (splits, padded) if mode == PAD else (padded, splits)
    if sum(taken) > in_rows or any(rows < 0 for rows in splits):
        msg = f"{_MOVES[mode]}: m_splits must take at most the {in_rows} rows of inp, got {splits}"
        raise ShapeError(msg)
    return None if padded == splits else sum(made), padded


def move_by_list(
    inp: torch.Tensor, splits: list[int], mode: int, align: int, rows: int | None
) -> tuple[Any, Any]:
    """Pad or unpad by a list: rows, None for those of `inp`, and the padded splits (padding alone).

    Without `rows` the list gives the number.
    """
    inp = as_read(inp)
    traced = is_watched(inp)
    if rows is None and not traced and not _wants_grad(inp, None) and not is_quantized(inp):
        out, padded = native.moe_pad_list(inp, splits, mode, align)
        return out, padded
    split = _padded_splits if traced else native.moe_padded_splits
    needed, padded = split(splits, mode, align, inp.size(0))
    if rows is None:
        if needed is None:
            return None, padded
        rows = needed
    return move_rows(inp, None, splits, None, mode, align, rows)[0], padded


def sort_chunks(
    inp: torch.Tensor, probs: torch.Tensor | None, splits: torch.Tensor, index: torch.Tensor
) -> Any:
    """Reorder chunks of rows."""
    return move_rows(inp, probs, splits, index, SORT, 1, inp.size(0))[:2]


def dropped_rows(device: torch.device, *, reset: bool) -> int:
    """Count of dropped rows of a device."""
    return int(native.moe_dropped(torch.empty(1, device=device), reset).item())


def _dropped_so_far(inp: torch.Tensor) -> int:
    return int(native.moe_dropped(inp, False).item())


def _raise_on_drops(inp: torch.Tensor, rows: int, before: int) -> None:
    dropped = _dropped_so_far(inp) - before
    if dropped:
        msg = (
            f"moe_permute: {dropped} routed rows did not fit into num_out_tokens = {rows}; "
            "give a larger capacity, or unset TE_FAST_DEBUG to drop them"
        )
        raise StateError(msg)
