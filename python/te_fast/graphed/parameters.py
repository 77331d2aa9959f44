"""What a graph reads of a module: parameters and buffers, whose addresses must not change, and submodules."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch

from te_fast.errors import StateError
from te_fast.tensor.primary import is_quantized


class _Known(NamedTuple):
    #: The parameters, or the buffers, of the module that has it.
    owner: dict[str, Any]
    key: str
    tensor: torch.Tensor
    addresses: tuple[int, ...]
    #: Whether a gradient was wanted.
    is_trained: bool


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
    """The parameters, buffers and submodules of a callable.

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
        #: All modules, and the submodules that each had at the capture.
        self._submodules: list[tuple[torch.nn.Module, dict[str, Any]]] = []

    def note(self) -> None:
        """Note what the captured graphs read.

        The first backward of a warm-up makes column layouts that are missing before it, so this is called behind the
        capture.
        """
        modules = list(self._module.modules())
        self._known = [
            _Known(owner, key, tensor, _addresses(tensor), tensor.requires_grad)
            for part in modules
            for owner in (part._parameters, part._buffers)
            for key, tensor in owner.items()
            if tensor is not None
        ]
        self._submodules = [(part, dict(part._modules)) for part in modules]

    def check(self, *, wants_gradients: bool) -> None:
        """Raise unless all are the same tensors at the same addresses, in the same submodules.

        Parameters
        ----------
        wants_gradients : bool
            Whether the call is to have a backward.

        Raises
        ------
        StateError
            If a submodule, a parameter, a buffer or its memory was replaced, a quantised parameter has lost its column
            layout, a frozen parameter is to train now, or a parameter with ``main_grad`` is frozen now.
        """
        for part, former in self._submodules:
            if part._modules != former:
                self._refuse_submodules(part, former)
        for owner, key, tensor, addresses, is_trained in self._known:
            if owner.get(key) is not tensor or _addresses(tensor) != addresses:
                self._refuse(tensor, key)
            if wants_gradients and tensor.requires_grad != is_trained:
                self._check_training(tensor)

    def _refuse(self, tensor: torch.Tensor, key: str) -> NoReturn:
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
        message = (
            f"{self._name}: {kind} {self._name_of(tensor, key)} was replaced or moved since the graph was captured, "
            "which reads the former one; write new values in place (copy_, load_state_dict), or reset() and capture "
            "once more"
        )
        raise StateError(message)

    def _name_of(self, tensor: torch.Tensor, key: str = "") -> str:
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        return next((name for name, known in named if known is tensor), key)

    def _check_training(self, tensor: torch.Tensor) -> None:
        """Raise if the backward of the capture is wrong for a parameter that has been frozen since, or trains since."""
        if tensor.requires_grad:
            problem = "requires a gradient, which it did not when the graph was captured: the graph computes none"
        elif getattr(tensor, "main_grad", None) is not None:
            problem = "was frozen since the graph was captured, which still adds its gradient to main_grad"
        else:
            return  # autograd drops the gradient
        message = f"{self._name}: parameter {self._name_of(tensor)} {problem}; reset() and capture once more"
        raise StateError(message)

    def _refuse_submodules(self, part: torch.nn.Module, former: dict[str, Any]) -> NoReturn:
        present: dict[str, Any] = part._modules
        keys = [key for key in {**former, **present} if present.get(key) is not former.get(key)]
        owner = next((name for name, other in self._module.named_modules() if other is part), "")
        names = ", ".join(f"{owner}.{key}".lstrip(".") for key in keys)
        message = (
            f"{self._name}: submodule {names} was added, replaced or removed since the graph was captured, which runs "
            "the former ones; put it back, or reset() and capture once more"
        )
        raise StateError(message)
