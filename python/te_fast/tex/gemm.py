"""Matrix products with the arguments of Transformer Engine's extension."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from te_fast.dispatch import (
    ActivationFunction,
    activation,
    activation_backward,
    activation_outputs,
)
from te_fast.errors import QuantizedTensorError, UnsupportedError
from te_fast.runtime import native
from te_fast.runtime.arguments import check_flags
from te_fast.tensor.dtypes import NATIVE_NAMES, DType, TE_DType_To_Torch
from te_fast.tensor.float8 import Float8Quantizer
from te_fast.tensor.storage import QuantizedTensorStorage, has_native_value
from te_fast.tex.errors import ExtensionError
from te_fast.tex.outputs import check_quantizer, finished, rows_of

_OP = "generic_gemm"
_GELU = ActivationFunction("gelu")


class Operand(NamedTuple):
    """An operand, as native products take it: ``(outer, k)``, or stored as ``(k, outer)``."""

    arguments: Any
    #: Shape of the tensor that was given.
    shape: torch.Size
    outer: int
    k: int
    #: -1: plain, 0: one scale, 1 or 2: blocks.
    block: int
    #: Type of plain values, nominal type of quantised ones.
    dtype: torch.dtype
    device: torch.device


def operand_of(tensor: Any, name: str, *, k_outermost: bool) -> Operand:
    """Return a tensor as an operand.

    Parameters
    ----------
    tensor : torch.Tensor or QuantizedTensorStorage
        Plain or quantised.
    name : str
        Of the argument, for errors.
    k_outermost : bool
        Whether the summed dimension is the first one. Quantised tensors need the column layout then.

    Raises
    ------
    QuantizedTensorError
        If a quantised tensor lacks the layout.
    ExtensionError
        If it is no tensor.
    """
    if has_native_value(tensor):
        return _quantized_operand(tensor, name, k_outermost=k_outermost)
    if isinstance(tensor, QuantizedTensorStorage):
        with torch.no_grad():
            tensor = tensor.dequantize()
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        got = "a number" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        message = f"{_OP}: {name} must be a tensor of one dimension or more, got {got}"
        raise ExtensionError(message)
    rows = rows_of(tensor)
    k, outer = rows.shape if k_outermost else rows.shape[::-1]
    arguments = (rows, None, None, 0, k_outermost)
    return Operand(arguments, tensor.shape, outer, k, -1, rows.dtype, rows.device)


def has_block_scales(tensor: Any) -> bool:
    """Whether a tensor is in FP8 with a scale per block."""
    return has_native_value(tensor) and tensor._value.block > 0


def _quantized_operand(tensor: Any, name: str, *, k_outermost: bool) -> Operand:
    value = tensor._value
    shape = (
        value.row.shape
        if value.row is not None
        else torch.Size((*value.col.shape[1:], value.col.shape[0]))
    )
    data = value.col if k_outermost else value.row
    is_stale = k_outermost and not value.col_is_valid
    if data is None or is_stale or value.groups != 1:
        layout = "columnwise" if k_outermost else "rowwise"
        message = (
            f"{_OP}: {name} needs one value with {layout} data for this product; quantise with {layout} usage, or "
            "call update_usage()"
        )
        raise QuantizedTensorError(message)
    if k_outermost:
        data = data.view(data.shape[0], data.numel() // max(data.shape[0], 1))
    scale = value.col_scale if k_outermost and value.block else value.row_scale
    outer = shape[-1] if k_outermost else shape[:-1].numel()
    k = shape[:-1].numel() if k_outermost else shape[-1]
    arguments = (data, NATIVE_NAMES[tensor._fp8_dtype], scale, value.block + 1, False)
    return Operand(arguments, shape, outer, k, value.block, tensor._dtype, data.device)


class _Product(NamedTuple):
    """What is computed: ``alpha * x · wᵀ + beta * out + bias``."""

    x: Operand
    w: Operand
    bias: torch.Tensor | None
    alpha: float
    beta: float
    fast_accumulation: bool

    @property
    def is_empty(self) -> bool:
        """Whether an operand has no elements."""
        return self.x.shape.numel() == 0 or self.w.shape.numel() == 0

    def write(self, out: torch.Tensor) -> None:
        """Write or add to a contiguous tensor."""
        rows = out.view(self.x.outer, self.w.outer)
        if self.is_empty:
            if self.beta == 0.0:
                rows.zero_()
        elif self.alpha == 1.0 and self.beta in (0.0, 1.0):
            self._run(rows, self.bias, accumulate=self.beta == 1.0)
        else:
            self._write_scaled(rows)

    def _run(self, rows: torch.Tensor, bias: torch.Tensor | None, *, accumulate: bool) -> None:
        operands = self.x.arguments, self.w.arguments
        options = accumulate, self.fast_accumulation
        native.gemm(*operands, rows, bias, *options, False)

    def _write_scaled(self, rows: torch.Tensor) -> None:
        """Do the same with factors, which native products do not have: one more pass, rounded once."""
        product = torch.empty_like(rows, dtype=torch.float32)
        self._run(product, None, accumulate=False)
        product.mul_(self.alpha)
        if self.beta != 0.0:
            product.add_(rows, alpha=self.beta)
        if self.bias is not None:
            product.add_(self.bias)
        rows.copy_(product)


@torch.no_grad()
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor | None,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Compute ``D = alpha * op(B) · op(A) + beta * D + bias``, for plain and FP8 tensors.

    Parameters
    ----------
    A, B : torch.Tensor or QuantizedTensorStorage
        ``op(A)`` is ``(k, n)`` and ``op(B)`` is ``(m, k)``; leading dimensions count as one.
    transA, transB : bool
        Whether `A` is stored as ``(n, k)``, and `B` as ``(k, m)``. FP8 tensors need row layout for a stored
        `k` that is last, else column layout.
    D : torch.Tensor or QuantizedTensor, optional
        Is written and returned; a new tensor by default.
    quantizer : Quantizer, optional
        Quantises the result.
    output_dtype : DType, optional
        Type of the result; by default that of `D` or `A`.
    bias : torch.Tensor, optional
        ``(n,)``. With `grad` only its presence counts: it asks for the sums of B's rows.
    bias_type : DType
        Type of the second result of `gelu` if operands are in FP8.
    gelu : bool
        Apply GELU (tanh); with `grad` multiply by its derivative at `gelu_in`.
    gelu_in : torch.Tensor, optional
        ``(m, n)``, what GELU was applied to.
    grad : bool
        Whether this is a product of backward.
    workspace, workspace_size
        Not used: te_fast has workspaces of its own.
    accumulate : bool
        Add the product to `D`, and apply GELU to the sum.
    use_split_accumulator : bool
        FP8: the slower accumulation, which keeps more bits. Block scales need it.
    comm_overlap, comm_type, extra_output, bulk_overlap
        Not supported.
    alpha, beta : float
        Factors of product and `D`. `beta` is 1 if `accumulate` is set, else it must be 0.

    Returns
    -------
    list
        The result; the gradient of the bias, the input of GELU, and the extra output, or None.

    Raises
    ------
    ExtensionError
        If shapes, types or options do not fit (a ``RuntimeError``).
    QuantizedTensorError
        If a quantised tensor lacks a layout.
    UnsupportedError
        If te_fast does not have the combination.

    Notes
    -----
    GELU and its derivative are applied to the rounded product, in a second kernel.
    """
    if comm_overlap is not None or comm_type is not None or extra_output is not None:
        message = (
            f"{_OP}: te_fast has no Userbuffers; leave comm_overlap, comm_type and extra_output out"
        )
        raise UnsupportedError(message)
    if bulk_overlap:
        message = f"{_OP}: te_fast has no Userbuffers; leave bulk_overlap out"
        raise UnsupportedError(message)
    check_quantizer(_OP, quantizer)
    check_flags(_OP, transA=transA, transB=transB)
    w = operand_of(A, "A", k_outermost=not transA)
    x = operand_of(B, "B", k_outermost=transB)
    if x.k != w.k:
        message = (
            f"{_OP}: A of shape {list(w.shape)} (transA={transA}) and B of shape {list(x.shape)} (transB={transB}) do "
            f"not fit: the summed dimensions are {w.k} and {x.k}"
        )
        raise ExtensionError(message)
    options = _Options(quantizer, gelu, gelu_in, grad, accumulate)
    _check_options(options, D, bias, is_transposed=transB, is_plain=x.block < 0)
    shape = torch.Size((*((x.outer,) if transB else x.shape[:-1]), w.outer))
    dtype = _result_dtype(output_dtype, D, w, shape, quantizer)
    given = None if bias is None or grad else _checked_bias(bias, w.outer)
    if not use_split_accumulator and max(x.block, w.block) > 0:
        message = (
            f"{_OP}: use_split_accumulator must be True for block scales, whose sums are added in FP32 between the "
            "tensor cores' products"
        )
        raise ExtensionError(message)
    is_fast = not use_split_accumulator and x.block + w.block > -2
    scales = float(alpha), _beta(beta, accumulate=accumulate)
    product = _Product(x, w, given, *scales, is_fast)
    out, pre_gelu = _computed(product, options, D, shape, dtype, bias_type)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = x.arguments[0].sum(0).to(dtype)
    return [out, bias_grad, pre_gelu, None]


