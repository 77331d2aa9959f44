"""Packed sequences (``thd``) and their shares under context parallelism.

Each sequence has two halves, and a rank of `cp` ranks has one chunk of ``2 * cp`` from either. All functions work on
the tensors' device, and the host reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_fast.attention.packed_shares import places_of_ranks
from te_fast.tex.errors import ExtensionError, check_rows, check_tensors


def _check_bounds(op: str, cu_seqlens: torch.Tensor) -> None:
    check_tensors(op, cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        message = (
            f"{op}: cu_seqlens must be int32 (sequences + 1,), got {cu_seqlens.dtype} of shape "
            f"{list(cu_seqlens.shape)}"
        )
        raise ExtensionError(message)


def _check(op: str, condition: bool, expected: str, got: object) -> None:
    if not condition:
        message = f"{op}: expected {expected}, got {got}"
        raise ExtensionError(message)


def _sequences(bounds: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the sequence of each token; tokens behind the last sequence count as its own."""
    found = torch.searchsorted(bounds[1:].contiguous(), tokens, right=True)
    return found.clamp_(max=bounds.numel() - 2)


def _tokens(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)


def _halved(cu_seqlens: torch.Tensor, parts: int = 2) -> torch.Tensor:
    return torch.div(cu_seqlens, parts, rounding_mode="floor")


def _token_dim(op: str, tensor: torch.Tensor) -> int:
    """Dimension of the tokens: ``(t, h, d)``, or ``(2, t, h, d)`` of keys and values."""
    _check(op, tensor.dim() in (3, 4), "a tensor (t, h, d) or (2, t, h, d)", list(tensor.shape))
    return tensor.dim() - 3


@torch.no_grad()
def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """Return the tokens that a rank of context parallelism has.

    Parameters
    ----------
    cu_seqlens : torch.Tensor
        int32 ``(sequences + 1,)``: where sequences begin, and the end. Lengths are multiples of ``2 * world_size``.
    total_tokens : int
        Number of tokens of all ranks.
    world_size, rank : int
        Number of ranks, and which.

    Returns
    -------
    torch.Tensor
        int32 ``(total_tokens / world_size,)``.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_get_partitioned_indices"
    _check_bounds(op, cu_seqlens)
    _check(op, 0 <= rank < world_size, "0 <= rank < world_size", (rank, world_size))
    _check_total(op, total_tokens, world_size)
    return _indices_of_ranks(cu_seqlens, total_tokens, world_size)[rank]


def _check_total(op: str, total_tokens: int, world_size: int) -> None:
    fits = total_tokens > 0 and total_tokens % (2 * world_size) == 0
    _check(op, fits, f"total_tokens to be a multiple of {2 * world_size}", total_tokens)


def _indices_of_ranks(cu_seqlens: torch.Tensor, total_tokens: int, ranks: int) -> torch.Tensor:
    places = places_of_ranks(_halved(cu_seqlens, ranks), total_tokens // ranks, ranks)
    return places.to(torch.int32)


def _reordered(
    op: str, inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int
) -> torch.Tensor:
    """Return where each token of the rank order is in the sequences' order."""
    _check_bounds(op, cu_seqlens)
    _check(op, cp_size > 0, "cp_size > 0", cp_size)
    _check_total(op, total_tokens, cp_size)
    fits = inp.dim() >= 1 and inp.shape[0] == total_tokens
    _check(op, fits, f"{total_tokens} tokens along the first dimension", list(inp.shape))
    return _indices_of_ranks(cu_seqlens, total_tokens, cp_size).flatten()


@torch.no_grad()
def thd_sequence_order_to_cp_rank_order(
    inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int
) -> torch.Tensor:
    """Reorder tokens so that those of each rank are together, rank by rank.

    Parameters
    ----------
    inp : torch.Tensor
        ``(total_tokens, ...)``.
    cu_seqlens : torch.Tensor
        As of :func:`thd_get_partitioned_indices`.
    cp_size, total_tokens : int
        Numbers of ranks and of tokens.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_sequence_order_to_cp_rank_order"
    return inp[_reordered(op, inp, cu_seqlens, cp_size, total_tokens)]


@torch.no_grad()
def thd_cp_rank_order_to_sequence_order(
    inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int
) -> torch.Tensor:
    """Undo :func:`thd_sequence_order_to_cp_rank_order`.

    Parameters
    ----------
    inp, cu_seqlens, cp_size, total_tokens
        As of :func:`thd_sequence_order_to_cp_rank_order`.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_cp_rank_order_to_sequence_order"
    places = _reordered(op, inp, cu_seqlens, cp_size, total_tokens)
    out = torch.empty_like(inp, memory_format=torch.contiguous_format)
    out[places] = inp.detach()
    return out


