"""Attention itself, by torch's kernels, on heads with any strides."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from te_fast.attention.in_graphs import attend_in_graph
from te_fast.attention.rules import (
    Kept,
    Rule,
    alibi,
    allowed,
    default_slopes,
)
from te_fast.attention.varlen import attend_varlen, varlen_problem
from te_fast.errors import UnsupportedError
from te_fast.runtime.compiling import is_exporting, is_in_graph

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bias(NamedTuple):
    """A bias of scores: its type, and the tensor or the slopes of ALiBi."""

    kind: str = "no_bias"
    tensor: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


class Scores(NamedTuple):
    """How scores are computed.

    Attributes
    ----------
    rule : Rule
        Which keys a query attends to.
    scale : float
        Factor of the products of queries and keys.
    dropout : float
        Probability by which a weight is dropped.
    bias : Bias
        The bias of the scores.
    sink : torch.Tensor, optional
        ``(heads,)``, score of a key without value that every query attends to.
    kept : Kept, optional
        Real positions of padded sequences.
    masked : torch.Tensor, optional
        Mask of ``arbitrary``, True where a query does not attend.
    softcap : float
        ``c`` of ``c · tanh(score / c)``, which bounds scaled scores; 0 sets no bound.
    """

    rule: Rule
    scale: float
    dropout: float = 0.0
    bias: Bias = Bias()
    sink: torch.Tensor | None = None
    kept: Kept | None = None
    masked: torch.Tensor | None = None
    softcap: float = 0.0

    def of(
        self,
        *,
        rule: Rule | None = None,
        kept: Kept | None = None,
        masked: torch.Tensor | None = None,
    ) -> Scores:
        """Return a copy for the sequences of a call, and for another rule if there is one."""
        rule = self.rule if rule is None else rule
        # Traces of torch 2.8 do not go through `_replace`.
        fixed = (self.scale, self.dropout, self.bias, self.sink)
        return Scores(rule, *fixed, kept, masked, self.softcap)


def _is_plain(scores: Scores, queries: int, keys: int) -> bool:
    """Whether torch's ``is_causal``, or no mask at all, is equivalent to the rule."""
    rule = scores.rule
    if scores.kept is not None or scores.masked is not None or scores.sink is not None:
        return False
    if scores.softcap != 0.0:
        return False
    if scores.bias.kind != "no_bias" or rule.left >= 0 or rule.right > 0:
        return False
    return rule.right < 0 or not rule.bottom_right or queries == keys


def _bias_of(scores: Scores, q: torch.Tensor, keys: int) -> torch.Tensor | None:
    """Return the bias of scaled scores, ``(1 or batch, 1 or heads, 1 or queries, keys)``."""
    bias = scores.bias
    if bias.kind == "alibi":
        slopes = bias.slopes
        if slopes is None:
            slopes = default_slopes(q.shape[1], q.device)
        made = alibi(scores.rule, (q.shape[2], keys), scores.kept, slopes)
        return made.to(q.dtype)
    if bias.tensor is None:
        return None
    given = bias.tensor * scores.scale if bias.kind == "pre_scale_bias" else bias.tensor
    return given.to(q.dtype)


def _with_sink(
    scores: Scores, mask: torch.Tensor | None, bias: torch.Tensor | None, kv: Any
) -> tuple[Any, torch.Tensor | None, torch.Tensor]:
    """Append the sink as one more key, of zeros and with its score as bias; its value is zero."""
    assert scores.sink is not None
    k, v = (functional.pad(tensor, (0, 0, 0, 1)) for tensor in kv)
    keys = k.shape[2] - 1
    score = scores.sink.to(k.dtype).view(1, -1, 1, 1)
    zeros = k.new_zeros(1, 1, 1, keys) if bias is None else bias.expand(*bias.shape[:3], keys)
    sizes = [b if a == 1 else a for a, b in zip(zeros.shape[:3], score.shape[:3], strict=True)]
    bias = torch.cat([zeros.expand(*sizes, keys), score.expand(*sizes, 1)], -1)
    mask = None if mask is None else functional.pad(mask, (0, 1), value=True)
    return (k, v), mask, bias


def _capped(products: torch.Tensor, bias: torch.Tensor | None, scores: Scores) -> torch.Tensor:
    """Return scaled products bounded by the cap, with their bias; a bias before the scale is bounded, too."""
    if bias is not None and scores.bias.kind == "pre_scale_bias":
        products, bias = products + bias, None
    if scores.softcap != 0.0:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    return products if bias is None else products + bias


