"""The choice of torch's kernel for self attention, and whether its launches are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_fast.attention.kernels import ON_GPUS, ON_THE_HOST, Kernel
from te_fast.attention.learned import Kind, Uses
from te_fast.attention.rope import Heads
from te_fast.attention.scores import Scores

#: Kinds of calls whose kernel is remembered.
_KINDS = 256


class Choice(NamedTuple):
    """A kernel for one kind of call.

    Attributes
    ----------
    kernel : Kernel
        The kernel.
    uses : Uses, optional
        The calls so far; None if the launches are never learned.
    """

    kernel: Kernel
    uses: Uses | None


_chosen: dict[Any, Choice | None] = {}
_order_of_kernels: Callable[[], Any] = getattr(torch._C, "_get_sdp_priority_order", tuple)


def switches() -> tuple[Any, ...]:
    """Return what the user has allowed torch to choose."""
    native = torch._C
    return (
        native._get_flash_sdp_enabled(),
        native._get_mem_efficient_sdp_enabled(),
        native._get_math_sdp_enabled(),
        native._get_cudnn_sdp_enabled(),
        native._get_deterministic_algorithms(),
        *_order_of_kernels(),
    )


def choice_for(
    hidden: torch.Tensor,
    heads: Heads,
    orders: tuple[tuple[int, ...], tuple[int, ...]],
    scores: Scores,
    *,
    interleaved: bool,
    trains: bool,
) -> Choice | None:
    """Return the kernel that torch chooses for self attention.

    Parameters
    ----------
    hidden : torch.Tensor
        ``(s, b, hidden)`` or ``(b, s, hidden)``, the input of the layer that computes queries, keys and values.
    heads : Heads
        The columns of this layer's result.
    orders : tuple
        Orders of the dimensions, as :meth:`torch.Tensor.permute` takes them: the one that makes heads
        ``(b, heads, s, d)``, and the one back.
    scores : Scores
        How scores are computed.
    interleaved : bool
        Whether rotation turns adjacent channels.
    trains : bool
        Whether a backward follows.

    Returns
    -------
    Choice, optional
        None if torch chooses a kernel that is not called without autograd.
    """
    is_causal = scores.rule.right == 0
    kind = (hidden.shape, hidden.dtype, hidden.device, heads, orders, is_causal, interleaved)
    key = (*kind, scores.dropout > 0.0, trains, scores.scale, *switches())
    try:
        return _chosen[key]
    except KeyError:
        pass
    if len(_chosen) >= _KINDS:
        _chosen.clear()
    kernel = _choose(hidden, heads, orders[0], scores, trains)
    if kernel is None:
        _chosen[key] = None
        return None
    found = Kind(
        kernel=kernel,
        shape=hidden.shape[:-1],
        dtype=hidden.dtype,
        device=hidden.device,
        heads=heads,
        interleaved=interleaved,
        orders=orders,
        is_causal=is_causal,
        scale=scores.scale,
        trains=trains,
    )
    learns = scores.dropout == 0.0 and found.can_be_learned()
    choice = _chosen[key] = Choice(kernel, Uses(found) if learns else None)
    return choice


def _choose(
    hidden: torch.Tensor, heads: Heads, order: tuple[int, ...], scores: Scores, trains: bool
) -> Kernel | None:
    if heads.channels % 8 != 0 and hidden.is_cuda:
        return None  # torch pads channels
    mixed = torch.empty(*hidden.shape[:-1], heads.columns, dtype=hidden.dtype, device=hidden.device)
    q, k, v = (part.permute(order).requires_grad_(trains) for part in heads.split(mixed))
    number = torch._fused_sdp_choice(
        q,
        k,
        v,
        dropout_p=scores.dropout,
        is_causal=scores.rule.right == 0,
        scale=scores.scale,
        enable_gqa=heads.queries != heads.groups,
    )
    kernel = (ON_GPUS if hidden.is_cuda else ON_THE_HOST).get(number)
    return None if kernel is None else kernel()
