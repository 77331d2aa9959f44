"""MoE permutation: moves tokens to their experts and back, by Transformer Engine's functions and sync-free forms.

Every function runs one or two kernels of te_fast. If the caller gives the number of output rows, no function
synchronises the device. Buffers larger than needed end in zero rows. The last rows are dropped if they do not fit: they
are left out of the row map and counted (:func:`moe_dropped_rows`). CPU tensors run on the host kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_fast.errors import DtypeError, ShapeError, TeFastError
from te_fast.moe import arguments
from te_fast.moe import kernels as impl

if TYPE_CHECKING:
    from collections.abc import Sequence


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy every token's row to each of its experts, ordered by expert, then by token.

    Parameters
    ----------
    inp : torch.Tensor
        Rows ``(tokens, hidden)`` in FP32, FP16 or BF16.
    routing_map : torch.Tensor
        For ``map_type='mask'`` ``(tokens, experts)``, bool or an integer type of 8, 32 or 64 bits: nonzero
        routes the token. For ``'index'`` ``(tokens, top_k)`` int32: expert ids, up to 1023, others go nowhere.
    num_out_tokens : int, default = -1
        Rows of the result. With a mask, -1 and None count them, which synchronises once; with an index,
        None, 0 and less mean ``tokens * top_k``. Rows that do not fit are dropped and not in ``row_id_map``.
    max_token_num : int, default = -1
        Transformer Engine's hint for a workspace that te_fast does not need.
    map_type : str, default = 'mask'
        Kind of ``routing_map``: ``'mask'`` or ``'index'``.

    Returns
    -------
    tuple of torch.Tensor
        Rows ``(num_out_tokens, hidden)`` and ``row_id_map``, int32 in Transformer Engine's layout:
        ``(tokens, 2 * experts + 1)`` for a mask, ``(top_k * tokens,)`` for an index.

    See Also
    --------
    moe_unpermute : The way back.
    moe_permute_with_probs : With probabilities.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> tokens = torch.arange(6.0).reshape(3, 2)

    >>> experts = torch.tensor([[1], [0], [1]], dtype=torch.int32)
    >>> rows, row_id_map = te.moe_permute(tokens, experts, map_type="index")
    >>> rows.tolist()
    [[2.0, 3.0], [0.0, 1.0], [4.0, 5.0]]
    """
    try:
        del max_token_num
        index = arguments.is_index(map_type, "moe_permute")
        if not inp.numel():
            return inp, arguments.empty_map(inp, routing_map, index=index)
        if num_out_tokens is None:
            num_out_tokens = -1
        if index:
            routing_map = arguments.as_int32(routing_map, "index", "Permute")
            rows = num_out_tokens if num_out_tokens > 0 else routing_map.numel()
        else:
            rows = num_out_tokens
        out, _, row_id_map, _, _ = impl.permute(inp, None, routing_map, rows, 0, index=index)
        return out, row_id_map
    except (AttributeError, TypeError, TeFastError) as error:
        raise arguments.blame(moe_permute.__name__, error, locals(), ("num_out_tokens",)) from None


