"""Self attention with nothing beside it: projection, one call of torch's attention, and views between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_fast.attention.arguments import angles_of_heads
from te_fast.attention.dot_product import DotProductAttention
from te_fast.attention.multi_head import MultiheadAttention, Rotation, is_fresh
from te_fast.attention.rope import Heads, Waves, split_rotated, waves_of
from te_fast.attention.scores import Scores, attend
from te_fast.runtime.module_hooks import are_called_plainly

#: The permutation from a format to the order of dimensions that torch's attention takes, and its inverse.
ORDERS = {"sbhd": ((1, 2, 0, 3), (2, 0, 1, 3)), "bshd": ((0, 2, 1, 3), (0, 2, 1, 3))}

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


class SimpleCall(NamedTuple):
    """A call of self attention without options.

    Attributes
    ----------
    first : torch.nn.Module
        The layer that computes the product of queries, keys and values.
    waves : tuple, optional
        Cosines and sines that rotate queries and keys.
    heads : Heads
        The product's columns.
    fmt : {'sbhd', 'bshd'}
        The input's format.
    scores : Scores
        How scores are computed.
    interleaved : bool
        Rotate adjacent channels together.
    """

    first: Any
    waves: tuple[Waves, Waves] | None
    heads: Heads
    fmt: str
    scores: Scores
    interleaved: bool

    def attend(self, hidden: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """Compute :meth:`MultiheadAttention.attend` at less host cost: heads merged."""
        mixed: torch.Tensor = self.first(hidden, is_first_microbatch=is_first_microbatch)
        how: dict[str, Any] = {"interleaved": self.interleaved, "in_place": is_fresh(self.first)}
        return attend_product(mixed, self.waves, self.heads, self.fmt, self.scores, **how)

    def waves_of(self, hidden: torch.Tensor, angles: Any) -> tuple[Waves, Waves]:
        """Return cosines and sines of other angles, for queries and for keys."""
        return _waves_of(hidden, angles, self.fmt, interleaved=self.interleaved)

    def orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the orders of dimensions from heads in the format to those of torch's attention, and back."""
        return ORDERS[self.fmt]


def _waves_of(
    hidden: torch.Tensor, angles: Any, fmt: str, *, interleaved: bool
) -> tuple[Waves, Waves]:
    of_q, of_k = angles_of_heads(angles)
    of_queries = of_keys = waves_of(of_q, hidden.shape, fmt, interleaved=interleaved)
    if of_k is not of_q:
        of_keys = waves_of(of_k, hidden.shape, fmt, interleaved=interleaved)
    return of_queries, of_keys


#: The attributes and children that :func:`simple_call` reads of a layer of attention, and of the attention within.
NOTED_OF_ATTENTION = (
    *("attention_type", "return_layernorm_output", "q_norm", "k_norm", "qkv_format", "_heads"),
    *(
        "rotary_pos_interleaved",
        "input_layernorm",
        "layernorm_qkv",
        "qkv",
        "proj",
        "core_attention",
    ),
)
NOTED_OF_CORE = (
    *(
        "qkv_format",
        "softmax_type",
        "_context",
        "return_max_logit",
        "_kernels",
        "softcap",
        "training",
        "attn_mask_type",
        "window_size",
        "bottom_right_diagonal",
    ),
    *("attention_dropout", "get_rng_state_tracker", "softmax_scale"),
)


def simple_call(
    attention: MultiheadAttention, hidden: torch.Tensor, angles: Rotation, given: dict[str, Any]
) -> SimpleCall | None:
    """Return a call of self attention, if it has no options; None if it has.

    Parameters
    ----------
    attention : MultiheadAttention
        The module.
    hidden : torch.Tensor
        The input.
    angles : torch.Tensor or tuple, optional
        Angles.
    given : dict
        Arguments of the attention within.
    """
    modules = attention._modules
    if (
        attention.attention_type != "self"
        or attention.return_layernorm_output
        or attention.q_norm is not None
    ):
        return None
    scores = simple_scores(modules["core_attention"], given)
    if scores is None:
        return None
    fmt, interleaved = attention.qkv_format, attention.rotary_pos_interleaved
    waves = None
    if angles is not None:
        waves = _waves_of(hidden, angles, fmt, interleaved=interleaved)
    first = modules["layernorm_qkv" if attention.input_layernorm else "qkv"]
    return SimpleCall(first, waves, attention._heads, fmt, scores, interleaved)


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
    into, out_of = ORDERS[fmt]
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
        and core.qkv_format in ORDERS
        and core.softmax_type == "vanilla"
        and core._context is None
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
