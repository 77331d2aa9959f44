"""Matrix products with the arguments of Transformer Engine's Python functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fast.errors import ArgumentError, QuantizedTensorError, ShapeError, UnsupportedError
from te_fast.tensor.hybrid_tensor import HybridQuantizedTensorStorage
from te_fast.tensor.quantizer import Float8QuantizerBase
from te_fast.tex.gemm import generic_gemm, has_block_scales

_LAYOUTS = ("TN", "NN", "NT")


def _check_layout(op: str, layout: str) -> tuple[bool, bool]:
    if layout not in _LAYOUTS:
        message = f"{op}: layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}"
        raise ShapeError(message)
    return layout[0] == "T", layout[1] == "T"


def _of_layout(op: str, tensor: Any, *, is_rowwise: bool) -> Any:
    """Return the half of a hybrid tensor that a product reads, and other tensors as they are."""
    if isinstance(tensor, HybridQuantizedTensorStorage):
        tensor = tensor.rowwise_sub_storage if is_rowwise else tensor.columnwise_sub_storage
    if tensor is None:
        usage = "rowwise" if is_rowwise else "columnwise"
        message = f"{op}: an operand lacks its {usage} values; quantise with {usage} usage"
        raise QuantizedTensorError(message)
    return tensor


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Any = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """Compute ``op(B) · op(A)``, for plain and FP8 tensors, outside of autograd.

    Parameters
    ----------
    A, B : torch.Tensor or QuantizedTensorStorage
        By layout: "TN" ``(n, k)`` and ``(..., k)``, "NN" ``(k, n)`` and ``(..., k)``, "NT" ``(k, n)`` and ``(k, m)``.
    out_dtype : torch.dtype, optional
        Type of the result; by default that of `out` or `A`.
    quantization_params : Quantizer, optional
        Quantises the result.
    gelu : bool
        Apply GELU (tanh); with `grad` multiply by its derivative at `gelu_in`.
    gelu_in : torch.Tensor, optional
        Input of GELU, with `grad`.
    alpha, beta : float
        Factors of product and `out`; `beta` must be 0 or None without `accumulate`.
    accumulate : bool
        Add to `out`.
    layout : {'TN', 'NN', 'NT'}
        Which operands are transposed: A, none, B.
    out : torch.Tensor or QuantizedTensor, optional
        Contiguous; is written and returned.
    bias : torch.Tensor, optional
        ``(n,)``; with `grad` its presence asks for the sums of B's rows.
    use_split_accumulator : bool
        FP8: the slower accumulation, which keeps more bits. Block scaling always has it.
    grad : bool
        Whether this is a product of backward.
    ub, ub_type, extra_output, bulk_overlap
        Not supported.

    Returns
    -------
    tuple
        The result; the gradient of the bias, the input of GELU, and the extra output, or None.

    Raises
    ------
    ShapeError, ArgumentError
        If the layout is unknown, `out` is not contiguous, or `beta` is given without `accumulate`.
    ExtensionError, QuantizedTensorError, UnsupportedError
        As of :func:`te_fast.tex.generic_gemm`.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.cpp_extensions import general_gemm
    >>> weight, x = torch.ones(16, 32), torch.ones(4, 32)
    >>> general_gemm(weight, x)[0].shape
    torch.Size([4, 16])
    """
    transa, transb = _check_layout("general_gemm", layout)
    if not accumulate and beta not in (0.0, None):
        message = f"general_gemm: beta must be 0 without accumulate=True, got {beta}"
        raise ArgumentError(message)
    if out is not None and not out.is_contiguous():
        message = f"general_gemm: out must be contiguous, got strides {list(out.stride())}"
        raise ArgumentError(message)
    if quantization_params is not None and not isinstance(quantization_params, Float8QuantizerBase):
        message = (
            f"general_gemm: {type(quantization_params).__name__} does not quantise results of products; give an FP8 "
            "quantizer of te_fast.pytorch, or none"
        )
        raise UnsupportedError(message)
    a = _of_layout("general_gemm", A, is_rowwise=transa)
    b = _of_layout("general_gemm", B, is_rowwise=not transb)
    result = generic_gemm(
        a,
        transa,
        b,
        transb,
        out,
        quantization_params,
        out_dtype,
        bias,
        torch.bfloat16 if bias is None else bias.dtype,
        gelu,
        gelu_in,
        grad,
        None,
        0,
        accumulate,
        # As in Transformer Engine: block scales have no other.
        use_split_accumulator or has_block_scales(a) or has_block_scales(b),
        ub,
        ub_type,
        extra_output,
        bulk_overlap,
        1.0 if alpha is None else alpha,
        beta,
    )
    return tuple(result)


def _parts_of(out: Any, m_splits: Sequence[int] | None, count: int) -> list[torch.Tensor]:
    """Return the parts of the one result of all groups."""
    if m_splits is None or len(m_splits) != count or sum(m_splits) > out.shape[0]:
        message = (
            f"general_grouped_gemm: one result of shape {list(out.shape)} needs m_splits with {count} row counts that "
            f"fit, got {None if m_splits is None else list(m_splits)}"
        )
        raise ShapeError(message)
    rest = out.shape[0] - sum(m_splits)
    return list(out.split([*m_splits, rest])[:count])


def general_grouped_gemm(
    A: list[Any],
    B: list[Any],
    out: list[Any],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[torch.Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[Any, Any, Any]:
    """Compute one product for each group: :func:`general_gemm` of the lists' elements.

    Parameters
    ----------
    A, B : list
        Operands.
    out : list of torch.Tensor
        Results, which are written; with `single_output` one tensor, of all groups' rows.
    quantization_params : list of Quantizer
        Quantises each result, or None.
    out_dtype : torch.dtype
        Not used, as in Transformer Engine: results have the type of `out`.
    layout, gelu, grad, accumulate, use_split_accumulator
        As of :func:`general_gemm`. With `grad`, GELU is not supported.
    m_splits : list of int, optional
        Rows of each group, with `single_output`.
    bias : list of torch.Tensor, optional
        Biases, with `use_bias`; with `grad` their gradients are returned.
    use_bias : bool
        Whether there are biases.
    D_dtype : DType, optional
        Type of the results; by default that of `out`.
    single_output : bool
        Whether the groups have one result.

    Returns
    -------
    tuple
        `out`; the biases or their gradients, and the inputs of GELU: lists, with empty tensors where there is none.

    Raises
    ------
    ShapeError, ArgumentError, ExtensionError, QuantizedTensorError, UnsupportedError
        As of :func:`general_gemm`; also if the lists are not equally long.
    """
    op, count = "general_grouped_gemm", len(A)
    _check_layout(op, layout)
    results = _parts_of(out[0], m_splits, count) if single_output else list(out)
    lengths = {"B": B, "out": results, "quantization_params": quantization_params}
    if use_bias and bias is not None:
        lengths["bias"] = bias
    wrong = {name: len(one) for name, one in lengths.items() if len(one) != count}
    if wrong or (use_bias and bias is None):
        message = f"{op}: expected {count} elements in each list, as in A, got {wrong or 'no bias'}"
        raise ShapeError(message)
    if gelu and grad:
        message = f"{op}: gelu with grad is not supported; call general_gemm"
        raise UnsupportedError(message)
    empty = torch.empty(0, dtype=torch.bfloat16, device=results[0].device if results else None)
    biases: list[Any] = [empty] * count
    before: list[Any] = [empty] * count
    for at, result in enumerate(results):
        _, bias_grad, before_gelu, _ = general_gemm(
            A[at],
            B[at],
            None if D_dtype is None else D_dtype,
            quantization_params[at],
            gelu=gelu,
            accumulate=accumulate,
            layout=layout,
            out=result,
            bias=bias[at] if use_bias and bias is not None else None,
            use_split_accumulator=use_split_accumulator,
            grad=grad,
        )
        if use_bias and bias is not None:
            biases[at] = bias_grad if grad else bias[at]
        if before_gelu is not None:
            before[at] = before_gelu
    return out, biases, before