class _Options(NamedTuple):
    quantizer: Any
    gelu: bool
    gelu_in: torch.Tensor | None
    grad: bool
    accumulate: bool


def _beta(beta: float | None, *, accumulate: bool) -> float:
    if accumulate:
        return 1.0 if beta is None else float(beta)
    if beta not in (None, 0.0):
        message = f"{_OP}: beta={beta} applies to D with accumulate=True alone"
        raise ExtensionError(message)
    return 0.0


def _check_options(
    options: _Options, D: Any, bias: Any, *, is_transposed: bool, is_plain: bool
) -> None:
    if options.accumulate and (options.quantizer is not None or D is None):
        message = f"{_OP}: accumulate=True needs a plain D and no quantizer"
        raise ExtensionError(message)
    if options.quantizer is None and isinstance(D, QuantizedTensorStorage):
        message = f"{_OP}: D is quantised; give its quantizer, too"
        raise ExtensionError(message)
    if options.gelu and options.grad and options.gelu_in is None:
        message = f"{_OP}: gelu with grad needs gelu_in, the input of GELU"
        raise ExtensionError(message)
    if not options.grad or bias is None:
        return
    if options.gelu or not is_transposed or not is_plain:
        message = (
            f"{_OP}: the gradient of a bias comes with a plain B of layout NT and without gelu alone; use "
            "tex.bgrad_quantize, or sum the gradient's rows"
        )
        raise UnsupportedError(message)


