"""LayerNorm and RMSNorm for direct use, past the layers: part of :mod:`te_fast.dispatch`."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from te_fast.dispatch.checks import expect, rows_and_cols
from te_fast.dispatch.layouts import quantized_layouts
from te_fast.runtime import native


class NormFunction(NamedTuple):
    """A norm and its constants.

    See Also
    --------
    norm : Applies it.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.NormFunction("RMSNorm", eps=1e-6)
    NormFunction(normalization='RMSNorm', eps=1e-06, zero_centered_gamma=False)
    """

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    #: Added to the variance (of RMSNorm: to the mean square).
    eps: float = 1e-5
    #: Factors are ``gamma + 1``.
    zero_centered_gamma: bool = False


class NormOutputs(NamedTuple):
    """Results of a norm; None for those that were not asked for.

    See Also
    --------
    norm_outputs : Allocates them.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.NormFunction("RMSNorm")
    >>> dispatch.norm_outputs(torch.ones(2, 8), function, stats=True).rstd.shape
    torch.Size([2])
    """

    #: The result in the input's type, ``(rows, cols)``.
    high_precision: torch.Tensor | None = None
    #: The result in float8_e4m3fn or float8_e5m2, of the same shape.
    rowwise_data: torch.Tensor | None = None
    #: The same transposed, its rows padded with zeros to a multiple of 16.
    columnwise_data: torch.Tensor | None = None
    #: One FP32.
    scale_inv: torch.Tensor | None = None
    #: With a residual: what was normalised, in the input's type.
    sum: torch.Tensor | None = None
    #: LayerNorm: FP32 ``(rows,)``.
    mean: torch.Tensor | None = None
    #: Inverse standard deviation (of RMSNorm: inverse root of the mean square), FP32 ``(rows,)``.
    rstd: torch.Tensor | None = None


class NormGradients(NamedTuple):
    """Results of the gradient of a norm; None for those that were not asked for.

    See Also
    --------
    norm_gradients : Allocates them.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.NormFunction("RMSNorm")
    >>> dispatch.norm_gradients(torch.ones(2, 8), torch.ones(8), function).dgamma.shape
    torch.Size([8])
    """

    #: Gradient of the input, in its type, ``(rows, cols)``.
    dx: torch.Tensor | None = None
    #: Gradient of gamma, in its type, ``(cols,)``.
    dgamma: torch.Tensor | None = None
    #: Gradient of beta, in gamma's type, ``(cols,)``; LayerNorm alone has one.
    dbeta: torch.Tensor | None = None


def norm_outputs(
    x: torch.Tensor,
    function: NormFunction,
    *,
    high_precision: bool = True,
    fp8_dtype: torch.dtype | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    residual: bool = False,
    stats: bool = False,
) -> NormOutputs:
    """Allocate the outputs of :func:`norm`.

    Parameters
    ----------
    x : torch.Tensor
        The input ``(rows, cols)``.
    function : NormFunction
        The norm.
    high_precision : bool
        With a result in the input's type.
    fp8_dtype : torch.dtype, optional
        With a result in this FP8 type.
    rowwise, columnwise : bool
        Its layouts.
    residual : bool
        With the sum of `x` and a residual.
    stats : bool
        With the statistics that the gradient needs.

    Returns
    -------
    NormOutputs
        Uninitialised tensors.

    See Also
    --------
    norm : Writes them.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.NormFunction("RMSNorm")
    >>> dispatch.norm_outputs(torch.ones(2, 8), function).high_precision.shape
    torch.Size([2, 8])
    """
    expect("norm_outputs", NormFunction, function=function)
    rows, cols = rows_and_cols("norm_outputs", x)
    row, column, scale_inv = None, None, None
    if fp8_dtype is not None:
        row, column, scale_inv = quantized_layouts(
            x, cols, fp8_dtype, rowwise=rowwise, columnwise=columnwise
        )
    with_mean = stats and function.normalization == "LayerNorm"
    return NormOutputs(
        x.new_empty(rows, cols) if high_precision else None,
        row,
        column,
        scale_inv,
        x.new_empty(rows, cols) if residual else None,
        x.new_empty(rows, dtype=torch.float32) if with_mean else None,
        x.new_empty(rows, dtype=torch.float32) if stats else None,
    )


def norm(
    x: torch.Tensor,
    gamma: torch.Tensor,
    function: NormFunction,
    out: NormOutputs,
    *,
    beta: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    noop: torch.Tensor | None = None,
) -> NormOutputs:
    """Normalise rows in one kernel, which can add a residual before and cast to FP8 after.

    Parameters
    ----------
    x : torch.Tensor
        float32, float16 or bfloat16 ``(rows, cols)``, contiguous.
    gamma : torch.Tensor
        Factors ``(cols,)``, of any of these types.
    function : NormFunction
        The norm.
    out : NormOutputs
        The result, in memory that no input uses.
    beta : torch.Tensor, optional
        Summands ``(cols,)``, in gamma's type.
    residual : torch.Tensor, optional
        Added to `x` first, of its shape and type; the rounded sum goes to ``out.sum``.
    scale : torch.Tensor, optional
        One FP32 scale; an FP8 output needs it.
    amax : torch.Tensor, optional
        One FP32 that is raised to the largest magnitude of the unrounded result.
    noop : torch.Tensor, optional
        One FP32; 1 leaves every output as it is.

    Returns
    -------
    NormOutputs
        `out`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, CudaError
        If the tensors do not fit.

    See Also
    --------
    norm_backward : Its gradient.
    norm_outputs : Allocates the outputs.

    Notes
    -----
    Statistics and the result up to its rounding are FP32. LayerNorm:
    ``(x - mean) / sqrt(var + eps) * gamma + beta`` with the biased variance, as
    :class:`torch.nn.LayerNorm`; RMSNorm: ``x / sqrt(mean(x * x) + eps) * gamma``.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.NormFunction("RMSNorm")
    >>> x = torch.full((1, 4), 2.0)
    >>> dispatch.norm(x, torch.ones(4), function, dispatch.norm_outputs(x, function)).high_precision
    tensor([[1.0000, 1.0000, 1.0000, 1.0000]])
    """
    expect("norm", NormFunction, function=function)
    expect("norm", NormOutputs, out=out)
    native.norm(x, function, (gamma, beta, residual, scale, amax, noop), out)
    return out


def norm_gradients(
    x: torch.Tensor, gamma: torch.Tensor, function: NormFunction, *, dx: bool = True
) -> NormGradients:
    """Allocate the outputs of :func:`norm_backward`.

    Parameters
    ----------
    x : torch.Tensor
        The input ``(rows, cols)``.
    gamma : torch.Tensor
        Factors ``(cols,)``.
    function : NormFunction
        The norm.
    dx : bool
        With the gradient of the input.

    Returns
    -------
    NormGradients
        Uninitialised tensors.

    See Also
    --------
    norm_backward : Writes them.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.NormFunction("RMSNorm")
    >>> dispatch.norm_gradients(torch.ones(2, 8), torch.ones(8), function).dx.shape
    torch.Size([2, 8])
    """
    expect("norm_gradients", NormFunction, function=function)
    expect("norm_gradients", torch.Tensor, x=x, gamma=gamma)
    with_beta = function.normalization == "LayerNorm"
    return NormGradients(
        torch.empty_like(x) if dx else None,
        torch.empty_like(gamma),
        torch.empty_like(gamma) if with_beta else None,
    )


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    function: NormFunction,
    out: NormGradients,
    *,
    add: torch.Tensor | None = None,
) -> NormGradients:
    """Differentiate a norm, in one kernel where a block can hold a row, else in two.

    Parameters
    ----------
    dy : torch.Tensor
        Gradient of the result, as `x`.
    x : torch.Tensor
        The rows that :func:`norm` normalised: its input, or with a residual ``out.sum``. float32, float16 or
        bfloat16 ``(rows, cols)``, contiguous.
    gamma : torch.Tensor
        Factors ``(cols,)``, of any of these types.
    mean, rstd : torch.Tensor
        The statistics that :func:`norm` wrote; `mean` is None for RMSNorm.
    function : NormFunction
        The norm.
    out : NormGradients
        The result, in memory that no input uses.
    add : torch.Tensor, optional
        Gradient of a residual branch, of the shape and type of the input's gradient, which is added to it.

    Returns
    -------
    NormGradients
        `out`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, CudaError
        If the tensors do not fit.

    See Also
    --------
    norm : The norm.

    Notes
    -----
    All arithmetic is FP32. The sums over rows are in an order that depends on shape and device alone.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> function = dispatch.NormFunction("RMSNorm")
    >>> x, gamma = torch.randn(2, 8), torch.ones(8)
    >>> y = dispatch.norm(x, gamma, function, dispatch.norm_outputs(x, function, stats=True))
    >>> grads = dispatch.norm_gradients(x, gamma, function)
    >>> dispatch.norm_backward(torch.ones(2, 8), x, gamma, None, y.rstd, function, grads).dx.shape
    torch.Size([2, 8])
    """
    expect("norm_backward", NormFunction, function=function)
    expect("norm_backward", NormGradients, out=out)
    native.norm_backward(x, function, (dy, gamma, mean, rstd, add), out)
    return out