def _attend_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Compute attention by plain products with scores in FP32, since none of torch's kernels bounds scores."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
    mask = allowed(scores.rule, (q.shape[2], k.shape[2]), scores.kept, scores.masked, q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    products = (q @ k.transpose(-1, -2)).to(wide) * scores.scale
    weights = _capped(products, _bias_of(scores, q, k.shape[2]), scores)
    dead = None
    if mask is not None:
        # The softmax of no keys is NaN. Such queries attend to all keys here, and their result is set to zero.
        dead = ~mask.any(-1, keepdim=True)
        weights = weights.masked_fill(~(mask | dead), float("-inf"))
    if scores.sink is not None:
        sink = scores.sink.to(wide).view(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        weights = torch.cat([weights, sink], -1)
    weights = weights.softmax(-1)[..., : k.shape[2]]
    if dead is not None:
        weights = weights.masked_fill(dead, 0.0)
    return functional.dropout(weights, scores.dropout).to(v.dtype) @ v


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    *,
    may_use_flash: bool = True,
) -> torch.Tensor:
    """Attend, with torch's scaled dot product attention.

    Parameters
    ----------
    q : torch.Tensor
        ``(batch, heads, queries, d_k)``, with any strides.
    k, v : torch.Tensor
        ``(batch, groups, keys, d_k)`` and ``(batch, groups, keys, d_v)``; heads are a multiple of groups.
    scores : Scores
        How scores are computed.
    may_use_flash : bool, default = True
        Whether flash attention may be called without torch's choice, for windows.

    Returns
    -------
    torch.Tensor
        ``(batch, heads, queries, d_v)``; zero where a query attends to nothing.
    """
    if scores.softcap != 0.0:
        return _attend_capped(q, k, v, scores)
    if may_use_flash and _is_window(scores) and not is_in_graph() and q.numel() and k.numel():
        is_self = q.shape[2] == k.shape[2]
        if not varlen_problem(q, v, scores, is_self=is_self):
            return _attend_in_windows(q, k, v, scores)
    grouped = q.shape[1] != k.shape[1]
    if _is_plain(scores, q.shape[2], k.shape[2]):
        if is_in_graph() and scores.dropout == 0.0 and not is_exporting():
            how: dict[str, Any] = {"is_causal": scores.rule.right == 0, "scale": scores.scale}
            out = attend_in_graph(q, k, v, **how)
            if out is not None:
                return out
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=scores.dropout,
            is_causal=scores.rule.right == 0,
            scale=scores.scale,
            enable_gqa=grouped,
        )
    mask = allowed(scores.rule, (q.shape[2], k.shape[2]), scores.kept, scores.masked, q.device)
    bias = _bias_of(scores, q, k.shape[2])
    dead = None
    if scores.sink is not None:
        (k, v), mask, bias = _with_sink(scores, mask, bias, (k, v))
    elif mask is not None and (
        scores.kept is not None or scores.masked is not None or scores.rule.is_banded
    ):
        # Kernels disagree on the softmax of no keys. Such queries attend to all keys here, and their result is set to
        # zero.
        dead = ~mask.any(-1, keepdim=True)
        mask = mask | dead
    if mask is not None and bias is not None:
        bias = bias.masked_fill(~mask, float("-inf"))
    if grouped:  # no kernel takes groups and a mask
        repeats = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
    if bias is not None and bias.requires_grad and _gives_biases_no_gradient(q, k, v):
        q = q + bias[..., :0].sum()  # this sum of nothing leads the gradient there
    given = mask if bias is None else bias
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=given, dropout_p=scores.dropout, scale=scores.scale
    )
    return y if dead is None else y.masked_fill(dead, 0.0)


def _is_window(scores: Scores) -> bool:
    """Whether the rule is a window that is no causal mask, and nothing else decides which keys a query sees."""
    rule = scores.rule
    return scores.kept is None and scores.masked is None and (rule.left >= 0 or rule.right > 0)


def _attend_in_windows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attend by the kernel for sequences of several lengths: no mask has to be made and read."""
    rows = [one.transpose(1, 2).flatten(0, 1) for one in (q, k, v)]
    sizes = q.shape[2], k.shape[2]
    of_q, of_k = (
        torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * size for size in sizes
    )
    out = attend_varlen(rows[0], rows[1], rows[2], (of_q, of_k), sizes, scores)
    return out.unflatten(0, (q.shape[0], sizes[0])).transpose(1, 2)


def _gives_biases_no_gradient(*tensors: torch.Tensor) -> bool:
    """Tell whether torch's kernels forget a bias: they work for queries, keys and values, and not on empty tensors."""
    if not any([tensor.requires_grad for tensor in tensors]):
        return True
    return not is_in_graph() and not all([tensor.numel() for tensor in tensors])


@torch.no_grad()
def max_logits(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Return the largest score of each head that a query attends to, ``(heads,)``."""
    if 0 in (q.shape[0], q.shape[2], k.shape[2]):  # the largest of no scores
        return torch.full((q.shape[1],), -math.inf, dtype=q.dtype, device=q.device)
    mask = allowed(scores.rule, (q.shape[2], k.shape[2]), scores.kept, scores.masked, q.device)
    bias = _bias_of(scores, q, k.shape[2])
    repeats = q.shape[1] // k.shape[1]
    found = []
    for head in range(q.shape[1]):  # one head at a time: scores are large
        part = q[:, head] @ k[:, head // repeats].transpose(-1, -2) * scores.scale
        of_head = None if bias is None else bias[:, head if bias.shape[1] > 1 else 0]
        part = _capped(part, of_head, scores)
        if mask is not None:
            own = mask[:, head if mask.shape[1] > 1 else 0]
            part = part.masked_fill(~own, float("-inf"))
        found.append(part.amax())
    return torch.stack(found)


def backends(chosen: tuple[bool, bool, bool], name: str) -> AbstractContextManager[Any]:
    """Return a region in which torch's attention takes some of its kernels alone.

    Parameters
    ----------
    chosen : tuple of bool
        Whether flash attention, the other fused kernels, and plain products may be used.
    name : str
        Name of the layer, for errors.
    """
    return nullcontext() if all(chosen) else _some_backends(chosen, name)


@contextmanager
def _some_backends(chosen: tuple[bool, bool, bool], name: str) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    groups = (
        (SDPBackend.FLASH_ATTENTION,),
        (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
        (SDPBackend.MATH,),
    )
    taken = [
        kernel
        for group, is_taken in zip(groups, chosen, strict=True)
        if is_taken
        for kernel in group
    ]
    with sdpa_kernel(taken):
        try:
            yield
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            kernels = ", ".join(kernel.name for kernel in taken)
            message = (
                f"{name}: none of the kernels that are left computes this attention: {kernels}; set NVTE_FLASH_ATTN, "
                "NVTE_FUSED_ATTN or NVTE_UNFUSED_ATTN to 1 before the layer is made"
            )
            raise UnsupportedError(message) from error
