"""Kernels of torch's scaled dot product attention, called for forward and backward without autograd.

``torch.nn.functional.scaled_dot_product_attention`` chooses a kernel, and autograd calls the kernel's backward. A node
that contains attention calls both itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

_ATEN = torch.ops.aten

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


def _takes(op: str, names: str, *, is_all: bool = True) -> Any:
    """Return an operator of torch; None if it does not have these arguments, all or as its first ones."""
    packet = getattr(_ATEN, op, None)
    found = getattr(packet, "default", None)
    if found is None:
        return None
    known, wanted = [argument.name for argument in found._schema.arguments], names.split()
    return found if known[: None if is_all else len(wanted)] == wanted else None


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


class PackedKernel(NamedTuple):
    """A kernel for packed sequences.

    Attributes
    ----------
    forward : Callable
        Takes queries, keys and values ``(tokens, heads, d)``, the cumulative lengths of queries and of keys, the
        longest lengths, whether attention is causal, and the scale. Returns the result, the logarithms of the sums
        ``(heads, tokens)``, and other tensors that backward reads.
    backward : Callable
        Takes the result's gradient, queries, keys, values, result, sums, other tensors, and what forward takes behind
        the values. Returns the gradients of queries, keys and values.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, Tensors]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@cache
def packed_flash() -> PackedKernel | None:
    """Return flash attention for packed sequences; None if this torch has none that is known."""
    op = "_flash_attention_forward"
    names = (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale window_size_left "
        "window_size_right"
    )
    run = _takes(op, names, is_all=False)
    names = (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused "
        "scale window_size_left window_size_right"
    )
    differentiate = _takes("_flash_attention_backward", names)
    if run is None or differentiate is None:
        return None

    def forward(q: Any, k: Any, v: Any, ends: Any, longest: Any, causal: bool, scale: float) -> Any:
        out, sums, *others, _mask = run(q, k, v, *ends, *longest, 0.0, causal, False, scale=scale)
        return out, sums, tuple(others)

    def backward(*given: Any) -> Any:
        *tensors, others, ends, longest, causal, scale = given
        return differentiate(*tensors, *ends, *longest, 0.0, causal, *others, scale=scale)

    return PackedKernel(forward, backward)


#: The kernels by torch's numbers of them (`torch.nn.attention.SDPBackend`), on a GPU.
ON_GPUS = {1: _flash, 3: _cudnn}
#: The number and the kernel on the host.
ON_THE_HOST = {1: _on_the_host}
