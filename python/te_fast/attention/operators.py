"""The rotation of queries and keys as operators of ``torch.library``, for ``torch.compile``.

A compiler's own code would read and write the product of queries, keys and values once for each of them, and join their
gradients by a copy. Each of these operators is one launch.
"""

from __future__ import annotations

from typing import Any

import torch

from te_fast.runtime import native
from te_fast.runtime.library import register, register_gradient

_WAVES = "Tensor q_cos, Tensor q_sin, Tensor k_cos, Tensor k_sin"


def _made(product: torch.Tensor, heads: list[int]) -> list[torch.Tensor]:
    queries, groups, channels = heads
    return [
        product.new_empty((*product.shape[:-1], count, channels))
        for count in (queries, groups, groups)
    ]


def _split_run(
    product: torch.Tensor,
    q_cos: torch.Tensor,
    q_sin: torch.Tensor,
    k_cos: torch.Tensor,
    k_sin: torch.Tensor,
    heads: list[int],
    interleaved: bool,
) -> tuple[torch.Tensor, ...]:
    queries, groups, channels = heads
    whole = product.contiguous().view(*product.shape[:-1], queries + 2 * groups, channels)
    q, k, v = whole.split_with_sizes((queries, groups, groups), -2)
    made = _made(product, heads)
    turns: list[Any] = [(q, made[0], q_cos, q_sin), (k, made[1], k_cos, k_sin)]
    native.rotate([*turns, (v, made[2], None, None)], interleaved, False)
    return tuple(made)


def _split_fake(product: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_made(product, given[4]))


split_rotated = register(
    f"split_rotated(Tensor product, {_WAVES}, int[] heads, bool interleaved) -> (Tensor, Tensor, Tensor)",
    _split_run,
    _split_fake,
)


def _join_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> torch.Tensor:
    *waves, (queries, groups, channels), interleaved = given
    heads = queries, groups, channels, False
    joined: torch.Tensor = native.join_rotated((q, k, v), tuple(waves), heads, interleaved, None)
    return joined


def _join_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> torch.Tensor:
    queries, groups, channels = given[4]
    return q.new_empty((*q.shape[:-2], (queries + 2 * groups) * channels))


_join = register(
    f"join_rotated(Tensor q, Tensor k, Tensor v, {_WAVES}, int[] heads, bool interleaved) -> Tensor",
    _join_run,
    _join_fake,
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    _, *waves, heads, interleaved = inputs
    ctx.save_for_backward(*waves)
    ctx.how = heads, interleaved


def _backward(ctx: Any, *grads: torch.Tensor) -> Any:
    return _join(*grads, *ctx.saved_tensors, *ctx.how), *[None] * 6


def _setup_join(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    _, _, _, *waves, heads, interleaved = inputs
    ctx.save_for_backward(*waves)
    ctx.how = heads, interleaved


def _backward_of_join(ctx: Any, grad: torch.Tensor) -> Any:
    return *split_rotated(grad, *ctx.saved_tensors, *ctx.how), *[None] * 6


register_gradient(split_rotated, _setup, _backward)
register_gradient(_join, _setup_join, _backward_of_join)
