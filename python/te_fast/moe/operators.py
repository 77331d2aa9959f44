"""MoE permutation as operators of ``torch.library``, for ``torch.compile``.

An operator returns tensors alone, so an absent one is an empty tensor here and None to the caller.
"""

from __future__ import annotations

from typing import Any

import torch

from te_fast.runtime import native
from te_fast.runtime.library import register, register_gradient

_Optional = torch.Tensor | None


def _present(tensor: Any, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _fake_pads(inp: torch.Tensor, routing_map: torch.Tensor, align: int) -> list[torch.Tensor]:
    """Make ``pad_offsets`` and the padded tokens per expert, empty without padding."""
    experts = routing_map.size(1)
    return [
        inp.new_empty((experts,), dtype=torch.int64) if align > 0 else inp.new_empty(0)
        for _ in range(2)
    ]


def _map_size(routing_map: torch.Tensor, index: bool) -> tuple[Any, ...]:
    tokens, columns = routing_map.shape
    return (tokens * columns,) if index else (tokens, 2 * columns + 1)


def _permute_run(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    rows: int,
    align: int,
    index: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out, out_probs, row_id_map, pads, counts, *_ = native.moe_permute(
        inp, routing_map, probs, rows, align, index, False
    )
    return out, _present(out_probs, inp), row_id_map, _present(pads, inp), _present(counts, inp)


def _permute_fake(
    inp: torch.Tensor,
    probs: _Optional,
    routing_map: torch.Tensor,
    rows: int,
    align: int,
    index: bool,
) -> Any:
    return (
        inp.new_empty((rows, inp.size(1))),
        inp.new_empty(0) if probs is None else probs.new_empty((rows,)),
        inp.new_empty(_map_size(routing_map, index), dtype=torch.int32),
        *_fake_pads(inp, routing_map, align),
    )


_permute = register(
    "moe_permute(Tensor inp, Tensor? probs, Tensor routing_map, SymInt rows, SymInt align, bool index) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _permute_run,
    _permute_fake,
)


def _unpermute_run(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    in_probs: torch.Tensor | None,
    tokens: int,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, out_probs = native.moe_unpermute(
        inp, row_id_map, probs, pad_offsets, in_probs, tokens, top_k
    )
    return out, _present(out_probs, inp)


def _unpermute_fake(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: _Optional,
    pad_offsets: _Optional,
    in_probs: _Optional,
    tokens: int,
    top_k: int,
) -> Any:
    del probs, pad_offsets
    slots = top_k if top_k else (row_id_map.size(1) - 1) // 2
    out_probs = inp.new_empty(0) if in_probs is None else in_probs.new_empty((tokens, slots))
    return inp.new_empty((tokens, inp.size(1))), out_probs


_unpermute = register(
    "moe_unpermute(Tensor inp, Tensor row_id_map, Tensor? probs, Tensor? pad_offsets, Tensor? in_probs, "
    "SymInt tokens, SymInt top_k) -> (Tensor, Tensor)",
    _unpermute_run,
    _unpermute_fake,
)


def _unpermute_bwd_run(
    dout: torch.Tensor,
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor,
    pad_offsets: torch.Tensor | None,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return native.moe_unpermute_backward(dout, inp, row_id_map, probs, pad_offsets, None, top_k)


def _unpermute_bwd_fake(
    dout: torch.Tensor,
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor,
    pad_offsets: _Optional,
    top_k: int,
) -> Any:
    del dout, row_id_map, pad_offsets, top_k
    return inp.new_empty(inp.shape), probs.new_empty(probs.shape)


_unpermute_bwd = register(
    "moe_unpermute_bwd(Tensor dout, Tensor inp, Tensor row_id_map, Tensor probs, Tensor? pad_offsets, "
    "SymInt top_k) -> (Tensor, Tensor)",
    _unpermute_bwd_run,
    _unpermute_bwd_fake,
)


def _apply_run(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    pad_offsets: torch.Tensor | None,
    rows: int,
    top_k: int,
) -> torch.Tensor:
    out, *_ = native.moe_apply(inp, None, row_id_map, pad_offsets, None, rows, top_k)
    return out


def _apply_fake(
    inp: torch.Tensor, row_id_map: torch.Tensor, pad_offsets: _Optional, rows: int, top_k: int
) -> torch.Tensor:
    del row_id_map, pad_offsets, top_k
    return inp.new_empty((rows, inp.size(1)))


_apply = register(
    "moe_apply(Tensor inp, Tensor row_id_map, Tensor? pad_offsets, SymInt rows, SymInt top_k) -> Tensor",
    _apply_run,
    _apply_fake,
)


def _move_run(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    splits: torch.Tensor | None,
    values: list[int],
    index: torch.Tensor | None,
    mode: int,
    align: int,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, out_probs, padded = native.moe_pad(
        inp, probs, values if splits is None else splits, index, mode, align, rows
    )
    return out, _present(out_probs, inp), _present(padded, inp)


def _move_fake(
    inp: torch.Tensor,
    probs: _Optional,
    splits: _Optional,
    values: list[int],
    index: _Optional,
    mode: int,
    align: int,
    rows: int,
) -> Any:
    del values, index, align
    out_probs = inp.new_empty(0) if probs is None else probs.new_empty((rows,))
    padded = inp.new_empty(0) if splits is None or mode != 0 else splits.new_empty(splits.shape)
    return inp.new_empty((rows, inp.size(1))), out_probs, padded


_move = register(
    "moe_move(Tensor inp, Tensor? probs, Tensor? splits, SymInt[] values, Tensor? index, SymInt mode, SymInt align, "
    "SymInt rows) -> (Tensor, Tensor, Tensor)",
    _move_run,
    _move_fake,
)


def _permute_cast_run(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    rows: int,
    align: int,
    *cast: Any,
) -> Any:
    out, scales, out_probs, row_id_map, pads, counts = native.moe_permute_cast(
        inp, routing_map, probs, rows, align, cast
    )
    rest = [_present(tensor, inp) for tensor in (pads, counts)]
    return out, _present(scales, inp), _present(out_probs, inp), row_id_map, rest[0], rest[1]


def _permute_cast_fake(
    inp: torch.Tensor,
    probs: _Optional,
    routing_map: torch.Tensor,
    rows: int,
    align: int,
    e5m2: bool,
    scale: _Optional,
    *_: Any,
) -> Any:
    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    blocks, ld = (inp.size(1) + 127) // 128, (rows + 3) // 4 * 4
    return (
        inp.new_empty((rows, inp.size(1)), dtype=dtype),
        inp.new_empty((blocks, ld), dtype=torch.float32) if scale is None else inp.new_empty(0),
        inp.new_empty(0) if probs is None else probs.new_empty((rows,)),
        inp.new_empty(_map_size(routing_map, False), dtype=torch.int32),
        *_fake_pads(inp, routing_map, align),
    )


_permute_cast = register(
    "moe_permute_cast(Tensor inp, Tensor? probs, Tensor routing_map, SymInt rows, SymInt align, bool e5m2, "
    "Tensor? scale, Tensor(a!)? amax, float eps, bool pow2) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _permute_cast_run,
    _permute_cast_fake,
)


# Gradients ------------------------------------------------------------------------------------------


def _permute_setup(ctx: Any, inputs: Any, output: Any) -> None:
    inp, probs, routing_map, _, align, index = inputs
    _, _, row_id_map, pads, _ = output
    ctx.save_for_backward(row_id_map, pads if align > 0 else None)
    ctx.with_probs = probs is not None
    ctx.tokens = inp.size(0)
    ctx.top_k = routing_map.size(1) if index else 0


def _permute_backward(ctx: Any, dout: Any, dprobs: Any, *_: Any) -> Any:
    row_id_map, pads = ctx.saved_tensors
    in_probs = dprobs if ctx.with_probs else None
    grad, probs_grad = _unpermute(dout, row_id_map, None, pads, in_probs, ctx.tokens, ctx.top_k)
    return grad, probs_grad if ctx.with_probs else None, None, None, None, None


register_gradient(_permute, _permute_setup, _permute_backward)


def _unpermute_setup(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    inp, row_id_map, probs, pads, _, _, top_k = inputs
    ctx.save_for_backward(None if probs is None else inp, row_id_map, probs, pads)
    ctx.rows = inp.size(0)
    ctx.top_k = top_k


def _unpermute_backward(ctx: Any, dout: Any, _: Any) -> Any:
    inp, row_id_map, probs, pads = ctx.saved_tensors
    probs_grad = None
    if probs is None:
        grad = _apply(dout, row_id_map, pads, ctx.rows, ctx.top_k)
    else:
        grad, probs_grad = _unpermute_bwd(dout, inp, row_id_map, probs, pads, ctx.top_k)
    return grad, None, probs_grad, None, None, None, None


register_gradient(_unpermute, _unpermute_setup, _unpermute_backward)


def _move_setup(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    inp, probs, splits, values, index, mode, align, _ = inputs
    ctx.save_for_backward(splits, index)
    ctx.values = values
    ctx.with_probs = probs is not None
    ctx.mode, ctx.align, ctx.rows = mode, align, inp.size(0)


def _move_backward(ctx: Any, dout: Any, dprobs: Any, _: Any) -> Any:
    splits, index = ctx.saved_tensors
    in_probs = dprobs if ctx.with_probs else None
    # PAD and UNPAD, SORT and UNSORT differ in the last bit.
    grad, probs_grad, _ = _move(
        dout, in_probs, splits, ctx.values, index, ctx.mode ^ 1, ctx.align, ctx.rows
    )
    return grad, probs_grad if ctx.with_probs else None, None, None, None, None, None, None


register_gradient(_move, _move_setup, _move_backward)


# Calls ----------------------------------------------------------------------------------------------


def permute(
    inp: torch.Tensor,
    probs: _Optional,
    routing_map: torch.Tensor,
    rows: int,
    align: int,
    index: bool,
) -> Any:
    """Trace :func:`te_fast.moe.kernels.permute`."""
    out, out_probs, row_id_map, pads, counts = _permute(inp, probs, routing_map, rows, align, index)
    padded = (pads, counts) if align > 0 else (None, None)
    return out, None if probs is None else out_probs, row_id_map, *padded


def unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: _Optional,
    pad_offsets: _Optional,
    tokens: int,
    top_k: int,
) -> torch.Tensor:
    """Trace :func:`te_fast.moe.kernels.unpermute`."""
    out, _ = _unpermute(inp, row_id_map, probs, pad_offsets, None, tokens, top_k)
    return out


def move(
    inp: torch.Tensor,
    probs: _Optional,
    splits: Any,
    index: _Optional,
    mode: int,
    align: int,
    rows: int,
) -> Any:
    """Trace :func:`te_fast.moe.kernels.move_rows`."""
    given = isinstance(splits, torch.Tensor)
    if given and splits.device != inp.device:
        splits = splits.to(inp.device)  # tensors of a traced operator have one device
    out, out_probs, padded = _move(
        inp,
        probs,
        splits if given else None,
        [] if given else list(splits),
        index,
        mode,
        align,
        rows,
    )
    return out, None if probs is None else out_probs, padded if given and mode == 0 else None


def permute_cast(
    inp: torch.Tensor, probs: _Optional, routing_map: torch.Tensor, rows: int, align: int, cast: Any
) -> Any:
    """Trace :func:`te_fast.moe.kernels.permute_cast`, which has no gradient."""
    probs = None if probs is None else probs.detach()
    out, scales, out_probs, row_id_map, pads, counts = _permute_cast(
        inp.detach(), probs, routing_map, rows, align, *cast
    )
    padded = (pads, counts) if align > 0 else (None, None)
    scales = None if cast[1] is not None else scales
    return out, scales, None if probs is None else out_probs, row_id_map, *padded
