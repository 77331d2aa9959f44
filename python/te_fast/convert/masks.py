"""Causal masks of Transformers' models in compiled code and in CUDA graphs.

Transformers passes attention no mask that would only hide later tokens, since attention hides these by itself, faster.
But in a trace, or under capture, Transformers always makes the mask, because a graph of ``torch.export`` must serve
sequences of other lengths. ``torch.compile`` checks the lengths before every call, and a CUDA graph has one length. So
te_fast adds an attention to Transformers: its ``sdpa``, which leaves out such a mask there, too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.compiler import is_compiling

from te_fast.runtime.compiling import is_exporting

#: The attention's name in a model's configuration.
NAME = "sdpa_te_fast"
_FORMER = "sdpa"


def _is_in_export() -> bool:
    return is_exporting()


_is_in_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_fixed_lengths() -> bool:
    """Tell whether this code runs once for calls of the same lengths."""
    if is_compiling():
        return not _is_in_export()
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _hides_only_later_tokens(
    *,
    kv_length: int,
    q_length: int | None = None,
    cache_position: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> bool:
    """Tell whether attention needs no mask; the arguments are those of Transformers' ``sdpa_mask``."""
    if not allow_is_causal_skip or attention_mask is not None:
        return False
    if q_length is None and cache_position is not None:  # before Transformers 5
        q_length = cache_position.shape[0]
    return q_length == kv_length and (local_size is None or kv_length < local_size)


def _without_causal_masks(make: Callable[..., Any]) -> Callable[..., Any]:
    def mask(**given: Any) -> torch.Tensor | None:
        """Make a mask, unless attention needs none."""
        if _has_fixed_lengths() and _hides_only_later_tokens(**given):
            return None
        result: torch.Tensor | None = make(**given)
        return result

    return mask


def _add_attention() -> bool:
    """Add the attention to Transformers. False if this release has no such interface."""
    try:
        masks: Any = importlib.import_module("transformers.masking_utils")
        models: Any = importlib.import_module("transformers.modeling_utils")
        mask, attention = masks.ALL_MASK_ATTENTION_FUNCTIONS, models.ALL_ATTENTION_FUNCTIONS
        if NAME not in mask:
            attention.register(NAME, attention[_FORMER])
            mask.register(NAME, _without_causal_masks(mask[_FORMER]))
    except (ImportError, AttributeError, KeyError):
        return False
    return True


def _configurations(attentions: Iterable[Any], how: str) -> list[Any]:
    """Return the Transformers configurations of attention modules that have an attention of this name, once each."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return []
    kinds = getattr(transformers, "PretrainedConfig", ())
    found = [getattr(attention, "config", None) for attention in attentions]
    ours = [config for config in found if isinstance(config, kinds)]
    return list(
        {id(config): config for config in ours if config._attn_implementation == how}.values()
    )


def leave_out(attentions: Iterable[Any]) -> bool:
    """Let models leave out causal masks in compiled code; return whether any model does so now.

    Parameters
    ----------
    attentions : iterable of torch.nn.Module
        The models' attention modules.
    """
    found = _configurations(attentions, _FORMER)
    if not found or not _add_attention():
        return False
    for config in found:
        config._attn_implementation = NAME
    return True


def restore(attentions: Iterable[Any]) -> None:
    """Give models their attention back."""
    for config in _configurations(attentions, NAME):
        config._attn_implementation = _FORMER
