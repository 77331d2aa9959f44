"""Activation functions whose rows are multiplied by factors, with the names of Transformer Engine's extension."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.dispatch import ActivationFunction
from te_fast.tex.activations import backward, forward
from te_fast.tex.errors import ExtensionError, check_tensors
from te_fast.tex.outputs import check_quantizer, finished


def _factors(op: str, x: torch.Tensor, act_scales: torch.Tensor) -> torch.Tensor:
    check_tensors(op, input=x, act_scales=act_scales)
    if x.dim() == 0 or act_scales.numel() != x.shape[:-1].numel():
        message = (
            f"{op}: act_scales must have one factor for each row of {list(x.shape)}, got "
            f"{list(act_scales.shape)}"
        )
        raise ExtensionError(message)
    return act_scales.detach().contiguous().view(-1)


def _scaled(
    op: str, function: ActivationFunction, x: torch.Tensor, act_scales: torch.Tensor, quantizer: Any
) -> Any:
    check_quantizer(op, quantizer)
    return finished(forward(op, function, x, None, _factors(op, x, act_scales)), quantizer)


def _scaled_backward(
    op: str,
    function: ActivationFunction,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    quantizer: Any,
    *,
    with_factors: bool,
) -> tuple[Any, torch.Tensor | None]:
    grad, x, act_scales = tensors
    check_quantizer(op, quantizer)
    factors = _factors(op, x, act_scales)
    grads = torch.empty_like(factors) if with_factors else None
    sums = None if grads is None else {"row_scale_grad": grads}
    dx = finished(backward(op, function, grad, x, None, sums, factors), quantizer)
    return dx, None if grads is None else grads.view(act_scales.shape)


def scaled_swiglu(
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
) -> Any:
    """Apply SwiGLU, and multiply each row by a factor.

    Parameters
    ----------
    input : torch.Tensor
        ``(..., 2 * cols)``.
    act_scales : torch.Tensor
        A factor for each row.
    quantizer : Quantizer or None
        Quantises the result.
    glu_interleave_size : int
        Halves alternate in blocks of so many columns; 0: they are side by side.

    Raises
    ------
    ExtensionError
        If there are not as many factors as rows.
    """
    function = ActivationFunction("swiglu", glu_interleave_size)
    return _scaled("scaled_swiglu", function, input, act_scales, quantizer)


def scaled_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Differentiate :func:`scaled_swiglu`.

    Parameters
    ----------
    grad : torch.Tensor
        Gradient of the result.
    fwd_input, act_scales, quantizer, glu_interleave_size
        As of :func:`scaled_swiglu`; the quantizer is for the gradient of the input.
    compute_scale_grad : bool
        Whether to differentiate by the factors.

    Returns
    -------
    tuple
        Gradients of the input and of the factors; the latter may be None.

    Raises
    ------
    ExtensionError
        If there are not as many factors as rows.
    """
    function = ActivationFunction("swiglu", glu_interleave_size)
    tensors = grad, fwd_input, act_scales
    options = {"with_factors": compute_scale_grad}
    return _scaled_backward("scaled_dswiglu", function, tensors, quantizer, **options)


def scaled_clamped_swiglu(
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
) -> Any:
    """Apply GPT-OSS's SwiGLU, and multiply each row by a factor.

    Parameters
    ----------
    input, act_scales, quantizer, glu_interleave_size
        As of :func:`scaled_swiglu`.
    limit, alpha, glu_linear_offset : float
        As of :func:`clamped_swiglu`.

    Raises
    ------
    ExtensionError
        If there are not as many factors as rows.
    """
    constants = limit, alpha, glu_linear_offset
    function = ActivationFunction("clamped_swiglu", glu_interleave_size, *constants)
    return _scaled("scaled_clamped_swiglu", function, input, act_scales, quantizer)


def scaled_clamped_dswiglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Differentiate :func:`scaled_clamped_swiglu`.

    Parameters
    ----------
    grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad
        As of :func:`scaled_dswiglu`.
    limit, alpha, glu_linear_offset : float
        As of :func:`clamped_swiglu`.

    Raises
    ------
    ExtensionError
        If there are not as many factors as rows.
    """
    constants = limit, alpha, glu_linear_offset
    function = ActivationFunction("clamped_swiglu", glu_interleave_size, *constants)
    tensors = grad, fwd_input, act_scales
    options = {"with_factors": compute_scale_grad}
    return _scaled_backward("scaled_clamped_dswiglu", function, tensors, quantizer, **options)


def scaled_situglu(
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
) -> Any:
    """Apply SiTU-GLU, and multiply each row by a factor.

    Parameters
    ----------
    input, act_scales, quantizer, glu_interleave_size
        As of :func:`scaled_swiglu`.
    beta1, beta2 : float
        As of :func:`situglu`.

    Raises
    ------
    ExtensionError
        If there are not as many factors as rows.
    """
    function = ActivationFunction("situ_glu", glu_interleave_size, beta1=beta1, beta2=beta2)
    return _scaled("scaled_situglu", function, input, act_scales, quantizer)


def scaled_dsituglu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Differentiate :func:`scaled_situglu`.

    Parameters
    ----------
    grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad
        As of :func:`scaled_dswiglu`.
    beta1, beta2 : float
        As of :func:`situglu`.

    Raises
    ------
    ExtensionError
        If there are not as many factors as rows.
    """
    function = ActivationFunction("situ_glu", glu_interleave_size, beta1=beta1, beta2=beta2)
    tensors = grad, fwd_input, act_scales
    options = {"with_factors": compute_scale_grad}
    return _scaled_backward("scaled_dsituglu", function, tensors, quantizer, **options)


def scaled_srelu(input: torch.Tensor, act_scales: torch.Tensor, quantizer: Any) -> Any:
    """Apply the squared ReLU, and multiply each row by a factor.

    Parameters
    ----------
    input : torch.Tensor
        ``(..., cols)``.
    act_scales, quantizer
        As of :func:`scaled_swiglu`.

    Raises
    ------
    ExtensionError
        If there are not as many factors as rows.
    """
    return _scaled("scaled_srelu", ActivationFunction("srelu"), input, act_scales, quantizer)


def scaled_dsrelu(
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Any,
    compute_scale_grad: bool = True,
) -> tuple[Any, torch.Tensor | None]:
    """Differentiate :func:`scaled_srelu`.

    Parameters
    ----------
    grad, fwd_input, act_scales, quantizer, compute_scale_grad
        As of :func:`scaled_dswiglu`.

    Raises
    ------
    ExtensionError
        If there are not as many factors as rows.
    """
    tensors = grad, fwd_input, act_scales
    options = {"with_factors": compute_scale_grad}
    function = ActivationFunction("srelu")
    return _scaled_backward("scaled_dsrelu", function, tensors, quantizer, **options)
