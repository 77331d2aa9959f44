"""Activation functions for direct use, past the layers: part of :mod:`te_fast.dispatch`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_fast.dispatch.checks import expect, rows_and_cols
from te_fast.dispatch.layouts import quantized_layouts
from te_fast.runtime import native

_UNARY = {"gelu", "qgelu", "relu", "srelu", "silu"}


class ActivationFunction(NamedTuple):
    """An activation function and its constants.

    See Also
    --------
    activation : Applies it.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.ActivationFunction("swiglu").name
    'swiglu'
    """

    #: ``gelu``, ``geglu``, ``glu``, ``qgelu``, ``qgeglu``, ``relu``, ``reglu``, ``srelu``, ``sreglu``,
    #: ``silu``, ``swiglu``, ``clamped_swiglu`` or ``situ_glu``.
    name: str
    #: Gated: the halves alternate in blocks of this many columns; 0: side by side.
    interleave: int = 0
    #: Of ``clamped_swiglu``.
    limit: float = 7.0
    #: Of ``clamped_swiglu``.
    alpha: float = 1.702
    #: Of ``clamped_swiglu``.
    offset: float = 1.0
    #: Of ``situ_glu``.
    beta1: float = 4.0
    #: Of ``situ_glu``.
    beta2: float = 25.0

    @property
    def halves(self) -> int:
        """Columns of the input per column of the result."""
        return 1 if self.name in _UNARY else 2


class ActivationOutputs(NamedTuple):
    """Results of an activation or of its gradient; None for those that were not asked for.

    See Also
    --------
    activation_outputs : Allocates them.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.ActivationFunction("relu")
    >>> out = dispatch.activation_outputs(torch.ones(2, 4), function)
    >>> out.high_precision.shape, out.rowwise_data
    (torch.Size([2, 4]), None)
    """

    #: In the input's type: ``(rows, cols)``, of the gradient ``(rows, halves * cols)``.
    high_precision: torch.Tensor | None = None
    #: float8_e4m3fn or float8_e5m2, of the same shape.
    rowwise_data: torch.Tensor | None = None
    #: The same transposed, its rows padded with zeros to a multiple of 16.
    columnwise_data: torch.Tensor | None = None
    #: One FP32.
    scale_inv: torch.Tensor | None = None
    #: Sums of the gradient's columns, in the input's type.
    column_sums: torch.Tensor | None = None
    #: Gradient of the factors per row, in their type.
    row_scale_grad: torch.Tensor | None = None


def activation_outputs(
    x: torch.Tensor,
    function: ActivationFunction,
    *,
    gradient: bool = False,
    high_precision: bool = True,
    fp8_dtype: torch.dtype | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
) -> ActivationOutputs:
    """Allocate the outputs of an activation.

    Parameters
    ----------
    x : torch.Tensor
        The input ``(rows, halves * cols)``.
    function : ActivationFunction
        The function.
    gradient : bool
        For :func:`activation_backward` rather than :func:`activation`.
    high_precision : bool
        With a result in the input's type.
    fp8_dtype : torch.dtype, optional
        With a result in this FP8 type.
    rowwise, columnwise : bool
        Its layouts.

    Returns
    -------
    ActivationOutputs
        Uninitialised tensors; the sums of a gradient are None.

    See Also
    --------
    activation : Writes them.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.ActivationFunction("relu")
    >>> dispatch.activation_outputs(torch.ones(2, 16), function, fp8_dtype=torch.float8_e4m3fn).rowwise_data.dtype
    torch.float8_e4m3fn
    """
    expect("activation_outputs", ActivationFunction, function=function)
    rows, cols = rows_and_cols("activation_outputs", x)
    cols //= 1 if gradient else function.halves
    high = x.new_empty(rows, cols) if high_precision else None
    if fp8_dtype is None:
        return ActivationOutputs(high)
    layouts = quantized_layouts(x, cols, fp8_dtype, rowwise=rowwise, columnwise=columnwise)
    return ActivationOutputs(high, *layouts)


def activation(
    x: torch.Tensor,
    function: ActivationFunction,
    out: ActivationOutputs,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    noop: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> ActivationOutputs:
    """Apply an activation function, with or without a cast to FP8, in one kernel.

    Parameters
    ----------
    x : torch.Tensor
        float32, float16 or bfloat16 ``(rows, halves * cols)``, contiguous. Of a gated function the
        activated half is the first one.
    function : ActivationFunction
        The function.
    out : ActivationOutputs
        The result, in memory that no input uses.
    scale : torch.Tensor, optional
        One FP32 scale; an FP8 output needs it.
    amax : torch.Tensor, optional
        One FP32 that is raised to the largest magnitude of the unrounded result.
    noop : torch.Tensor, optional
        One FP32; 1 leaves every output as it is.
    row_scale : torch.Tensor, optional
        Factors ``(rows,)``, of any floating type, by which the result's rows are multiplied.

    Returns
    -------
    ActivationOutputs
        `out`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, CudaError
        If the tensors do not fit.

    See Also
    --------
    activation_backward : Its gradient.
    activation_outputs : Allocates the outputs.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.ActivationFunction("relu")
    >>> x = torch.tensor([[-1.0, 2.0]])
    >>> dispatch.activation(x, function, dispatch.activation_outputs(x, function)).high_precision
    tensor([[0., 2.]])
    """
    expect("activation", ActivationFunction, function=function)
    expect("activation", ActivationOutputs, out=out)
    native.activation(x, function, out, (scale, amax, noop, row_scale))
    return out


def activation_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    function: ActivationFunction,
    out: ActivationOutputs,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    noop: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> ActivationOutputs:
    """Differentiate an activation function, with casts and sums as `out` asks, in one kernel.

    Parameters
    ----------
    dy : torch.Tensor
        Gradient of the result ``(rows, cols)``, in the input's type.
    x, function, scale, amax, noop, row_scale
        As in :func:`activation`; the FP8 output and `amax` are of the gradient.
    out : ActivationOutputs
        The result, in memory that no input uses.

    Returns
    -------
    ActivationOutputs
        `out`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, CudaError
        If the tensors do not fit.

    See Also
    --------
    activation : The function.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.ActivationFunction("relu")
    >>> x = torch.tensor([[-1.0, 2.0]])
    >>> out = dispatch.activation_outputs(x, function, gradient=True)
    >>> dispatch.activation_backward(torch.ones(1, 2), x, function, out).high_precision
    tensor([[0., 1.]])
    """
    expect("activation_backward", ActivationFunction, function=function)
    expect("activation_backward", ActivationOutputs, out=out)
    native.activation_backward(dy, x, function, out, (scale, amax, noop, row_scale))
    return out
