"""The flag on the device by which graphs skip the quantisation of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from te_fast.runtime.global_state import FP8GlobalStateManager, autocast_state

#: Where a flag notes what it was filled with last: torch's version of it then, and the value.
_FILLED = "_te_fast_filled"


class SkipFlag:
    """The flag that the graphs of one capture read; or none.

    Parameters
    ----------
    is_read : bool
        Whether they read it.
    """

    def __init__(self, *, is_read: bool) -> None:
        self._is_read = is_read
        self._tensor: torch.Tensor | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let layers that are captured within read it, or none."""
        if self._is_read:
            FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
            self._tensor = autocast_state.skip_fp8_weight_update_tensor
            yield
            return
        former = autocast_state.skip_fp8_weight_update_tensor
        autocast_state.skip_fp8_weight_update_tensor = None
        try:
            yield
        finally:
            autocast_state.skip_fp8_weight_update_tensor = former

    def set(self, skip: bool) -> None:
        """Fill it, unless it says that already.

        Parameters
        ----------
        skip : bool
            Whether graphs use the weights of an earlier replay.
        """
        tensor = self._tensor
        if tensor is None or getattr(tensor, _FILLED, None) == (tensor._version, skip):
            return
        tensor.fill_(skip)
        # Under inference_mode torch counts no versions, and another fill would not be seen.
        filled = None if torch.is_inference_mode_enabled() else (tensor._version, skip)
        setattr(tensor, _FILLED, filled)