def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Permute rows and probabilities by a routing mask.

    A routed slot whose probability is exactly 0 becomes a zero row.

    Parameters
    ----------
    inp : torch.Tensor
        Rows ``(tokens, hidden)`` in FP32, FP16 or BF16.
    probs : torch.Tensor
        Probabilities ``(tokens, experts)`` in FP32, FP16, BF16 or FP64.
    routing_map : torch.Tensor
        Mask ``(tokens, experts)``, bool or an integer type of 8, 32 or 64 bits.
    num_out_tokens : int, default = -1
        Rows of the result; -1 and None count them, which synchronises once.

    Returns
    -------
    tuple of torch.Tensor
        Rows ``(num_out_tokens, hidden)``, their probabilities ``(num_out_tokens,)``, ``row_id_map``.

    See Also
    --------
    moe_permute_and_pad_with_probs : With padding.
    moe_unpermute : The way back.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> routing = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=torch.int32)
    >>> probs = routing * 0.5
    >>> rows, row_probs, row_id_map = te.moe_permute_with_probs(torch.ones(3, 8), probs, routing, num_out_tokens=4)
    >>> rows.shape, row_probs
    (torch.Size([4, 8]), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    try:
        if not inp.numel():
            # The sums keep both in the graph, with empty gradients.
            return (
                inp + probs[:0].sum().to(inp.dtype),
                probs.sum(dim=1),
                arguments.empty_map(inp, routing_map),
            )
        if num_out_tokens is None:
            num_out_tokens = -1
        out, permuted_probs, row_id_map, _, _ = impl.permute(
            inp, probs, routing_map, num_out_tokens, 0, index=False
        )
        return out, permuted_probs, row_id_map
    except (AttributeError, TypeError, TeFastError) as error:
        raise arguments.blame(
            moe_permute_with_probs.__name__, error, locals(), ("num_out_tokens",)
        ) from None


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor | Sequence[int] | None,
    align_size: int,
    *,
    num_out_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Permute rows and probabilities and pad every expert's rows to a multiple of ``align_size``.

    Parameters
    ----------
    inp : torch.Tensor
        Rows ``(tokens, hidden)`` in FP32, FP16 or BF16.
    probs : torch.Tensor
        Probabilities ``(tokens, experts)`` in FP32, FP16, BF16 or FP64.
    routing_map : torch.Tensor
        Mask ``(tokens, experts)``, bool or an integer type of 8, 32 or 64 bits.
    tokens_per_expert : torch.Tensor or sequence of int
        Tokens that each expert takes, ``(experts,)``. A list or a tensor on the CPU gives the size of the result
        without a synchronisation. A tensor on the GPU costs one, unless ``num_out_tokens`` is given.
    align_size : int
        Rows per expert are padded with zero rows to a multiple of this.
    num_out_tokens : int, optional
        Capacity: rows of the result, the rest of which is zero. Then the call does not synchronise, ``pad_offsets`` is
        never None, and ``tokens_per_expert`` may be None. ``num_tokens * top_k + experts * (align_size - 1)`` is always
        enough.

    Returns
    -------
    tuple
        Rows, probabilities, ``row_id_map``, ``pad_offsets`` (int64 ``(experts,)``, None where nothing is
        padded) and the padded tokens per expert (int64 ``(experts,)``).

    See Also
    --------
    moe_permute_with_probs : Without padding.
    moe_unpermute : The way back, which takes the offsets.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> routing = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=torch.int32)
    >>> probs = routing * 0.5
    >>> rows, _, row_id_map, pad_offsets, padded = te.moe_permute_and_pad_with_probs(
    ...     torch.ones(3, 8), probs, routing, [2, 2], 16
    ... )
    >>> rows.shape, padded
    (torch.Size([32, 8]), tensor([16, 16]))
    """
    try:
        if not 0 < align_size < 2**31:
            msg = (
                "moe_permute_and_pad_with_probs: align_size must be positive and below 2**31, got "
                f"{align_size}"
            )
            raise ShapeError(msg)
        if num_out_tokens is not None:
            return impl.permute(inp, probs, routing_map, num_out_tokens, align_size, index=False)
        if tokens_per_expert is None:
            msg = (
                "moe_permute_and_pad_with_probs: tokens_per_expert must be given, got None; "
                "or give num_out_tokens, a capacity in rows"
            )
            raise ShapeError(msg)
        arguments.check_counts(tokens_per_expert, routing_map)
        if isinstance(tokens_per_expert, torch.Tensor):
            if tokens_per_expert.device.type != "cpu":
                return impl.permute_exact(inp, probs, routing_map, align_size)
            if torch.compiler.is_compiling():
                return impl.permute_exact(inp, probs, routing_map, align_size, tokens_per_expert)
            counts = tokens_per_expert.tolist()
        else:
            counts = list(tokens_per_expert)
        rows = sum(-(-count // align_size) * align_size for count in counts)
        out, permuted_probs, row_id_map, pad_offsets, padded = impl.permute(
            inp, probs, routing_map, rows, align_size, index=False
        )
        return out, permuted_probs, row_id_map, pad_offsets if rows != sum(counts) else None, padded
    except (AttributeError, TypeError, TeFastError) as error:
        raise arguments.blame(
            moe_permute_and_pad_with_probs.__name__,
            error,
            locals(),
            ("tokens_per_expert", "num_out_tokens"),
        ) from None


def moe_permute_and_quantize(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    num_out_tokens: int,
    *,
    align_size: int = 0,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    amax_epsilon: float = 0.0,
    power_2_scale: bool = True,
) -> tuple[
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
]:
    """Permute (and pad) straight into FP8 rows; every token is quantised once.

    The result has the bits that quantising the permuted rows would give. It has no gradient: use it
    where a layer keeps the FP8 rows itself.

    Parameters
    ----------
    inp : torch.Tensor
        Rows ``(tokens, hidden)`` in FP32, FP16 or BF16; ``hidden`` a multiple of 16.
    probs : torch.Tensor or None
        Probabilities ``(tokens, experts)``, which are permuted, too; slots of probability 0 become zero rows.
    routing_map : torch.Tensor
        Mask ``(tokens, experts)``, bool or an integer type of 8, 32 or 64 bits.
    num_out_tokens : int
        Capacity: rows of the result.
    align_size : int, default = 0
        Rows per expert are padded to a multiple of this; 0 pads nothing.
    fp8_dtype : torch.dtype, default = torch.float8_e4m3fn
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    scale : torch.Tensor, optional
        One FP32 element: per-tensor scaling with this scale. Without it every 128 elements of a row
        have a scale of their own, FP8 maximum over their amax.
    amax : torch.Tensor, optional
        One FP32 element that is raised to the amax of the rows written; only together with ``scale``.
    amax_epsilon : float, default = 0.0
        Smallest amax of a block.
    power_2_scale : bool, default = True
        Round block scales down to powers of two.

    Returns
    -------
    tuple
        FP8 rows ``(num_out_tokens, hidden)``; inverse scales FP32 ``(ceil(hidden / 128),
        num_out_tokens rounded up to 4)``, as block-scaled GEMMs read them, or None per tensor; permuted
        probabilities or None; ``row_id_map``; ``pad_offsets`` and padded tokens per expert, None
        without padding.

    See Also
    --------
    moe_permute_and_pad_with_probs : Without the cast.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> routing = torch.tensor([[1, 0], [1, 1], [0, 1]], dtype=torch.int32)
    >>> rows, scale_inv, *_ = te.moe_permute_and_quantize(
    ...     torch.ones(3, 128), None, routing, 4, scale=torch.ones(1), amax=torch.zeros(1)
    ... )
    >>> rows.shape, rows.dtype
    (torch.Size([4, 128]), torch.float8_e4m3fn)
    """
    try:
        if fp8_dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            msg = (
                "moe_permute_and_quantize: fp8_dtype must be torch.float8_e4m3fn or torch.float8_e5m2, "
                f"got {fp8_dtype}"
            )
            raise DtypeError(msg)
        if num_out_tokens < 0 or align_size < 0:
            msg = (
                "moe_permute_and_quantize: num_out_tokens and align_size must not be negative, "
                f"got {num_out_tokens} and {align_size}"
            )
            raise ShapeError(msg)
        if amax is not None and scale is None:
            msg = (
                "moe_permute_and_quantize: amax is collected per tensor; give scale too, or no amax"
            )
            raise ShapeError(msg)
        cast = (fp8_dtype == torch.float8_e5m2, scale, amax, amax_epsilon, power_2_scale)
        return impl.permute_cast(inp, probs, routing_map, num_out_tokens, align_size, cast)
    except (AttributeError, TypeError, TeFastError) as error:
        raise arguments.blame(
            moe_permute_and_quantize.__name__, error, locals(), ("probs", "scale", "amax")
        ) from None


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bring permuted rows back to their tokens and sum them, weighted by ``merging_probs`` if given.

    Parameters
    ----------
    inp : torch.Tensor
        Permuted rows ``(rows, hidden)``.
    row_id_map : torch.Tensor
        Second result of the permutation.
    merging_probs : torch.Tensor, optional
        Weights: ``(tokens, experts)`` for a mask, ``(tokens, top_k)`` FP32 for an index. Sums are FP32.
    restore_shape : torch.Size, optional
        Shape of the result, ``(tokens, hidden)``; by default the number of tokens comes from the map.
    map_type : str, default = 'mask'
        As for the permutation.
    probs : torch.Tensor, optional
        Deprecated name of ``merging_probs``.
    pad_offsets : torch.Tensor, optional
        Fourth result of :func:`moe_permute_and_pad_with_probs`.

    Returns
    -------
    torch.Tensor
        Rows ``(tokens, hidden)``. An empty ``inp`` gives zeros of ``restore_shape`` that are part of the autograd
        graph.

    See Also
    --------
    moe_permute : What it takes back.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> tokens = torch.arange(6.0).reshape(3, 2)

    >>> experts = torch.tensor([[1], [0], [1]], dtype=torch.int32)
    >>> rows, row_id_map = te.moe_permute(tokens, experts, map_type="index")
    >>> te.moe_unpermute(rows, row_id_map, map_type="index").tolist() == tokens.tolist()
    True
    """
    try:
        if probs is not None:
            if merging_probs is not None:
                msg = "moe_unpermute: give merging_probs or probs, not both; probs is the deprecated name"
                raise ShapeError(msg)
            arguments.warn("probs kwarg is deprecated. Use merging_probs kwarg instead.")
            merging_probs = probs
        index = arguments.is_index(map_type, "moe_unpermute")
        if inp.dim() != 2:
            arguments.refuse_rank("moe_unpermute", "inp", inp, 2)
        if restore_shape is not None and (
            len(restore_shape) != 2 or restore_shape[0] < 0 or restore_shape[1] != inp.size(1)
        ):
            msg = (
                f"moe_unpermute: restore_shape must be (tokens, {inp.size(1)}), the hidden size of inp, "
                f"got {tuple(restore_shape)}"
            )
            raise ShapeError(msg)
        top_k = 0
        if index:
            row_id_map = arguments.as_int32(row_id_map, "row_id_map", "Unpermute")
            top_k = 1
            if merging_probs is not None:
                if merging_probs.dim() != 2:
                    arguments.refuse_rank("moe_unpermute", "merging_probs", merging_probs, 2)
                top_k = merging_probs.size(1)
                if merging_probs.dtype != torch.float32:
                    arguments.warn(
                        arguments.recommends(
                            "probs", merging_probs.dtype, "Unpermute", torch.float32
                        )
                    )
                    merging_probs = merging_probs.to(torch.float32)
            tokens = row_id_map.numel() // max(top_k, 1)
        else:
            tokens = (row_id_map.shape if restore_shape is None else restore_shape)[0]
        if not inp.numel():
            return arguments.nothing_to_merge(
                inp, merging_probs, restore_shape or (tokens, inp.size(1))
            )
        return impl.unpermute(inp, row_id_map, merging_probs, pad_offsets, tokens, top_k)
    except (AttributeError, TypeError, TeFastError) as error:
        raise arguments.blame(
            moe_unpermute.__name__,
            error,
            locals(),
            ("merging_probs", "restore_shape", "probs", "pad_offsets"),
        ) from None


