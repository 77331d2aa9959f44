"""Linear layers under a recipe with ``backward_override``: FP8 forward, high-precision backward."""

from __future__ import annotations

import threading
from typing import Any

import torch

from te_fast.pytorch import _ops

__all__ = ["OverriddenLinear"]


class OverriddenLinear:
    """A linear layer as a program of one op.

    Parameters
    ----------
    name : str
        The layer's.
    in_features, out_features : int
        Its sizes.
    bias : bool
        Whether a bias is added.
    """

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool) -> None:
        self.handle = _ops.WeightHandle(name)
        self.program = _ops.Program(name)
        self._parameters: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._version: int | None = None
        sizes = in_features, out_features
        self.program.linear("linear", self.handle, self._parameters, "weight", *sizes)
        if bias:
            self.program.bias("bias", self._parameters, "bias", out_features)

    def __call__(
        self,
        layer: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        version: int | None,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        """Apply it; `version` stands in for that of a weight that has none of its own."""
        if type(x) is not torch.Tensor:
            x = x.as_subclass(torch.Tensor)
        with self._lock:
            if version != self._version:
                self.handle.drop_weight_cache()
                self._version = version
            self._parameters["weight"] = weight
            if bias is not None:
                self._parameters["bias"] = bias
            try:
                y: torch.Tensor = _ops.program_apply(
                    self.program, layer, x, (), is_first_microbatch
                )
            finally:
                self._parameters.clear()
        return y
