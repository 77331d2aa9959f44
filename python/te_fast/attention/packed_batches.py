"""Batches of packed sequences (``thd``): padded lengths, positions, and the share of a rank in the tokens."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.attention.packed_shares import places_of_ranks
from te_fast.errors import ArgumentError, DtypeError, ShapeError
from te_fast.runtime.arguments import check_sizes, check_tensors
from te_fast.runtime.collectives import get_distributed_rank, get_distributed_world_size


def _lengths(op: str, cu_seqlens: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lengths of sequences, and where they begin, and the last one ends, if they are padded."""
    check_tensors(op, cu_seqlens=cu_seqlens)
    check_sizes(op, divisibility_factor=factor)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        message = f"{op}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}"
        raise DtypeError(message)
    if factor == 0:
        message = f"{op}: divisibility_factor must be at least 1, got 0"
        raise ShapeError(message)
    lengths = cu_seqlens.diff() if cu_seqlens.dim() == 1 else cu_seqlens
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0 or bool((lengths < 0).any()):
        message = f"{op}: cu_seqlens must be (sequences + 1,) and never decrease, got {cu_seqlens.tolist()}"
        raise ShapeError(message)
    padded = (lengths + factor - 1) // factor * factor
    return lengths, torch.nn.functional.pad(padded.cumsum(0), (1, 0))


def _within(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequence of each token, and its position there."""
    sequence = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    begin = lengths.cumsum(0) - lengths
    return sequence, torch.arange(sequence.numel(), device=lengths.device) - begin[sequence]


def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad each of several packed sequences to a multiple of a length.

    Parameters
    ----------
    input_ids, labels : torch.Tensor
        ``(tokens,)`` or ``(1, tokens)``.
    cu_seqlens : torch.Tensor
        Integers ``(sequences + 1,)``: where sequences begin, and the end.
    divisibility_factor : int
        Padded lengths are multiples of it. Ranks that share sequences need ``2 * cp_size``.
    padding_token_id, padding_label_id : int
        Values of the padding.

    Returns
    -------
    tuple of torch.Tensor
        Padded ``input_ids`` and ``labels``, both ``(tokens,)``, and INT64 ``cu_seqlens`` of the padded sequences.

    Raises
    ------
    DtypeError
        If an argument is no tensor, or `cu_seqlens` is not of integers.
    ShapeError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.attention.dot_product_attention import context_parallel
    >>> tokens, ends = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5])
    >>> context_parallel.pad_thd_sequences_for_cp(tokens, tokens, ends, 4)[0]
    tensor([1, 2, 0, 0, 3, 4, 5, 0])
    """
    op = "pad_thd_sequences_for_cp"
    lengths, ends = _lengths(op, cu_seqlens, divisibility_factor)
    sequence, within = _within(lengths)
    source, target = cu_seqlens[sequence] + within, ends[sequence] + within

    def padded(name: str, tensor: torch.Tensor, value: int) -> torch.Tensor:
        check_tensors(op, **{name: tensor})
        flat = tensor.squeeze(0) if tensor.dim() == 2 else tensor
        if flat.dim() != 1 or flat.numel() < int(cu_seqlens[-1]):
            message = (
                f"{op}: {name} must be (tokens,) or (1, tokens) with the {int(cu_seqlens[-1])} tokens of cu_seqlens, "
                f"got {list(tensor.shape)}"
            )
            raise ShapeError(message)
        made = flat.new_full((int(ends[-1]),), value)
        made[target.to(flat.device)] = flat[source.to(flat.device)]
        return made

    return (
        padded("input_ids", input_ids, padding_token_id),
        padded("labels", labels, padding_label_id),
        ends,
    )


def generate_positional_ids_for_cp(
    cu_seqlens: torch.Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """Return positions within packed sequences that are padded to a multiple of a length.

    Parameters
    ----------
    cu_seqlens : torch.Tensor
        Integers ``(sequences + 1,)``: where sequences begin without padding, and the end.
    divisibility_factor : int
        Padded lengths are multiples of it.
    dtype : torch.dtype, default = torch.long
        Type of the positions.

    Returns
    -------
    torch.Tensor
        ``(tokens,)``; padding goes on counting.

    Raises
    ------
    DtypeError
        If `cu_seqlens` is no tensor of integers.
    ShapeError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.attention.dot_product_attention import context_parallel
    >>> context_parallel.generate_positional_ids_for_cp(torch.tensor([0, 2, 5]), 4)
    tensor([0, 1, 2, 3, 0, 1, 2, 3])
    """
    _, ends = _lengths("generate_positional_ids_for_cp", cu_seqlens, divisibility_factor)
    return _within(ends.diff())[1].to(dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: torch.Tensor,
    input_ids_padded: torch.Tensor | None,
    labels_padded: torch.Tensor | None,
    position_ids_padded: torch.Tensor | None,
    cp_group: Any = None,
    qvk_format: str = "thd",
) -> tuple[torch.Tensor | None, ...]:
    """Return this rank's share of packed sequences under context parallelism.

    Each sequence has two chunks for each rank; a rank has one from the beginning and one from the end, so that all
    ranks have equal work under a causal mask.

    Parameters
    ----------
    cu_seqlens_padded : torch.Tensor
        Integers ``(sequences + 1,)``. Lengths are multiples of ``2 * cp_size``.
    input_ids_padded, labels_padded, position_ids_padded : torch.Tensor, optional
        ``(tokens, ...)`` or ``(batch, tokens, ...)``.
    cp_group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.
    qvk_format : {'thd'}, default = 'thd'
        The layout.

    Returns
    -------
    tuple of torch.Tensor
        The shares, in the order of the arguments; on one rank the arguments themselves.

    Raises
    ------
    ArgumentError
        For another layout.
    DtypeError
        If an argument is no tensor, or `cu_seqlens_padded` is not of integers.
    ShapeError
        If shapes do not fit.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.attention.dot_product_attention import context_parallel
    >>> tokens = torch.arange(8)
    >>> context_parallel.get_batch_on_this_cp_rank(torch.tensor([0, 8]), tokens, tokens, None)[0]
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    op = "get_batch_on_this_cp_rank"
    if qvk_format != "thd":
        message = f"{op}: qvk_format must be 'thd', got {qvk_format!r}"
        raise ArgumentError(message)
    given = {
        "input_ids_padded": input_ids_padded,
        "labels_padded": labels_padded,
        "position_ids_padded": position_ids_padded,
    }
    ranks = get_distributed_world_size(cp_group)
    if ranks == 1:
        return tuple(given.values())
    lengths, ends = _lengths(op, cu_seqlens_padded, 2 * ranks)
    if not torch.equal(ends.diff(), lengths):
        message = (
            f"{op}: the lengths of sequences must be multiples of {2 * ranks} for {ranks} ranks, got "
            f"{lengths.tolist()}; pad them by pad_thd_sequences_for_cp"
        )
        raise ShapeError(message)
    places = places_of_ranks(ends // ranks, int(ends[-1]) // ranks, ranks)
    tokens = cu_seqlens_padded[0] + places[get_distributed_rank(cp_group)]
    total = int(cu_seqlens_padded[-1])

    def share(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        check_tensors(op, **{name: tensor})
        dim = next((dim for dim in (1, 0) if tensor.shape[dim : dim + 1] == (total,)), None)
        if dim is None:
            message = (
                f"{op}: {name} must have the {total} tokens of cu_seqlens_padded along its first or second dimension, "
                f"got {list(tensor.shape)}"
            )
            raise ShapeError(message)
        return tensor.index_select(dim, tokens.to(tensor.device))

    return tuple(share(name, tensor) for name, tensor in given.items())
