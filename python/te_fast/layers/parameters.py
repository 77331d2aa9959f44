"""How layers refuse arguments, and make, initialise and mark their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import DtypeError, UnsupportedError
from te_fast.runtime.arguments import check_functions as check_functions
from te_fast.runtime.arguments import check_sizes as check_sizes  # layers take all checks from here
from te_fast.runtime.device import check_device
from te_fast.tensor.primary import initialise_quantized, is_quantized

if TYPE_CHECKING:
    from te_fast.layers.base import TransformerEngineBaseModule

Init = Callable[[torch.Tensor], Any]

_USERBUFFERS = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "symmetric_ar_type",
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def refuse(layer: str, arguments: dict[str, bool]) -> None:
    """Raise for the first argument that is set.

    Raises
    ------
    UnsupportedError
        Naming it.
    """
    for argument, is_set in arguments.items():
        if is_set:
            message = f"{layer}: {argument} is not supported yet; leave it at its default"
            raise UnsupportedError(message)


def refuse_userbuffers(layer: str, arguments: Mapping[str, Any]) -> None:
    """Raise for the first argument that asks for collectives other than those of ``torch.distributed``.

    Raises
    ------
    UnsupportedError
        Naming it.
    """
    refuse(layer, {name: arguments.get(name) not in (None, False) for name in _USERBUFFERS})


def options_of(
    params_dtype: torch.dtype | None, device: torch.device | str | None, layer: str
) -> dict[str, Any]:
    """Return type and device that parameters are made with.

    Raises
    ------
    DtypeError
        If layers cannot compute in the type.
    DeviceError
        If `device` is a GPU and none can be used.
    """
    dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
    if dtype not in _DTYPES:
        message = (
            f"{layer}: params_dtype must be torch.float32, float16, bfloat16 or float64, got {dtype!r}; "
            "FP8 copies of such parameters are made inside of te_fast.pytorch.autocast"
        )
        raise DtypeError(message)
    return {"device": check_device(device, layer), "dtype": dtype}


def normal(weight: torch.Tensor) -> None:
    """Initialise a weight as Transformer Engine's modules do."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def constant(value: float) -> Init:
    """Return a function that fills a parameter with a value."""
    return lambda parameter: torch.nn.init.constant_(parameter, value)


def held(layer: TransformerEngineBaseModule, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that a layer holds; a parameter on the meta device gets memory first.

    A name may have no parameter: users replace parameters by None, by views of others, or by parametrizations. These
    are not the layer's to initialise.

    Parameters
    ----------
    layer : TransformerEngineBaseModule
        The layer.
    names : Iterable of str
        Names of its parameters.
    """
    for name in names:
        parameter = layer._parameters.get(name)
        if parameter is None:
            continue
        if parameter.is_meta:
            device = check_device("cuda" if torch.cuda.is_available() else "cpu", layer.name)
            made = torch.empty_like(parameter, device=device)
            parameter = torch.nn.Parameter(made, requires_grad=parameter.requires_grad)
            layer.register_parameter(name, parameter)
        yield name, parameter


def initialise(layer: Any, parameter: torch.Tensor, init: Init | None, *, forks: bool) -> None:
    """Initialise a parameter in place.

    Parameters
    ----------
    layer : TransformerEngineBaseModule
        With ``get_rng_state_tracker`` and ``rng_tracker_name``.
    parameter : torch.Tensor
        The parameter.
    init : Callable, optional
        The function that initialises it; :func:`normal` by default.
    forks : bool
        Whether the layer's random number generator is forked for it, as for weights.

    Raises
    ------
    DtypeError
        If `init` or the layer's ``get_rng_state_tracker`` cannot be called.
    """
    tracker = layer.get_rng_state_tracker if forks else None
    check_functions(layer.name, init_method=init, get_rng_state_tracker=tracker)
    init = init or normal
    if is_quantized(parameter):
        init = partial(initialise_quantized, init=init)
    with torch.no_grad():
        if tracker is None:
            init(parameter)
            return
        names = () if layer.rng_tracker_name is None else (layer.rng_tracker_name,)
        with tracker().fork(*names):
            init(parameter)
