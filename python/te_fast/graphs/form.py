"""Layers in traces: a layer's form, and its forward as an operator.

A trace guards every attribute that it reads, and every class that it looks a method up in. The compiled function checks
these guards at each call. So a trace reads the tensors of a layer and one text, the layer's form; everything that the
form tells is a constant of the trace. A layer has another form after a change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from te_fast.runtime import recompute
from te_fast.runtime.inputs import check_input
from te_fast.runtime.parts import joined
from te_fast.tensor.primary import as_read

if TYPE_CHECKING:
    from collections.abc import Iterable


class Form(NamedTuple):
    """What traces know of a layer beside its tensors."""

    #: The argument that gives the input's last dimension, and that dimension.
    features: tuple[str, int]
    #: Names of the program's parameters, in order; several names are the parts of one.
    parameters: tuple[tuple[str, ...], ...]
    #: The parameters that belong to other modules, and their names in these.
    tied: tuple[tuple[str, str], ...]
    #: The path of calls outside of FP8, as of ``ProgramLayer._outside_fp8``.
    outside_fp8: str
    is_shared: bool
    is_recomputed: bool
    returns_bias: bool


#: Forms by their texts.
_forms: dict[str, Form] = {}


def text_of(form: Form) -> str:
    """Register a form; return its text, by which traces find it."""
    text = repr(tuple(form))
    _forms.setdefault(text, form)
    return text


def _form_of(text: str) -> Form:
    return _forms[text]


# torch.compiler.assume_constant_result sets this attribute, too, but imports torch._dynamo.
_form_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def form_of(layer: Any) -> Form:
    """Return a layer's form in a trace."""
    return _form_of(layer._traced.form)


def parameters_of(
    layer: Any, form: Form, names: Iterable[tuple[str, ...]]
) -> list[tuple[torch.Tensor, ...]]:
    """Return the parts of a layer's parameters in a trace."""
    tied = dict(form.tied)
    return [tuple([_parameter(layer, name, tied) for name in parts]) for parts in names]


def _parameter(layer: Any, name: str, tied: dict[str, str]) -> Any:
    if name in tied:
        return layer._tied_modules[name]._parameters[tied[name]]
    # A sharded or parametrised layer has another attribute instead.
    has_it = layer._traced.owner_has(name)
    return layer._parameters[name] if has_it else getattr(layer, name)


def forward_traced(
    layer: Any, inp: Any, is_first_microbatch: bool | None, *extras: torch.Tensor
) -> Any:
    """Compute a layer's forward as an operator, which a tracer sees.

    Parameters
    ----------
    layer : torch.nn.Module
        A ``ProgramLayer``.
    inp : torch.Tensor
        Its input.
    is_first_microbatch : bool, optional
        As of :class:`te_fast.pytorch.Linear`.
    extras : torch.Tensor
        Further inputs of its program.

    Returns
    -------
    torch.Tensor or tuple
        The layer's result.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the input does not fit.
    """
    if is_first_microbatch is not None:
        is_first_microbatch = bool(is_first_microbatch)
    form = form_of(layer)
    inp = as_read(inp)
    params = parameters_of(layer, form, form.parameters)
    params = [tuple([as_read(part) for part in one]) for one in params]
    parts = [part for one in params for part in one]
    check_input(layer, inp, *form.features, parts[0].device)
    kind = inp.device.type
    if torch.is_autocast_enabled(kind):
        x = inp.to(torch.get_autocast_dtype(kind))
    else:
        x = inp
        for parameter in parts:
            if parameter.dtype != inp.dtype:
                layer._check_types(inp)
    if form.is_shared:
        out = layer._run_traced_on_ranks(x, params, is_first_microbatch)
    else:
        out = _run(layer, form, x, params, is_first_microbatch, extras)
    return layer._with_bias(out) if form.returns_bias else out


def _run(
    layer: Any,
    form: Form,
    x: torch.Tensor,
    params: list[tuple[torch.Tensor, ...]],
    is_first_microbatch: bool | None,
    extras: tuple[torch.Tensor, ...],
) -> Any:
    from te_fast.graphs import operators
    from te_fast.graphs.region import key_of_region

    if form.outside_fp8 == "torch" and not key_of_region()[0]:
        return functional.linear(x, *[joined(list(parts)).to(x.dtype) for parts in params])
    given = (layer._traced, layer, x, extras, tuple(params), is_first_microbatch)
    if form.is_recomputed and torch.is_grad_enabled():
        return recompute.checkpoint_in_graph(operators.apply, given, {}, {})
    return operators.apply(*given)
