"""Activation functions with the names of Transformer Engine's extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast import dispatch
from te_fast.dispatch import ActivationFunction, ActivationOutputs
from te_fast.tex.errors import ExtensionError, check_rows
from te_fast.tex.outputs import check_quantizer, finished, fused, rows_of

_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu")


def _check(op: str, function: ActivationFunction, x: torch.Tensor, quantizer: Any) -> None:
    check_rows(op, input=x)
    check_quantizer(op, quantizer)
    if x.shape[-1] % function.halves:
        message = f"{op}: the input must have an even number of columns, got shape {list(x.shape)}"
        raise ExtensionError(message)


def _outputs(
    x: torch.Tensor, shape: torch.Size, quantizer: Any
) -> tuple[ActivationOutputs, dict[str, Any], Any]:
    """Return the memory of a result, the scale of its cast, and the quantised tensor if there is a cast."""
    cast = fused(quantizer, shape, x)
    if cast is None:
        plain = torch.empty(rows_count(shape), shape[-1], dtype=x.dtype, device=x.device)
        return ActivationOutputs(plain), {}, None
    parts = cast.rowwise_data, cast.columnwise_data, cast.scale_inv
    return ActivationOutputs(None, *parts), {"scale": cast.scale, "amax": cast.amax}, cast.made


def rows_count(shape: torch.Size) -> int:
    """Return the number of rows of a shape."""
    return shape[:-1].numel()


def _result(out: ActivationOutputs, made: Any, shape: torch.Size, quantizer: Any) -> Any:
    if made is not None:
        return made
    assert out.high_precision is not None
    return finished(out.high_precision.view(shape), quantizer)


def forward(
    op: str,
    function: ActivationFunction,
    x: torch.Tensor,
    quantizer: Any,
    row_scale: torch.Tensor | None = None,
) -> Any:
    """Apply a function, and quantise the result.

    Parameters
    ----------
    op : str
        Name for errors.
    function : ActivationFunction
        The function.
    x : torch.Tensor
        ``(..., halves * cols)``.
    quantizer : Quantizer or None
        Quantises the result.
    row_scale : torch.Tensor, optional
        Factors of the rows.
    """
    _check(op, function, x, quantizer)
    shape = torch.Size((*x.shape[:-1], x.shape[-1] // function.halves))
    out, scales, made = _outputs(x, shape, quantizer)
    dispatch.activation(rows_of(x), function, out, row_scale=row_scale, **scales)
    return _result(out, made, shape, quantizer)


def backward(
    op: str,
    function: ActivationFunction,
    grad: torch.Tensor,
    x: torch.Tensor,
    quantizer: Any,
    sums: dict[str, torch.Tensor] | None = None,
    row_scale: torch.Tensor | None = None,
) -> Any:
    """Differentiate a function, and quantise the gradient of its input.

    Parameters
    ----------
    op, function, x, quantizer, row_scale
        As of :func:`forward`.
    grad : torch.Tensor
        Gradient of the result.
    sums : dict, optional
        More outputs of the kernel, by their names in :class:`te_fast.dispatch.ActivationOutputs`.
    """
    _check(op, function, x, quantizer)
    check_rows(op, grad=grad)
    out, scales, made = _outputs(x, x.shape, quantizer)
    out = out._replace(**(sums or {}))
    dispatch.activation_backward(
        rows_of(grad), rows_of(x), function, out, row_scale=row_scale, **scales
    )
    return _result(out, made, x.shape, quantizer)


def _make_forward(name: str) -> Callable[..., Any]:
    function = ActivationFunction(name)

    def apply(input: torch.Tensor, quantizer: Any) -> Any:
        return forward(name, function, input, quantizer)

    half = ", of which the first half is activated and the second half multiplied with it"
    apply.__doc__ = f"""Apply ``{name}`` to a tensor ``(..., cols)``{half if function.halves == 2 else ""}.

    Parameters
    ----------
    input : torch.Tensor
        float32, float16 or bfloat16.
    quantizer : Quantizer or None
        Quantises the result.

    Returns
    -------
    torch.Tensor or QuantizedTensor
        ``(..., cols / {function.halves})``.
    """
    return _named(apply, name)


def _make_backward(name: str) -> Callable[..., Any]:
    function = ActivationFunction(name)

    def apply(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
        return backward(f"d{name}", function, grad, fwd_input, quantizer)

    apply.__doc__ = f"""Differentiate ``{name}``.

    Parameters
    ----------
    grad : torch.Tensor
        Gradient of the result.
    fwd_input : torch.Tensor
        The input, of the same type.
    quantizer : Quantizer or None
        Quantises the gradient of the input.

    Returns
    -------
    torch.Tensor or QuantizedTensor
        In the input's shape.
    """
    return _named(apply, f"d{name}")


def _make_with_bias(name: str) -> Callable[..., Any]:
    function, op = ActivationFunction(name), f"dbias_d{name}"

    def apply(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
        check_rows(op, grad=grad, fwd_input=fwd_input)
        sums = torch.zeros(fwd_input.shape[-1], dtype=fwd_input.dtype, device=fwd_input.device)
        if fwd_input.numel() == 0:
            return [sums, backward(op, function, grad, fwd_input, quantizer)]
        made = backward(op, function, grad, fwd_input, quantizer, {"column_sums": sums})
        return [sums, made]

    apply.__doc__ = f"""Differentiate ``{name}``, and sum the rows of the gradient for a bias in front of it.

    Parameters
    ----------
    grad, fwd_input, quantizer
        As of ``d{name}``.

    Returns
    -------
    list
        The sums ``(cols,)`` in the input's type, and the gradient of the input.
    """
    return _named(apply, op)


def _named(function: Any, name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    made: Callable[..., Any] = function
    return made


#: Functions by name; the extension has each as an attribute.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *map(_make_forward, (*_PLAIN, *_GATED)),
        *map(_make_backward, (*_PLAIN, *_GATED)),
        *map(_make_with_bias, _PLAIN),
    )
}


def clamped_swiglu(
    input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Apply GPT-OSS's SwiGLU, whose halves are clamped.

    Parameters
    ----------
    input : torch.Tensor
        ``(..., 2 * cols)``.
    quantizer : Quantizer or None
        Quantises the result.
    limit, alpha, glu_linear_offset : float
        Bound of both halves, factor in the sigmoid, and summand of the second half.
    """
    function = ActivationFunction("clamped_swiglu", 0, limit, alpha, glu_linear_offset)
    return forward("clamped_swiglu", function, input, quantizer)


def clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """Differentiate :func:`clamped_swiglu`.

    Parameters
    ----------
    grad, fwd_input : torch.Tensor
        Gradient of the result, and the input.
    quantizer, limit, alpha, glu_linear_offset
        As of :func:`clamped_swiglu`; the quantizer is for the gradient of the input.
    """
    function = ActivationFunction("clamped_swiglu", 0, limit, alpha, glu_linear_offset)
    return backward("clamped_dswiglu", function, grad, fwd_input, quantizer)


def situglu(
    input: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
) -> Any:
    """Apply SiTU-GLU.

    Parameters
    ----------
    input : torch.Tensor
        ``(..., 2 * cols)``.
    quantizer : Quantizer or None
        Quantises the result.
    beta1, beta2 : float
        Its constants.
    """
    function = ActivationFunction("situ_glu", beta1=beta1, beta2=beta2)
    return forward("situglu", function, input, quantizer)


def dsituglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
) -> Any:
    """Differentiate :func:`situglu`.

    Parameters
    ----------
    grad, fwd_input : torch.Tensor
        Gradient of the result, and the input.
    quantizer, beta1, beta2
        As of :func:`situglu`; the quantizer is for the gradient of the input.
    """
    function = ActivationFunction("situ_glu", beta1=beta1, beta2=beta2)
    return backward("dsituglu", function, grad, fwd_input, quantizer)
