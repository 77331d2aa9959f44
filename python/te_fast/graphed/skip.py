"""The flag on the device by which graphs skip the quantisation of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from te_fast.runtime.global_state import autocast_state


class SkipFlag:
    """The flag of one capture, which only its graphs read and only its callables set.

    Parameters
    ----------
    device : torch.device, optional
        Device of the flag; by default there is no flag.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._tensor: torch.Tensor | None = None
        self._value: bool | None = None
        if device is not None:
            with torch.inference_mode(mode=False):
                self._tensor = torch.zeros(1, dtype=torch.float32, device=device)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let layers that are captured within read the flag, or no flag."""
        former = autocast_state.skip_fp8_weight_update_tensor
        autocast_state.skip_fp8_weight_update_tensor = self._tensor
        try:
            yield
        finally:
            autocast_state.skip_fp8_weight_update_tensor = former

    def set(self, skip: bool) -> None:
        """Set the flag, unless it has the value already.

        Parameters
        ----------
        skip : bool
            Whether graphs use the weights of an earlier replay.
        """
        if self._tensor is not None and skip is not self._value:
            self._tensor.fill_(skip)
            self._value = skip