@torch.no_grad()
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor,
    inp: torch.Tensor,
    cu_seqlens_padded: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> None:
    """Copy the tokens of padded sequences, without the padding, to the same places of another tensor.

    Parameters
    ----------
    out, inp : torch.Tensor
        ``(tokens, ...)``, to and from.
    cu_seqlens_padded, cu_seqlens : torch.Tensor
        int32 ``(sequences + 1,)``: where sequences begin, and differences that are their lengths without padding.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_copy_valid_tokens_from_per_split_to_rank_local"
    _check_bounds(op, cu_seqlens)
    _check_bounds(op, cu_seqlens_padded)
    same = cu_seqlens.shape == cu_seqlens_padded.shape
    _check(op, same, f"cu_seqlens_padded of {cu_seqlens.numel()}", cu_seqlens_padded.numel())
    same = out.shape == inp.shape and out.dtype == inp.dtype
    _check(op, same, f"out like inp {list(inp.shape)}", list(out.shape))
    tokens = _tokens(inp.shape[0], inp)
    sequence = _sequences(cu_seqlens_padded, tokens)
    within = tokens - cu_seqlens_padded[sequence]
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    valid = (within >= 0) & (within < lengths[sequence])
    out.copy_(torch.where(valid.view(-1, *[1] * (inp.dim() - 1)), inp, out))


@torch.no_grad()
def thd_read_half_tensor(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int
) -> torch.Tensor:
    """Return the first or the second half of every sequence.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(t, h, d)`` or ``(2, t, h, d)``.
    cu_seqlens : torch.Tensor
        int32 ``(sequences + 1,)``.
    half_idx : int
        0 or 1.

    Returns
    -------
    torch.Tensor
        With ``t / 2`` tokens. Those behind the last sequence are of no meaning.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_read_half_tensor"
    _check_bounds(op, cu_seqlens)
    _check(op, half_idx in (0, 1), "half_idx 0 or 1", half_idx)
    dim = _token_dim(op, tensor)
    bounds = _halved(cu_seqlens)
    tokens = _tokens(tensor.shape[dim] // 2, tensor)
    places = tokens + bounds[_sequences(bounds, tokens) + half_idx]
    return tensor.index_select(dim, places)


class _Lse:
    """Where the tokens of the sequences' second halves, or of all sequences, are in two tensors of log-sum-exps.

    Packed tensors are ``(h, t)``, others ``(sequences, h, longest)``.
    """

    def __init__(
        self,
        cu_seqlens: torch.Tensor,
        shorter: torch.Tensor | torch.Size,
        *,
        is_packed: bool,
        is_half: bool,
    ) -> None:
        bounds = _halved(cu_seqlens) if is_half else cu_seqlens
        count = shorter[-1] if isinstance(shorter, torch.Size) else shorter.shape[-1]
        columns = _tokens(count, cu_seqlens)
        lengths = bounds[1:] - bounds[:-1]
        self.is_packed = is_packed
        if is_packed:
            sequence = _sequences(bounds, columns)
            self.valid = columns < bounds[-1]
            shift = bounds[sequence + 1] if is_half else torch.zeros_like(columns)
            self.places = (columns + shift).long()
        else:
            self.valid = (columns < lengths[:, None])[:, None]
            shift = lengths[:, None] if is_half else torch.zeros_like(lengths[:, None])
            self.places = (columns + shift).long()[:, None]

    def read(self, lse: torch.Tensor) -> torch.Tensor:
        """Return the values at the places, for tokens of no meaning any value."""
        # Places of tokens without meaning may lie behind the end.
        return lse.gather(-1, self._inside(lse))

    def write(self, lse: torch.Tensor, values: torch.Tensor) -> None:
        """Write values of tokens with meaning."""
        size = lse.shape[-1]
        padded = torch.nn.functional.pad(lse, (0, 1))
        spare = torch.full_like(self.places, size)
        places = torch.where(self.valid, self.places, spare).expand(values.shape)
        lse.copy_(padded.scatter_(-1, places, values)[..., :size])

    def _inside(self, lse: torch.Tensor) -> torch.Tensor:
        places = self.places.clamp(max=lse.shape[-1] - 1)
        return places.expand(*lse.shape[:-1], places.shape[-1])


def _check_lse(
    op: str, lse: torch.Tensor, cu_seqlens: torch.Tensor, half: int, *, is_packed: bool
) -> None:
    _check_bounds(op, cu_seqlens)
    _check(op, lse.dtype == torch.float32, "float32 log-sum-exps", lse.dtype)
    dims = 2 if is_packed else 3
    _check(op, lse.dim() == dims, f"log-sum-exps of {dims} dimensions", list(lse.shape))
    expected = lse.shape[-1] // 2
    if is_packed:
        _check(op, half >= expected, f"at least {expected} tokens of second halves", half)
    else:
        _check(op, half == expected, f"{expected} tokens of second halves", half)
        batch = cu_seqlens.numel() - 1
        _check(op, lse.shape[0] == batch, f"{batch} sequences", lse.shape[0])


@torch.no_grad()
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool
) -> None:
    """Add a step's exponentials to those of the sequences' second halves, in place.

    Parameters
    ----------
    lse : torch.Tensor
        float32 ``(h, t)`` if packed, else ``(sequences, h, longest)``.
    lse_per_step : torch.Tensor
        The same for the second halves alone.
    cu_seqlens : torch.Tensor
        int32 ``(sequences + 1,)``.
    lse_packed : bool
        Which of both.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_second_half_lse_correction"
    check_rows(op, lse=lse, lse_per_step=lse_per_step)
    _check_lse(op, lse, cu_seqlens, lse_per_step.shape[-1], is_packed=lse_packed)
    places = _Lse(cu_seqlens, lse_per_step, is_packed=lse_packed, is_half=True)
    former = places.read(lse)
    larger, smaller = torch.fmax(former, lse_per_step), torch.fmin(former, lse_per_step)
    places.write(lse, larger + torch.log1p(torch.exp(smaller - larger)))


@torch.no_grad()
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> torch.Tensor:
    """Return the log-sum-exps of the sequences' second halves.

    Parameters
    ----------
    lse, cu_seqlens, lse_packed
        As of :func:`thd_second_half_lse_correction`.
    second_half_lse_seqlen : int
        Size of the result's last dimension.

    Returns
    -------
    torch.Tensor
        float32, 0 where no token is.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_read_second_half_lse"
    _check_lse(op, lse, cu_seqlens, second_half_lse_seqlen, is_packed=lse_packed)
    shape = torch.Size((*lse.shape[:-1], second_half_lse_seqlen))
    places = _Lse(cu_seqlens, shape, is_packed=lse_packed, is_half=True)
    return places.read(lse).masked_fill(~places.valid, 0.0)


