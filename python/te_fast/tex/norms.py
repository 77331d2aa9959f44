"""LayerNorm and RMSNorm with the arguments of Transformer Engine's extension."""

from __future__ import annotations

from typing import Any

import torch

from te_fast import dispatch
from te_fast.dispatch import NormFunction, NormOutputs
from te_fast.runtime.arguments import check_flags, check_numbers
from te_fast.tensor.dtypes import DType, TE_DType_To_Torch
from te_fast.tensor.storage import QuantizedTensorStorage
from te_fast.tex.errors import ExtensionError, check_rows
from te_fast.tex.outputs import check_quantizer, finished, fused, rows_of


@torch.no_grad()
def _forward(
    function: NormFunction,
    x: Any,
    gamma: Any,
    beta: torch.Tensor | None,
    out: Any,
    quantizer: Any,
    otype: Any,
) -> list[Any]:
    op = f"{function.normalization.lower()}_fwd"
    check_quantizer(op, quantizer)
    if isinstance(out, QuantizedTensorStorage) and quantizer is None:
        message = f"{op}: ln_out is quantised; give its quantizer, too"
        raise ExtensionError(message)
    x, gamma = (
        one.dequantize() if isinstance(one, QuantizedTensorStorage) else one for one in (x, gamma)
    )
    optional = {"bias": beta, "ln_out": None if isinstance(out, QuantizedTensorStorage) else out}
    given = {name: one for name, one in optional.items() if one is not None}
    check_rows(op, input=x, weight=gamma, **given)
    check_numbers(op, eps=function.eps)
    dtype = otype if isinstance(otype, torch.dtype) else TE_DType_To_Torch[DType.cast(otype)]
    shape = x.shape
    # The kernel writes the input's type. FP32 is the type that it computes in.
    rows = rows_of(x if dtype == x.dtype else x.float())
    count = rows.shape[0]
    mean = (
        None if function.normalization == "RMSNorm" else rows.new_empty(count, dtype=torch.float32)
    )
    rstd = rows.new_empty(count, dtype=torch.float32)
    cast = fused(quantizer, shape, rows) if out is None and dtype == rows.dtype else None
    target = _plain_target(out, rows, dtype) if cast is None and quantizer is None else None
    if cast is None:
        result = torch.empty_like(rows) if target is None else target
        outputs = NormOutputs(result, None, None, None, None, mean, rstd)
        scales: dict[str, Any] = {}
    else:
        layouts = cast.rowwise_data, cast.columnwise_data, cast.scale_inv
        outputs = NormOutputs(None, *layouts, None, mean, rstd)
        scales = {"scale": cast.scale, "amax": cast.amax}
    weights = gamma.detach().contiguous(), None if beta is None else beta.detach().contiguous()
    dispatch.norm(rows, weights[0], function, outputs, beta=weights[1], **scales)
    if cast is not None:
        return [cast.made, mean, rstd]
    if target is not None:
        return [out, mean, rstd]
    result = result.view(shape).to(dtype)
    if quantizer is None and out is not None:
        return [out.copy_(result), mean, rstd]
    return [finished(result, quantizer, out), mean, rstd]


