"""Parts of attention: queries attend to some of their keys, and results are merged.

Each part's kernel also returns the logarithm of the sum of its exponentials, by which results are merged
(https://arxiv.org/abs/2310.01889). With the merged result and sum, the kernels' backward gives each part's gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_fast.attention.kernels import (
    ON_GPUS,
    ON_THE_HOST,
    Kernel,
    PackedKernel,
    packed_flash,
)
from te_fast.attention.packed import Packing, pack, unpack
from te_fast.attention.varlen import heads_problem

#: Tokens of a rank, by number: those of a slice, or those of an index, which has each of them once.
Rows = slice | torch.Tensor


class How(NamedTuple):
    """How the queries of a part attend to its keys.

    Attributes
    ----------
    is_causal : bool
        Whether a query attends to no later key.
    scale : float
        Factor of the products of queries and keys.
    packings : tuple of Packing, optional
        Where packed sequences of queries and of keys lie. Their tensors have a batch of one, in which these sequences
        follow each other.
    may_use_flash : bool, default = True
        Whether torch's kernel for packed sequences may be used.
    """

    is_causal: bool
    scale: float
    packings: tuple[Packing, Packing] | None = None
    may_use_flash: bool = True


class Left(NamedTuple):
    """What a part's backward takes beside merged tensors: kernel, shape of its sums, other tensors and sizes."""

    kernel: Kernel | PackedKernel | None
    shape: tuple[int, ...]
    others: tuple[Any, ...]
    sizes: tuple[Any, ...]


def _chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> Kernel | None:
    """Return the kernel that torch chooses; None if that returns no sums, so that plain products do it."""
    if q.is_cuda and (q.shape[-1] % 8 or v.shape[-1] % 8):
        return None  # torch pads channels
    # Tensors of inference cannot want gradients outside of it.
    q, k, v = (one.detach().requires_grad_(not one.is_inference()) for one in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    number = torch._fused_sdp_choice(q, k, v, is_causal=is_causal, enable_gqa=grouped)
    kernel = (ON_GPUS if q.is_cuda else ON_THE_HOST).get(number)
    return None if kernel is None else kernel()


def attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How
) -> tuple[torch.Tensor, torch.Tensor, Left]:
    """Attend to the keys of a part.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(batch, heads, queries, d_k)``, ``(batch, groups, keys, d_k)`` and ``(batch, groups, keys, d_v)``.
    how : How
        How queries attend.

    Returns
    -------
    torch.Tensor
        The part's result, ``(batch, heads, queries, d_v)``. Rows of no packed sequence mean nothing.
    torch.Tensor
        The logarithms of its sums, ``(batch, heads, queries)``; negative infinity for a query that attends to no key.
    Left
        What its backward takes.
    """
    if how.packings is not None:
        return _attend_packed((q, k, v), how.packings, how)
    kernel = _chosen(q, k, v, how.is_causal)
    if kernel is None:
        out, sums = _plain(q, k, v, _unseen(q, k, how), how.scale)
        return out, sums, Left(None, sums.shape, (), ())
    out, (found, *others), sizes = kernel.forward(q, k, v, 0.0, how.is_causal, how.scale, True)
    assert found is not None
    return out, found.reshape(q.shape[:3]), Left(kernel, found.shape, tuple(others), sizes)


