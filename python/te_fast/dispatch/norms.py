"""LayerNorm and RMSNorm for direct use, past the layers: part of :mod:`te_fast.dispatch`."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from te_fast.dispatch.layouts import quantized_layouts
from te_fast.runtime import native


class NormFunction(NamedTuple):
    """A norm and its constants."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    #: Added to the variance (of RMSNorm: to the mean square).
    eps: float = 1e-5
    #: Factors are ``gamma + 1``.
    zero_centered_gamma: bool = False


class NormOutputs(NamedTuple):
    """What a norm writes; None where not asked for."""

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
    """What the gradient of a norm writes; None where not asked for."""

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
    """
    rows, cols = x.shape
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
    """Normalise rows, with a residual added before and a cast to FP8 behind, in one kernel.

    Parameters
    ----------
    x : torch.Tensor
        float32, float16 or bfloat16 ``(rows, cols)``, contiguous.
    gamma : torch.Tensor
        Factors ``(cols,)``, of any of these types.
    function : NormFunction
        The norm.
    out : NormOutputs
        What is written, in memory that no input has.
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

    Notes
    -----
    Statistics and the result up to its rounding are FP32. LayerNorm:
    ``(x - mean) / sqrt(var + eps) * gamma + beta`` with the biased variance, as
    :class:`torch.nn.LayerNorm`; RMSNorm: ``x / sqrt(mean(x * x) + eps) * gamma``.
    """
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
    """
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
        What :func:`norm` normalised: its input, or with a residual ``out.sum``. float32, float16 or
        bfloat16 ``(rows, cols)``, contiguous.
    gamma : torch.Tensor
        Factors ``(cols,)``, of any of these types.
    mean, rstd : torch.Tensor
        The statistics that :func:`norm` wrote; `mean` is None for RMSNorm.
    function : NormFunction
        The norm.
    out : NormGradients
        What is written, in memory that no input has.
    add : torch.Tensor, optional
        Added to the gradient of the input, of its shape and type: what came through a residual branch.

    Returns
    -------
    NormGradients
        `out`.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, CudaError
        If the tensors do not fit.

    Notes
    -----
    All arithmetic is FP32. The sums over rows are in an order that depends on shape and device alone.
    """
    native.norm_backward(x, function, (dy, gamma, mean, rstd, add), out)
    return out
