"""Causal masks of Transformers' models.

Transformers passes attention no mask that would only hide later tokens, since attention hides these by itself, faster.
But position numbers, even the model's own, could be those of packed sequences. To find that out, a forward waits for
the GPU. In a trace, or under capture, where it cannot wait, Transformers makes the mask.

A converted model that numbers the tokens itself passes an empty mask to Transformers, which hands a mask of four
dimensions to the decoder layers as it is. The converted layers take the empty mask for none. A graph of
``torch.export`` must serve sequences of other lengths, so that it gets Transformers' mask.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import Any

import torch
from torch.compiler import is_compiling

from te_fast.convert.forwards import DecoderForward, OwnedForward
from te_fast.convert.known import implementation_of
from te_fast.convert.rotary import positions_of
from te_fast.runtime.compiling import is_exporting

#: Arguments by which a caller numbers or hides tokens; earlier releases of Transformers take ``cache_position``.
_OF_CALLERS = ("attention_mask", "position_ids", "cache_position", "past_key_values")


def makes_masks(model: Any) -> bool:
    """Tell whether a module is a model of Transformers that makes the same masks for all of its decoder layers.

    Parameters
    ----------
    model : torch.nn.Module
        Any module.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    if not hasattr(sys.modules.get(type(model).__module__), "create_causal_mask"):
        return False
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_windows = any(
        getattr(config, name, None) is not None
        for name in ("sliding_window", "attention_chunk_size")
    )
    how = getattr(config, "_attn_implementation", None)
    is_plain = kinds == {"full_attention"} and not has_windows and how == "sdpa"
    return is_plain and isinstance(getattr(model, "layers", None), torch.nn.ModuleList)


class CausalForward(OwnedForward):
    """A model of Transformers, all of whose decoder layers are converted."""

    what = "causal mask"

    def __init__(self, model: torch.nn.Module) -> None:
        self._owner = weakref.ref(model)
        self.__signature__ = inspect.signature(model.forward)

    def layers(self) -> dict[str, Any]:
        """Return nothing: the layers are the decoder layers' own."""
        return {}

    def __call__(self, *places: Any, **given: Any) -> Any:
        """Run the model's own forward, with an empty mask if attention needs none."""
        owner: Any = self._owner()
        if is_compiling() and is_exporting():
            return type(owner).forward(owner, *places, **given)
        needs_none = self._needs_no_mask(owner, places, given)
        if needs_none:
            given["attention_mask"] = torch.empty((1, 1, 0, 0), dtype=torch.bool)
        if is_compiling():
            return type(owner).forward(owner, *places, **given)
        with positions_of(model=needs_none):
            return type(owner).forward(owner, *places, **given)

    def _needs_no_mask(self, owner: Any, places: tuple[Any, ...], given: dict[str, Any]) -> bool:
        if len(places) > 1 or not given.get("is_causal", getattr(owner.config, "is_causal", True)):
            return False
        if implementation_of(owner) != "sdpa":
            return False
        for name in _OF_CALLERS:
            if given.get(name) is not None:
                return False
        return all(
            [isinstance(layer.__dict__.get("forward"), DecoderForward) for layer in owner.layers]
        )
