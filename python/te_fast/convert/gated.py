"""A feed-forward block whose first weight is two parameters: the activated half and its factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast.layers.layernorm_mlp import LayerNormMLP
from te_fast.layers.parts import concatenate
from te_fast.runtime import native

_HALVES = ("gate", "up")
_NAMES = ("gate_weight", "up_weight", "gate_bias", "up_bias")


class GatedMLP(LayerNormMLP):
    """:class:`te_fast.pytorch.LayerNormMLP` of models that keep the halves of the first weight apart.

    Parameters
    ----------
    hidden_size, ffn_hidden_size : int
        Sizes of input and result, and of either half.
    **options
        Of ``LayerNormMLP``, with a gated activation.

    Attributes
    ----------
    gate_weight, up_weight : torch.nn.Parameter
        ``(ffn_hidden_size, hidden_size)``: the half that is activated, and the half that multiplies it.
    gate_bias, up_bias : torch.nn.Parameter
        ``(ffn_hidden_size,)``, if there are biases.
    """

    def _make_parameters(self, options: dict[str, Any]) -> None:
        super()._make_parameters(options)
        for kind in ("weight", "bias") if self.use_bias else ("weight",):
            whole = getattr(self, f"fc1_{kind}")
            self.register_parameter(f"fc1_{kind}", None)
            del self._parameters[f"fc1_{kind}"]
            for half, part in zip(_HALVES, whole.detach().chunk(2), strict=True):
                self.register_parameter(f"{half}_{kind}", torch.nn.Parameter(part))

    def _append_linears(
        self, program: native.Program, observe: Callable[[], None], *, biased: bool
    ) -> None:
        hidden, ffn, rows = self.hidden_size, self.ffn_hidden_size, self._fc1_rows
        handles, parameters = self._handles, self._parameters
        weights, biases = ([f"{half}_{kind}" for half in _HALVES] for kind in ("weight", "bias"))
        observe()
        handle = handles["fc1_weight"]
        program.linear("fc1", handle, parameters, "fc1_weight", hidden, rows, weights)
        if self.use_bias:
            program.bias("fc1_bias", parameters, "fc1_bias", rows, biases)
        program.activation("activation", self.activation, **self._activation_floats())
        observe()
        program.linear("fc2", handles["fc2_weight"], parameters, "fc2_weight", ffn, hidden)
        if biased:
            program.bias("fc2_bias", parameters, "fc2_bias", hidden)

    def has_plain_halves(self) -> bool:
        """Tell whether a program can read the halves of weight and bias as one."""
        own = self._parameters
        for name in _NAMES if self.use_bias else _NAMES[:2]:
            part = own[name]
            if type(part) is not torch.nn.Parameter or part.is_inference():
                return False
        return True

    def _is_whole(self) -> bool:
        return False

    def _used_parameters(
        self, is_first_microbatch: bool | None
    ) -> tuple[dict[str, torch.Tensor], int | None]:
        halves: list[Any] = [getattr(self, f"{half}_weight") for half in _HALVES]
        whole, version = concatenate(halves, self, overwrite=False)  # type: ignore[arg-type]
        if version is not None and not self.fc2_weight.is_inference():
            version += self.fc2_weight._version  # one number for all weights of the program
        found = {name: getattr(self, name) for name in self._norm_names()} | {"fc1_weight": whole}
        if self.use_bias:
            found["fc1_bias"] = torch.cat([getattr(self, f"{half}_bias") for half in _HALVES])
        names = ("fc2_weight", "fc2_bias") if self.apply_bias else ("fc2_weight",)
        return found | {name: getattr(self, name) for name in names}, version

    def _traced_names(self) -> tuple[tuple[str, ...], ...]:
        norms = [(name,) for name in self._norm_names()]
        kinds = ("weight", "bias") if self.use_bias else ("weight",)
        halves = [tuple(f"{half}_{kind}" for half in _HALVES) for kind in kinds]
        names = ("fc2_weight", "fc2_bias") if self.apply_bias else ("fc2_weight",)
        return (*norms, *halves, *[(name,) for name in names])
