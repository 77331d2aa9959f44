"""Cosines and sines of a model's own positions, which Transformers computes again in every call."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.compiler import is_compiling

from te_fast.attention.rope import LastWaves
from te_fast.convert.forwards import OwnedForward

#: Kinds of embeddings whose frequencies never depend on the number of tokens.
_CONSTANT = ("default", "linear", "llama3", "yarn")


class _Call(threading.local):
    """The call that a thread is in: whether the model numbers the tokens itself."""

    has_own_positions = False


_call = _Call()


@contextmanager
def positions_of(*, model: bool) -> Iterator[None]:
    """Note for a while whether the model numbers the tokens itself: calls of one length then have equal positions."""
    before, _call.has_own_positions = _call.has_own_positions, model
    try:
        yield
    finally:
        _call.has_own_positions = before


def is_constant(module: Any) -> bool:
    """Tell whether a module is a rotary embedding of Transformers whose results depend on positions alone.

    Parameters
    ----------
    module : torch.nn.Module
        Any module.
    """
    if getattr(module, "rope_type", None) not in _CONSTANT or module._parameters:
        return False
    names = list(inspect.signature(type(module).forward).parameters)
    return names == ["self", "x", "position_ids"] and isinstance(
        module._buffers.get("inv_freq"), torch.Tensor
    )


class RotaryForward(OwnedForward):
    """A rotary embedding of Transformers that keeps the last cosines and sines of the model's own positions."""

    what = "rotary embedding"

    def __init__(self, module: torch.nn.Module) -> None:
        self._owner = weakref.ref(module)
        self._last = LastWaves()
        self.__signature__ = inspect.signature(module.forward)

    def layers(self) -> dict[str, Any]:
        """Return nothing: the embedding has no layers."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave cosines and sines out."""
        state = super().__getstate__()
        del state["_last"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Refer to the copy's own module."""
        super().__setstate__(state)
        self._last = LastWaves()

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """Return cosines and sines in the type of `x`."""
        owner: Any = self._owner()
        if is_compiling() or not _call.has_own_positions:
            return type(owner).forward(owner, x, position_ids)
        key = (x.dtype, x.device, position_ids.shape, getattr(owner, "attention_scaling", None))
        return self._last.of(
            (owner.inv_freq,), key, lambda: type(owner).forward(owner, x, position_ids)
        )
