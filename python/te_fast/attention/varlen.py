"""torch's kernel for sequences of several lengths, which also has windows."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from te_fast.attention.scores import Scores


@cache
def _varlen() -> tuple[Any, frozenset[str]]:
    """Return torch's attention on packed sequences and its parameters; None before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, frozenset()
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def heads_problem(q: torch.Tensor, v: torch.Tensor) -> str:
    """Return why flash attention for sequences of several lengths does not take these heads; empty if it does."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return "it is for 16 bits on the GPU"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8 != 0:
        return "it has no such head sizes"
    return ""


def varlen_problem(q: torch.Tensor, v: torch.Tensor, scores: Scores, *, is_self: bool) -> str:
    """Return why torch's kernel for packed sequences cannot be used; empty if it can."""
    rule, problem = scores.rule, heads_problem(q, v)
    if problem:
        return problem
    is_extended = scores.sink is not None or scores.bias.kind != "no_bias" or scores.softcap != 0.0
    if scores.dropout > 0.0 or is_extended:
        return "it has no dropout, sinks, biases and caps"
    if rule.is_banded and not rule.bottom_right and not is_self:
        return "its diagonal ends in the last query and key"
    kernel, takes = _varlen()
    has_window = rule.left >= 0 or rule.right > 0
    if kernel is None or (has_window and "window_size" not in takes):
        return "this torch has none, or none with windows"
    if "scale" not in takes and abs(scores.scale * q.shape[-1] ** 0.5 - 1) > 1e-6:
        return "this torch has none with another scale"
    return ""


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scores: Scores,
) -> torch.Tensor:
    """Attend within sequences that follow each other: ``(tokens, heads, d)`` each.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``(tokens, heads, d)``, and keys and values with groups instead of heads.
    ends : tuple of torch.Tensor
        int32 ``(sequences + 1,)``: cumulative lengths of queries, and of keys.
    longest : tuple of int
        The longest lengths.
    scores : Scores
        How scores are computed; :func:`varlen_problem` has none.
    """
    rule, repeats = scores.rule, q.shape[1] // k.shape[1]
    kernel, takes = _varlen()
    options: dict[str, Any] = {"scale": scores.scale} if "scale" in takes else {}
    if "window_size" in takes:
        options["window_size"] = (rule.left, rule.right)
    else:
        options["is_causal"] = rule.right == 0
    if repeats != 1 and "enable_gqa" in takes:
        options["enable_gqa"] = True
    elif repeats != 1:
        k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
    out: torch.Tensor = kernel(q, k, v, *ends, *longest, **options)
    return out