def _plain_target(out: Any, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the given tensor as rows, if the kernel can write it."""
    if out is None or out.dtype != rows.dtype or dtype != rows.dtype or not out.is_contiguous():
        return None
    return rows_of(out)


def layernorm_fwd(
    input: Any,
    weight: Any,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Normalise rows by mean and variance.

    Parameters
    ----------
    input : torch.Tensor
        float32, float16 or bfloat16 ``(..., cols)``.
    weight, bias : torch.Tensor
        ``(cols,)``, factors and summands; `bias` may be None.
    eps : float
        Added to the variance.
    ln_out : torch.Tensor or QuantizedTensor, optional
        Is written and returned; a new tensor by default.
    quantizer : Quantizer or None
        Quantises the result.
    otype : DType
        Type of the result.
    sm_margin : int
        Not used: te_fast's norms leave no multiprocessors free.
    zero_centered_gamma : bool
        Factors are ``weight + 1``.

    Returns
    -------
    list
        The result, means and inverse standard deviations, the latter float32 ``(rows,)``.

    Raises
    ------
    ExtensionError
        If `ln_out` is quantised and the quantizer is missing.
    ShapeError, DtypeError, DeviceError
        If the tensors do not fit.
    """
    check_flags("layernorm_fwd", zero_centered_gamma=zero_centered_gamma)
    function = NormFunction("LayerNorm", eps, bool(zero_centered_gamma))
    return _forward(function, input, weight, bias, ln_out, quantizer, otype)


def rmsnorm_fwd(
    input: Any,
    weight: Any,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Normalise rows by their root mean square.

    Parameters
    ----------
    input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma
        As of :func:`layernorm_fwd`; `eps` is added to the mean square.

    Returns
    -------
    list
        The result, None, and inverse roots of the mean squares, float32 ``(rows,)``.

    Raises
    ------
    ExtensionError, ShapeError, DtypeError, DeviceError
        As of :func:`layernorm_fwd`.
    """
    check_flags("rmsnorm_fwd", zero_centered_gamma=zero_centered_gamma)
    function = NormFunction("RMSNorm", eps, bool(zero_centered_gamma))
    return _forward(function, input, weight, None, ln_out, quantizer, otype)


def _backward(
    function: NormFunction,
    dz: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    statistics: tuple[torch.Tensor | None, torch.Tensor],
    add: torch.Tensor | None = None,
) -> list[Any]:
    rows, gamma = rows_of(x), gamma.detach().contiguous()
    out = dispatch.norm_gradients(rows, gamma, function)
    given = None if add is None else rows_of(add)
    dispatch.norm_backward(rows_of(dz), rows, gamma, *statistics, function, out, add=given)
    assert out.dx is not None
    gradients = [out.dx.view(x.shape), out.dgamma]
    return gradients if out.dbeta is None else [*gradients, out.dbeta]


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Differentiate :func:`layernorm_fwd`.

    Parameters
    ----------
    dz : torch.Tensor
        Gradient of the result.
    x : torch.Tensor
        The input.
    mu, rsigma : torch.Tensor
        The statistics that the forward returned.
    gamma : torch.Tensor
        The factors.
    sm_margin, zero_centered_gamma
        As of the forward.

    Returns
    -------
    list
        Gradients of input, factors and summands.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the tensors do not fit.
    """
    check_rows("layernorm_bwd", dz=dz, x=x, mu=mu, rsigma=rsigma, gamma=gamma)
    check_flags("layernorm_bwd", zero_centered_gamma=zero_centered_gamma)
    function = NormFunction("LayerNorm", 0.0, bool(zero_centered_gamma))
    return _backward(function, dz, x, gamma, (mu.contiguous(), rsigma.contiguous()))


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Differentiate :func:`rmsnorm_fwd`.

    Parameters
    ----------
    dz, x, rsigma, gamma, sm_margin, zero_centered_gamma
        As of :func:`layernorm_bwd`.

    Returns
    -------
    list
        Gradients of input and factors.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the tensors do not fit.
    """
    check_rows("rmsnorm_bwd", dz=dz, x=x, rsigma=rsigma, gamma=gamma)
    check_flags("rmsnorm_bwd", zero_centered_gamma=zero_centered_gamma)
    function = NormFunction("RMSNorm", 0.0, bool(zero_centered_gamma))
    return _backward(function, dz, x, gamma, (None, rsigma.contiguous()))


def rmsnorm_bwd_add(
    dz: torch.Tensor,
    x: torch.Tensor,
    add: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Differentiate :func:`rmsnorm_fwd`, and add the gradient of a residual branch to that of the input.

    Parameters
    ----------
    add : torch.Tensor
        Gradient of the branch, as `x`.
    dz, x, rsigma, gamma, sm_margin, zero_centered_gamma
        As of :func:`rmsnorm_bwd`.

    Returns
    -------
    list
        Gradients of input and factors.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the tensors do not fit.
    """
    check_rows("rmsnorm_bwd_add", dz=dz, x=x, add=add, rsigma=rsigma, gamma=gamma)
    check_flags("rmsnorm_bwd_add", zero_centered_gamma=zero_centered_gamma)
    function = NormFunction("RMSNorm", 0.0, bool(zero_centered_gamma))
    return _backward(function, dz, x, gamma, (None, rsigma.contiguous()), add)