@torch.no_grad()
def thd_out_correction(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    lse: torch.Tensor,
    lse_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add a step's result, times its share of the softmax, to the result of all steps, in place.

    Parameters
    ----------
    out, out_per_step : torch.Tensor
        ``(t, h, d)``; with `only_second_half` the latter has ``t / 2`` tokens.
    lse, lse_per_step : torch.Tensor
        float32 log-sum-exps of all steps and of this one: ``(h, t)`` if packed, else ``(sequences, h, longest)``.
    cu_seqlens : torch.Tensor
        int32 ``(sequences + 1,)``, of all tokens.
    only_second_half : bool
        Whether the step has the sequences' second halves alone.
    lse_packed : bool
        Form of the log-sum-exps.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_out_correction"
    _check_bounds(op, cu_seqlens)
    _check(op, out.dim() == 3, "out (t, h, d)", list(out.shape))
    _check(op, out.is_contiguous(), "a contiguous out", out.stride())
    bounds = _halved(cu_seqlens) if only_second_half else cu_seqlens
    tokens = _tokens(out_per_step.shape[0], out)
    sequence = _sequences(bounds, tokens)
    valid = (tokens < bounds[-1])[:, None, None]
    shift = bounds[sequence + 1] if only_second_half else torch.zeros_like(tokens)
    places = (tokens + shift).long().clamp_(max=out.shape[0] - 1)
    if lse_packed:
        columns = tokens.long().clamp(max=lse_per_step.shape[1] - 1)
        difference = lse_per_step[:, columns] - lse[:, places]
        factor = difference.t().exp()
    else:
        column = (tokens - bounds[sequence]).long()
        moved = column + (bounds[sequence + 1] - bounds[sequence]) * int(only_second_half)
        step = lse_per_step[sequence, :, column.clamp(max=lse_per_step.shape[2] - 1)]
        factor = (step - lse[sequence, :, moved.clamp(max=lse.shape[2] - 1)]).exp()
    scaled = (out_per_step.float() * factor[:, :, None]).to(out.dtype)
    # A share of 0 times an infinite factor counts as 0, as do tokens behind the last sequence.
    added = scaled.masked_fill(~valid | (out_per_step == 0), 0.0)
    out.index_add_(0, places, added)


_HALVES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "none": lambda total, _: total,
    "add": lambda total, step: total + step,
    "copy": lambda _, step: step,
}


