"""The parameters that a graph reads, whose addresses must not change."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_fast.errors import StateError
from te_fast.tensor.primary import is_quantized


class _Known(NamedTuple):
    #: The parameters of the module that has it.
    owner: dict[str, Any]
    key: str
    parameter: torch.Tensor
    addresses: tuple[int, ...]


_PARTS = ("row", "row_scale", "col", "col_scale")


def _addresses(parameter: Any) -> tuple[int, ...]:
    """Return the addresses of a parameter; for a quantised one, of its bytes and scales, 0 for missing tensors."""
    if not is_quantized(parameter):
        return (parameter.data_ptr(),)
    value = parameter._value
    parts = [getattr(value, name) for name in _PARTS]
    if not value.col_is_valid:
        parts[2] = None
    return tuple(0 if part is None else part.data_ptr() for part in parts)


class Parameters:
    """The parameters of a callable and their addresses.

    Parameters
    ----------
    name : str
        The callable in messages.
    module : torch.nn.Module
        The callable.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name, self._module = name, module
        self._known: list[_Known] = []

    def note(self) -> None:
        """Note the addresses that the captured graphs read.

        The first backward of a warm-up makes column layouts that are missing before it, so this is called behind the
        capture.
        """
        self._known = [
            _Known(part._parameters, key, parameter, _addresses(parameter))
            for part in self._module.modules()
            for key, parameter in part._parameters.items()
            if parameter is not None
        ]

    def check(self) -> None:
        """Raise unless all are the same tensors at the same addresses.

        Raises
        ------
        StateError
            If a parameter or its memory was replaced, or a quantised parameter has lost its column layout.
        """
        for owner, key, parameter, addresses in self._known:
            if owner.get(key) is not parameter or _addresses(parameter) != addresses:
                self._refuse(parameter, key)

    def _refuse(self, parameter: torch.Tensor, key: str) -> None:
        named = self._module.named_parameters()
        name = next((name for name, known in named if known is parameter), key)
        message = (
            f"{self._name}: parameter {name} was replaced or moved since the graph was captured, which reads "
            "the former one; write new values in place (copy_, load_state_dict), or reset() and capture once more"
        )
        raise StateError(message)
