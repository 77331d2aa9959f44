"""Delayed scaling's scales and histories of a converted model, which its state_dict does not contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from te_fast.convert.forwards import Forward, Tied
from te_fast.errors import DtypeError, StateError
from te_fast.state import extra_state


def converted(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Forward]]:
    """Yield names and modules that compute by te_fast's layers, and how."""
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Forward):
            yield name, module, forward


def _layers(model: torch.nn.Module) -> dict[str, Tied]:
    found: dict[str, Tied] = {}
    for name, _, forward in converted(model):
        for part, tied in forward.layers().items():
            found[".".join(filter(None, (name, part)))] = tied
    if not found:
        message = "nothing of this model has been converted; call te_fast.convert(model) first"
        raise StateError(message)
    return found


def scaling_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the scales and histories of a converted model under delayed scaling, to be saved beside its state.

    The keys of a converted model's ``state_dict`` do not change, so the scales are saved separately.

    Parameters
    ----------
    model : torch.nn.Module
        A model that :func:`convert` has converted.

    Returns
    -------
    dict of str to torch.Tensor
        By layer, bytes on the CPU in the format of ``_extra_state``; empty where delayed scaling has not run.

    Raises
    ------
    StateError
        If no module of the model has been converted.

    See Also
    --------
    load_scaling_state : Restores the scales.

    Examples
    --------
    >>> import torch, te_fast
    >>> import te_fast.pytorch as te
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    >>> report = te_fast.convert(model)
    >>> with te.autocast():
    ...     loss = model(torch.ones(16, 32)).sum()
    >>> list(te_fast.convert.scaling_state(model)), list(model.state_dict())
    (['0'], ['0.weight', '0.bias'])
    """
    states = {name: tied.layer.get_extra_state() for name, tied in _layers(model).items()}
    return {name: state for name, state in states.items() if extra_state.unpack(state, layer=name)}


def load_scaling_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what :func:`scaling_state` returned, in a model that is converted alike.

    Parameters
    ----------
    model : torch.nn.Module
        A model that :func:`convert` has converted, with its parameters loaded.
    state : mapping of str to torch.Tensor
        By layer.

    Raises
    ------
    StateError
        If a layer is missing, or a state is damaged or belongs to another layer. Nothing has changed then.
    DtypeError
        If `state` is not a mapping.

    See Also
    --------
    scaling_state : Returns such a state.

    Examples
    --------
    >>> import copy, torch, te_fast
    >>> import te_fast.pytorch as te
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    >>> report = te_fast.convert(model)
    >>> with te.autocast():
    ...     loss = model(torch.ones(16, 32)).sum()
    >>> other = torch.nn.Sequential(torch.nn.Linear(32, 32))
    >>> report = te_fast.convert(other)
    >>> te_fast.convert.load_scaling_state(other, te_fast.convert.scaling_state(model))
    """
    if not isinstance(state, Mapping):
        message = f"load_scaling_state: expected a mapping of names, got {type(state).__name__}"
        raise DtypeError(message)
    layers = _layers(model)
    for name, value in state.items():
        if name not in layers:
            message = (
                f"load_scaling_state: there is no converted layer {name!r}; convert the model in the same way as the "
                "model of the state"
            )
            raise StateError(message)
        read = extra_state.unpack(value, layer=name)
        layer = layers[name].layer
        got = None if read is None else (read.scale_fwd.numel(), read.scale_bwd.numel())
        expected = layer._state_sizes()
        if got not in (None, expected):
            message = f"load_scaling_state: {name} has scales of {expected} tensors, the state has scales of {got}"
            raise StateError(message)
    for name, value in state.items():
        layers[name].refresh()
        layers[name].layer.set_extra_state(value)