def _result_dtype(
    output_dtype: Any, D: Any, w: Operand, shape: torch.Size, quantizer: Any
) -> torch.dtype:
    if D is not None and tuple(D.size()) != tuple(shape):
        message = f"{_OP}: D must have shape {list(shape)}, got {list(D.size())}"
        raise ExtensionError(message)
    own = None if D is None or quantizer is not None else D.dtype
    if output_dtype is None:
        return w.dtype if own is None else own
    dtype = (
        output_dtype
        if isinstance(output_dtype, torch.dtype)
        else TE_DType_To_Torch[DType.cast(output_dtype)]
    )
    if own is not None and dtype != own:
        message = f"{_OP}: D must be {dtype} as output_dtype says, got {own}"
        raise ExtensionError(message)
    return dtype


def _checked_bias(bias: torch.Tensor, cols: int) -> torch.Tensor:
    if bias.numel() != cols:
        message = f"{_OP}: bias must have {cols} elements, got {list(bias.shape)}"
        raise ExtensionError(message)
    return bias.detach().contiguous().view(cols)


def _computed(
    product: _Product,
    options: _Options,
    D: Any,
    shape: torch.Size,
    dtype: torch.dtype,
    bias_type: Any,
) -> tuple[Any, torch.Tensor | None]:
    """Return the result and the input of GELU."""
    quantizer = options.quantizer
    if not options.gelu:
        if quantizer is None:
            out = D if D is not None else torch.empty(shape, dtype=dtype, device=product.x.device)
            product.write(_contiguous(out))
            return out, None
        wide = torch.float32 if _casts_sums(product, quantizer) else dtype
        result = torch.empty(shape, dtype=wide, device=product.x.device)
        product.write(result)
        return _named(finished(result, quantizer, D), D, dtype), None
    result, pre_gelu = _gelu(product, options, D, shape, dtype)
    if options.grad or pre_gelu is None:
        pre_gelu = None
    elif product.x.block >= 0:
        pre_gelu = pre_gelu.to(TE_DType_To_Torch[DType.cast(bias_type)])
    if quantizer is not None:
        return _named(finished(result, quantizer, D), D, dtype), pre_gelu
    if D is None:
        return result, pre_gelu
    return D.copy_(result), pre_gelu


def _contiguous(out: torch.Tensor) -> torch.Tensor:
    if not out.is_contiguous():
        message = f"{_OP}: D must be contiguous, got strides {list(out.stride())}"
        raise ExtensionError(message)
    return out.detach()


def _casts_sums(product: _Product, quantizer: Any) -> bool:
    """Tell whether Transformer Engine casts the sums themselves to FP8: a known scale, and FP8 operands with one."""
    return isinstance(quantizer, Float8Quantizer) and 0 in (product.x.block, product.w.block)


def _named(made: Any, given: Any, dtype: torch.dtype) -> Any:
    """Give a new quantised tensor its nominal type."""
    if given is not None or made._dtype == dtype:
        return made
    if isinstance(made, torch.Tensor):
        return made.to_dtype(dtype)  # type: ignore[attr-defined]
    made._dtype = dtype
    return made


def _gelu(
    product: _Product, options: _Options, D: Any, shape: torch.Size, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = math.prod(shape[:-1]), shape[-1]
    if options.accumulate:
        before = D.detach().reshape(rows).clone(memory_format=torch.contiguous_format)
    else:
        before = torch.empty(rows, dtype=dtype, device=product.x.device)
    product.write(before)
    out = activation_outputs(before, _GELU, gradient=options.grad)
    if options.gelu_in is not None and options.grad:
        if options.gelu_in.numel() != before.numel():
            message = (
                f"{_OP}: gelu_in must have shape {list(shape)}, got {list(options.gelu_in.shape)}"
            )
            raise ExtensionError(message)
        at = options.gelu_in.detach().to(dtype).contiguous().view(before.shape)
        activation_backward(before, at, _GELU, out)
    else:
        activation(before, _GELU, out)
    assert out.high_precision is not None
    return out.high_precision.view(shape), before.view(shape)