def differentiate_part(
    grad: torch.Tensor, tensors: tuple[torch.Tensor, ...], left: Left, how: How
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a part's queries, keys and values.

    Parameters
    ----------
    grad : torch.Tensor
        Gradient of the result of all parts, for the queries of this one.
    tensors : tuple of torch.Tensor
        Queries, keys and values of the part; result and sums of all parts, for these queries.
    left : Left
        What forward returned.
    how : How
        As of forward.
    """
    if how.packings is not None:
        return _differentiate_packed(grad, tensors, left, how.packings, how)
    *heads, sums = tensors
    if not isinstance(left.kernel, Kernel):
        return _plain_backward(grad, tensors, _unseen(heads[0], heads[1], how), how.scale)
    others = (sums.contiguous().view(left.shape), *left.others)
    return left.kernel.backward(grad, *heads, others, left.sizes, 0.0, how.is_causal, how.scale)


def merge_part(
    total: list[torch.Tensor], rows: Rows, part: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Merge a part's result and sums with those of former parts, in the rows of its queries."""
    former = [one[:, :, rows] for one in total]
    (out, sums), (more, of_more) = former, part
    merged = torch.logaddexp(sums, of_more)
    weights = [_exp(one, merged) for one in (sums, of_more)]
    out.mul_(weights[0][..., None]).add_(more * weights[1][..., None])
    sums.copy_(merged)
    if isinstance(rows, torch.Tensor):  # an index makes copies
        for one, found in zip(total, former, strict=True):
            one.index_copy_(2, rows, found)


def _exp(logarithms: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return exponentials over sums; zero if the sum is zero, for a query that attends to no key."""
    return (logarithms - sums).exp_().masked_fill_(sums == float("-inf"), 0.0)


def _unseen(q: torch.Tensor, k: torch.Tensor, how: How) -> torch.Tensor | None:
    """Return the keys that queries do not attend to, ``(1 or batch, 1, queries, keys)``; None if they attend to all."""
    unseen = None
    if how.is_causal:
        shape = q.shape[2], k.shape[2]
        unseen = torch.ones(shape, dtype=torch.bool, device=q.device).triu(1)[None, None]
    if how.packings is not None:
        _, kept = how.packings[1].rows()
        padding = ~kept[:, None, None]
        unseen = padding if unseen is None else unseen | padding
    return unseen


def _scores(q: Any, k: Any, unseen: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores: torch.Tensor = q @ k.transpose(-1, -2) * scale
    return scores if unseen is None else scores.masked_fill(unseen, float("-inf"))


def _widened(q: Any, *others: Any) -> list[torch.Tensor]:
    """Return tensors in FP32 at least; keys and values with as many heads as queries."""
    wide = torch.promote_types(q.dtype, torch.float32)
    repeated = [other.repeat_interleave(q.shape[1] // other.shape[1], 1) for other in others]
    return [tensor.to(wide) for tensor in (q, *repeated)]


def _plain(q: Any, k: Any, v: Any, unseen: torch.Tensor | None, scale: float) -> tuple[Any, Any]:
    wide_q, wide_k, wide_v = _widened(q, k, v)
    scores = _scores(wide_q, wide_k, unseen, scale)
    sums = scores.logsumexp(-1)
    return _exp(scores, sums[..., None]) @ wide_v, sums


def _plain_backward(
    grad: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    unseen: torch.Tensor | None,
    scale: float,
) -> Any:
    q, k, v, out, sums = tensors
    groups, (wide_q, wide_k, wide_v) = k.shape[1], _widened(q, k, v)
    grad, out = grad.to(wide_q.dtype), out.to(wide_q.dtype)
    weights = _exp(_scores(wide_q, wide_k, unseen, scale), sums[..., None])
    of_weights = grad @ wide_v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    of_scores = weights * of_weights * scale
    of_kv = of_scores.transpose(-1, -2) @ wide_q, weights.transpose(-1, -2) @ grad
    of_k, of_v = (one.unflatten(1, (groups, -1)).sum(2) for one in of_kv)
    return of_scores @ wide_k, of_k, of_v


# Parts of packed sequences --------------------------------------------------------------------------


def _attend_packed(
    heads: tuple[torch.Tensor, ...], packings: tuple[Packing, Packing], how: How
) -> tuple[torch.Tensor, torch.Tensor, Left]:
    q, k, v = _rows_of(heads)
    kernel = packed_flash() if how.may_use_flash and not heads_problem(q, v) else None
    if kernel is not None:
        out, sums, others = kernel.forward(q, k, v, *_extents(packings), how.is_causal, how.scale)
        # The kernel's sum over no key is infinite.
        sums = sums.masked_fill(sums == float("inf"), float("-inf"))
        return *_heads_of(out, sums.unsqueeze(-1).transpose(0, 1)), Left(kernel, (), others, ())
    dense_q, dense_k, dense_v = _unpacked((q, k, v), packings)
    unseen = _unseen(dense_q, dense_k, how)
    out, sums = _plain(dense_q, dense_k, dense_v, unseen, how.scale)
    rows = [pack(one, packings[0], q.shape[0]) for one in (out, sums[..., None])]
    return *_heads_of(*rows), Left(None, (), (), ())


def _differentiate_packed(
    grad: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    left: Left,
    packings: tuple[Packing, Packing],
    how: How,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *heads, sums = tensors
    grad, q, k, v, out = _rows_of((grad, *heads))
    of_q, of_k = packings
    if isinstance(left.kernel, PackedKernel):
        given = (grad, q, k, v, out, sums[0].contiguous(), left.others)
        grads: Any = left.kernel.backward(*given, *_extents(packings), how.is_causal, how.scale)
    else:
        dense_q, dense_k, dense_v = _unpacked((q, k, v), packings)
        rows = grad, out, sums[0].transpose(0, 1).unsqueeze(-1)
        dense_grad, dense_out, dense_sums = (unpack(one, of_q)[0] for one in rows)
        unseen = _unseen(dense_q, dense_k, how)
        tensors = (dense_q, dense_k, dense_v, dense_out, dense_sums[..., 0])
        found = _plain_backward(dense_grad, tensors, unseen, how.scale)
        sides = zip(found, (of_q, of_k, of_k), (q, k, v), strict=True)
        grads = [pack(one, side, own.shape[0]) for one, side, own in sides]
    of_own, of_keys, of_values = (one.transpose(0, 1)[None] for one in grads)
    return of_own, of_keys, of_values


def _rows_of(heads: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return ``(1, heads, tokens, d)`` as ``(tokens, heads, d)``."""
    return [one[0].transpose(0, 1) for one in heads]


def _heads_of(out: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the result, and of sums ``(tokens, heads, 1)``, as a batch of one."""
    return out.transpose(0, 1)[None], sums.transpose(0, 1)[None, ..., 0]


def _extents(packings: tuple[Packing, Packing]) -> tuple[Any, Any]:
    of_q, of_k = packings
    return (of_q.ends, of_k.ends), (of_q.longest, of_k.longest)


def _unpacked(rows: tuple[Any, Any, Any], packings: tuple[Packing, Packing]) -> list[torch.Tensor]:
    of_q, of_k = packings
    return [unpack(one, side)[0] for one, side in zip(rows, (of_q, of_k, of_k), strict=True)]