def moe_sort_chunks_by_index(
    inp: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> torch.Tensor:
    """Reorder chunks of rows: chunk ``sorted_index[j]`` comes j-th, and rows after all chunks stay in place.

    Parameters
    ----------
    inp : torch.Tensor
        Rows ``(rows, hidden)``.
    split_sizes : torch.Tensor
        Rows of every chunk, ``(chunks,)`` int32 or int64; up to 4096 chunks.
    sorted_index : torch.Tensor
        A permutation of the chunks, ``(chunks,)`` int32 or int64.

    Returns
    -------
    torch.Tensor
        Rows of the same shape.

    See Also
    --------
    moe_sort_chunks_by_index_with_probs : With probabilities.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> x = torch.arange(6.0).view(3, 2)
    >>> te.moe_sort_chunks_by_index(x, torch.tensor([1, 2]), torch.tensor([1, 0]))
    tensor([[2., 3.],
            [4., 5.],
            [0., 1.]])
    """
    try:
        if not inp.numel():
            return inp
        out, _ = impl.sort_chunks(inp, None, *arguments.on_device(inp, split_sizes, sorted_index))
        return out
    except (AttributeError, TypeError, TeFastError) as error:
        raise arguments.blame(moe_sort_chunks_by_index.__name__, error, locals()) from None


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reorder chunks of rows and of their probabilities ``(rows,)``.

    Parameters
    ----------
    inp : torch.Tensor
        Rows ``(rows, hidden)``.
    probs : torch.Tensor
        One value per row, ``(rows,)``, in FP32, FP16, BF16 or FP64.
    split_sizes : torch.Tensor
        Rows of every chunk, ``(chunks,)`` int32 or int64; up to 4096 chunks.
    sorted_index : torch.Tensor
        A permutation of the chunks, ``(chunks,)`` int32 or int64.

    Returns
    -------
    tuple of torch.Tensor
        Rows and probabilities, of the same shapes.

    See Also
    --------
    moe_sort_chunks_by_index : Without probabilities.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> x, probs = torch.arange(6.0).view(3, 2), torch.tensor([0.1, 0.2, 0.3])
    >>> te.moe_sort_chunks_by_index_with_probs(x, probs, torch.tensor([1, 2]), torch.tensor([1, 0]))[1]
    tensor([0.2000, 0.3000, 0.1000])
    """
    try:
        if not inp.numel():
            return inp, probs
        return impl.sort_chunks(inp, probs, *arguments.on_device(inp, split_sizes, sorted_index))
    except (AttributeError, TypeError, TeFastError) as error:
        raise arguments.blame(
            moe_sort_chunks_by_index_with_probs.__name__, error, locals()
        ) from None


def moe_dropped_rows(device: torch.device | str | None = None, *, reset: bool = False) -> int:
    """Count rows that did not fit into the buffers of permutations since the start or the last reset.

    Reading the count synchronises. With ``TE_FAST_DEBUG=1`` every permutation reads it and raises.

    Parameters
    ----------
    device : torch.device or str, optional
        The device; by default the current CUDA device, or the CPU without one.
    reset : bool, default = False
        Start the count again.

    Returns
    -------
    int
        Routed rows that were dropped.

    See Also
    --------
    te_fast.pytorch.moe_permute_with_probs : A permutation whose buffer may be too small.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.permutation import moe_dropped_rows
    >>> before = moe_dropped_rows("cpu", reset=True)
    >>> routing = torch.ones(4, 2, dtype=torch.int32)
    >>> rows = te.moe_permute(torch.ones(4, 16), routing, num_out_tokens=6, map_type="mask")
    >>> moe_dropped_rows("cpu", reset=True)
    2
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return impl.dropped_rows(torch.device(device), reset=reset)
