"""The parameters that a graph reads: they must be where they were."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_fast.errors import StateError


class _Known(NamedTuple):
    #: The parameters of the module that has it.
    owner: dict[str, Any]
    key: str
    parameter: torch.Tensor
    address: int


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
        self._known = [
            _Known(part._parameters, key, parameter, parameter.data_ptr())
            for part in module.modules()
            for key, parameter in part._parameters.items()
            if parameter is not None
        ]

    def check(self) -> None:
        """Raise unless all are the same tensors at the same addresses.

        Raises
        ------
        StateError
            If one was replaced, or its memory exchanged.
        """
        for owner, key, parameter, address in self._known:
            if owner.get(key) is not parameter or parameter.data_ptr() != address:
                self._refuse(parameter, key)

    def _refuse(self, parameter: torch.Tensor, key: str) -> None:
        named = self._module.named_parameters()
        name = next((name for name, known in named if known is parameter), key)
        message = (
            f"{self._name}: parameter {name} was replaced or moved since the graph was captured, which reads "
            "the former one; write new values in place (copy_, load_state_dict), or reset() and capture once more"
        )
        raise StateError(message)
