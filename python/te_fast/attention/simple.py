"""Self attention with nothing beside it: projection, one call of torch's attention, and views between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast.attention.dot_product import DotProductAttention
from te_fast.attention.multi_head import MultiheadAttention, Rotation, is_fresh
from te_fast.attention.rope import Heads, Waves, split_rotated, waves_of
from te_fast.attention.scores import Scores, attend
from te_fast.runtime.module_hooks import are_called_plainly

#: The permutation from a format to the order of dimensions that torch's attention takes, and its inverse.
_ORDERS = {"sbhd": ((1, 2, 0, 3), (2, 0, 1, 3)), "bshd": ((0, 2, 1, 3), (0, 2, 1, 3))}

#: Arguments of a call without options.
_NOTHING: dict[str, Any] = {
    "softcap": None,
    "inference_params": None,
    "checkpoint_core_attention": False,
    "core_attention_bias_type": "no_bias",
    "core_attention_bias": None,
    "alibi_slopes": None,
    "thd_attention_policies": None,
    "thd_attention_policy_dispatch": "auto",
    "attn_mask_type": None,
    "window_size": None,
    "bottom_right_diagonal": None,
}


def attend_simply(
    attention: MultiheadAttention,
    hidden: torch.Tensor,
    is_first_microbatch: bool | None,
    angles: Rotation,
    given: dict[str, Any],
) -> torch.Tensor | None:
    """Compute :meth:`MultiheadAttention.attend` at less host cost, if the call has no other options.

    Parameters
    ----------
    attention : MultiheadAttention
        The module.
    hidden : torch.Tensor
        The input.
    is_first_microbatch : bool, optional
        As :meth:`te_fast.pytorch.Linear.forward` takes it.
    angles : torch.Tensor or tuple, optional
        Angles.
    given : dict
        Arguments of the attention within.

    Returns
    -------
    torch.Tensor, optional
        Heads merged; None if the call needs more, in which case nothing has been computed.
    """
    modules = attention._modules
    core: Any = modules["core_attention"]
    if (
        attention.attention_type != "self"
        or attention.return_layernorm_output
        or attention.q_norm is not None
    ):
        return None
    scores = simple_scores(core, given)
    if scores is None:
        return None
    first: Any = modules["layernorm_qkv" if attention.input_layernorm else "qkv"]
    mixed: torch.Tensor = first(hidden, is_first_microbatch=is_first_microbatch)
    fmt, heads, interleaved = (
        attention.qkv_format,
        attention._heads,
        attention.rotary_pos_interleaved,
    )
    waves = None
    if angles is not None:
        of_q, of_k = angles if isinstance(angles, tuple) else (angles, angles)
        of_queries = of_keys = waves_of(of_q, mixed.shape, fmt, interleaved=interleaved)
        if of_k is not of_q:
            of_keys = waves_of(of_k, mixed.shape, fmt, interleaved=interleaved)
        waves = of_queries, of_keys
    how: dict[str, Any] = {"interleaved": interleaved, "in_place": is_fresh(first)}
    return attend_product(mixed, waves, heads, fmt, scores, **how)


def attend_product(
    mixed: torch.Tensor,
    waves: tuple[Waves, Waves] | None,
    heads: Heads,
    fmt: str,
    scores: Scores,
    *,
    interleaved: bool = False,
    in_place: bool = False,
    note: Callable[[torch.Tensor, torch.Tensor], Any] | None = None,
) -> torch.Tensor:
    """Attend with queries, keys and values of one product.

    Parameters
    ----------
    mixed : torch.Tensor
        ``(s, b, columns)`` or ``(b, s, columns)``, the product.
    waves : tuple, optional
        Cosines and sines that rotate queries and keys.
    heads : Heads
        What the columns are.
    fmt : {'sbhd', 'bshd'}
        The product's format.
    scores : Scores
        How scores are computed.
    interleaved, in_place : bool
        As of :func:`te_fast.attention.rope.split_rotated`.
    note : Callable, optional
        Takes keys and values, ``(b, groups, s, d)``, and returns the keys and values to attend to.

    Returns
    -------
    torch.Tensor
        Heads merged, in the product's format.
    """
    into, out_of = _ORDERS[fmt]
    q, k, v = split_rotated(
        mixed, waves, heads, interleaved=interleaved, in_place=in_place, order=into
    )
    if note is not None:
        k, v = note(k, v)
    return attend(q, k, v, scores).permute(out_of).flatten(2)


def simple_scores(core: Any, given: dict[str, Any] = _NOTHING) -> Scores | None:
    """Return how scores are computed; None if a call of `core` does more than torch's kernel.

    The caller guarantees that queries, keys and values have fitting shapes and belong to the same tokens.

    Parameters
    ----------
    core : torch.nn.Module
        A :class:`te_fast.pytorch.DotProductAttention`; None is returned for other modules.
    given : dict, optional
        Arguments of the call.
    """
    return _scores_of(core, given) if _is_simple(core, given) else None


def _is_simple(core: Any, given: dict[str, Any]) -> bool:
    """Tell whether a call has no options other than a mask that follows from the tokens' positions."""
    return (
        type(core) is DotProductAttention
        and core.qkv_format in _ORDERS
        and core.softmax_type == "vanilla"
        and not core.return_max_logit
        and all(core._kernels)
        and (core.softcap if given["softcap"] is None else given["softcap"]) == 0.0
        and given["inference_params"] is None
        and not given["checkpoint_core_attention"]
        and given["core_attention_bias_type"] == "no_bias"
        and given["core_attention_bias"] is None
        and given["alibi_slopes"] is None
        and given["thd_attention_policies"] is None
        and given["thd_attention_policy_dispatch"] == "auto"
        and are_called_plainly(core)
    )


def _scores_of(core: DotProductAttention, given: dict[str, Any]) -> Scores | None:
    """Return how scores are computed; None if torch's kernel needs a mask, or dropout a tracker."""
    dropout = core.attention_dropout if core.training else 0.0
    if dropout != 0.0 and core.get_rng_state_tracker is not None:
        return None
    rule = core._rule(given["attn_mask_type"], given["window_size"], given["bottom_right_diagonal"])
    if rule.left >= 0 or rule.right > 0 or rule.kind == "arbitrary" or rule.is_padded:
        return None
    core._check_region()
    return Scores(rule, core.softmax_scale, dropout)
