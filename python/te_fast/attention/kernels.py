"""Kernels of torch's scaled dot product attention, called for forward and backward without autograd.

``torch.nn.functional.scaled_dot_product_attention`` chooses a kernel, and autograd calls the kernel's backward. A node
that contains attention calls both itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from te_fast.attention.rope import Heads
from te_fast.attention.scores import Scores

_ATEN = torch.ops.aten
#: Kinds of calls whose kernel is remembered.
_KINDS = 256

Tensors = tuple[torch.Tensor | None, ...]


class Kernel(NamedTuple):
    """A kernel.

    Attributes
    ----------
    forward : Callable
        Takes queries, keys and values ``(b, heads, s, d)``, dropout, whether attention is causal, the scale, and
        whether a backward follows. Returns the result, the other tensors that backward reads, and their sizes.
    backward : Callable
        Takes the result's gradient, queries, keys, values, result, the other tensors, their sizes, dropout, whether
        attention is causal, and the scale. Returns the gradients of queries, keys and values.
    """

    forward: Callable[..., tuple[torch.Tensor, Tensors, tuple[Any, ...]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _takes(op: str, names: str) -> Any:
    """Return an operator of torch; None if this torch has none with these arguments."""
    packet = getattr(_ATEN, op, None)
    found = getattr(packet, "default", None)
    if found is None or [argument.name for argument in found._schema.arguments] != names.split():
        return None
    return found


@cache
def _on_the_host() -> Kernel | None:
    op = "_scaled_dot_product_flash_attention_for_cpu"
    run = _takes(op, "query key value dropout_p is_causal attn_mask scale")
    names = "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"
    differentiate = _takes(f"{op}_backward", names)
    if run is None or differentiate is None:
        return None

    def forward(q: Any, k: Any, v: Any, dropout: float, causal: bool, scale: float, _: bool) -> Any:
        out, sums = run(q, k, v, dropout, causal, scale=scale)
        return out, (sums,), ()

    def backward(*given: Any) -> Any:
        *tensors, (sums,), _, dropout, causal, scale = given
        return differentiate(*tensors, sums, dropout, causal, scale=scale)

    return Kernel(forward, backward)


@cache
def _flash() -> Kernel | None:
    op = "_scaled_dot_product_flash_attention"
    run = _takes(op, "query key value dropout_p is_causal return_debug_mask scale")
    names = (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "philox_seed philox_offset scale"
    )
    differentiate = _takes(f"{op}_backward", names)
    if run is None or differentiate is None:
        return None

    def forward(q: Any, k: Any, v: Any, dropout: float, causal: bool, scale: float, _: bool) -> Any:
        out, sums, *ends, longest_q, longest_k, seed, offset, _mask = run(
            q, k, v, dropout, causal, False, scale=scale
        )
        return out, (sums, seed, offset, *ends), (longest_q, longest_k)

    def backward(*given: Any) -> Any:
        *tensors, (sums, seed, offset, *ends), sizes, dropout, causal, scale = given
        return differentiate(
            *tensors, sums, *ends, *sizes, dropout, causal, seed, offset, scale=scale
        )

    return Kernel(forward, backward)


@cache
def _cudnn() -> Kernel | None:
    op = "_scaled_dot_product_cudnn_attention"
    names = (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale"
    )
    run = _takes(op, names)
    names = (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k "
        "max_q max_k dropout_p is_causal scale"
    )
    differentiate = _takes(f"{op}_backward", names)
    if run is None or differentiate is None:
        return None

    def forward(
        q: Any, k: Any, v: Any, dropout: float, causal: bool, scale: float, trains: bool
    ) -> Any:
        out, sums, *ends, longest_q, longest_k, seed, offset, _mask = run(
            q, k, v, None, trains, dropout, causal, False, scale=scale
        )
        return out, (sums, seed, offset, *ends), (longest_q, longest_k)

    def backward(*given: Any) -> Any:
        *tensors, (sums, seed, offset, *ends), sizes, dropout, causal, scale = given
        return differentiate(
            *tensors, sums, seed, offset, None, *ends, *sizes, dropout, causal, scale=scale
        )

    return Kernel(forward, backward)


#: The kernels by torch's numbers of them (`torch.nn.attention.SDPBackend`), on a GPU.
_ON_GPUS = {1: _flash, 3: _cudnn}

_chosen: dict[Any, Kernel | None] = {}
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


def kernel_for(
    hidden: torch.Tensor, heads: Heads, order: tuple[int, ...], scores: Scores, *, trains: bool
) -> Kernel | None:
    """Return the kernel that torch chooses for self attention.

    Parameters
    ----------
    hidden : torch.Tensor
        ``(s, b, hidden)`` or ``(b, s, hidden)``, the input of the layer that computes queries, keys and values.
    heads : Heads
        The columns of this layer's result.
    order : tuple of int
        Order of the dimensions, as :meth:`torch.Tensor.permute` takes it, that makes heads ``(b, heads, s, d)``.
    scores : Scores
        How scores are computed.
    trains : bool
        Whether a backward follows.

    Returns
    -------
    Kernel, optional
        None if torch chooses one that is not called without autograd.
    """
    causal = scores.rule.right == 0
    kind = (hidden.shape, hidden.dtype, hidden.device, heads, order, causal, scores.dropout > 0.0)
    key = (*kind, trains, scores.scale, *switches())
    try:
        return _chosen[key]
    except KeyError:
        pass
    if len(_chosen) >= _KINDS:
        _chosen.clear()
    found = _chosen[key] = _choose(hidden, heads, order, scores, trains)
    return found


def _choose(
    hidden: torch.Tensor, heads: Heads, order: tuple[int, ...], scores: Scores, trains: bool
) -> Kernel | None:
    columns = (heads.queries + 2 * heads.groups) * heads.channels
    if heads.channels % 8 != 0 and hidden.is_cuda:
        return None  # torch pads channels
    mixed = torch.empty(*hidden.shape[:-1], columns, dtype=hidden.dtype, device=hidden.device)
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
    if hidden.is_cuda:
        kernel = _ON_GPUS.get(number)
        return None if kernel is None else kernel()
    return _on_the_host() if number == 1 else None