@torch.no_grad()
def thd_grad_correction(
    grad: torch.Tensor,
    grad_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor,
    first_half: str,
    second_half: str,
) -> None:
    """Add a step's gradient to the sequences' halves, or copy it there, in place.

    Parameters
    ----------
    grad : torch.Tensor
        ``(t, h, d)`` or ``(2, t, h, d)``.
    grad_per_step : torch.Tensor
        The same; with ``t / 2`` tokens if one half is "none".
    cu_seqlens : torch.Tensor
        int32 ``(sequences + 1,)``.
    first_half, second_half : {'add', 'copy', 'none'}
        What to do: one half and "none", or "add" and "copy" in either order.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "thd_grad_correction"
    _check_bounds(op, cu_seqlens)
    pair = first_half, second_half
    known = set(pair) <= set(_HALVES) and first_half != second_half
    _check(op, known, "two different ones of 'add', 'copy' and 'none'", pair)
    dim = _token_dim(op, grad)
    is_half = "none" in pair
    count = grad.shape[dim] // (2 if is_half else 1)
    got = grad_per_step.shape[dim]
    _check(op, grad_per_step.dim() == grad.dim() and got == count, f"{count} tokens", got)
    bounds = _halved(cu_seqlens) if is_half else cu_seqlens
    tokens = _tokens(count, grad)
    sequence = _sequences(bounds, tokens)
    valid = tokens < bounds[-1]
    if is_half:
        places = (tokens + bounds[sequence + int(first_half == "none")]).long()
        is_first = torch.full_like(valid, first_half != "none")
    else:
        places = tokens.long()
        half = _halved(bounds[sequence + 1] - bounds[sequence])
        is_first = tokens - bounds[sequence] < half
    former = grad.index_select(dim, places)
    first, second = (_HALVES[kind](former, grad_per_step) for kind in pair)
    shape = (-1, 1, 1)
    new = torch.where(is_first.view(shape), first, second)
    new = torch.where(valid.view(shape), new, former)
    # Places of tokens with meaning are different ones, and none of the others: those come behind.
    grad.index_copy_(dim, places, new)


@torch.no_grad()
def convert_thd_to_bshd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int
) -> torch.Tensor:
    """Return packed sequences as a batch, with zeros behind each.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(t, h, d)``.
    cu_seqlens : torch.Tensor
        int32 ``(b + 1,)``.
    b, max_seq_len : int
        Sizes of the batch.

    Returns
    -------
    torch.Tensor
        ``(b, max_seq_len, h, d)``.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "convert_thd_to_bshd"
    _check_bounds(op, cu_seqlens)
    _check(op, cu_seqlens.numel() == b + 1, f"cu_seqlens ({b + 1},)", list(cu_seqlens.shape))
    columns = _tokens(max_seq_len, tensor)
    valid = columns < (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]
    places = torch.where(valid, cu_seqlens[:-1, None] + columns, 0)
    return tensor[places].masked_fill_(~valid[:, :, None, None], 0)


@torch.no_grad()
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    """Undo :func:`convert_thd_to_bshd`.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(b, s, h, d)``.
    cu_seqlens : torch.Tensor
        int32 ``(b + 1,)``.
    t : int
        Number of tokens; those behind the last sequence are 0.

    Returns
    -------
    torch.Tensor
        ``(t, h, d)``.

    Raises
    ------
    ExtensionError
        If the arguments do not fit.
    """
    op = "convert_bshd_to_thd"
    _check_bounds(op, cu_seqlens)
    tokens = _tokens(t, tensor)
    sequence = _sequences(cu_seqlens, tokens)
    column = tokens - cu_seqlens[sequence]
    valid = (tokens < cu_seqlens[-1]) & (column < tensor.shape[1])
    return tensor[sequence, torch.where(valid, column, 0)].masked_fill_(~valid[:, None, None], 0)
