"""Quantisation with the names of Transformer Engine's extension."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from te_fast.tensor.dtypes import DType, TE_DType_To_Torch
from te_fast.tex.errors import ExtensionError, check_lists, check_rows
from te_fast.tex.outputs import check_quantizer, finished, rows_of


def _required(op: str, quantizer: Any) -> None:
    check_quantizer(op, quantizer)
    if quantizer is None:
        message = f"{op}: a quantizer is missing; give one of te_fast.pytorch"
        raise ExtensionError(message)


@torch.no_grad()
def quantize(
    tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None
) -> Any:
    """Quantise a tensor, outside of autograd.

    Parameters
    ----------
    tensor : torch.Tensor
        float32, float16 or bfloat16, of any strides.
    quantizer : Quantizer
        Says how.
    output : QuantizedTensor or QuantizedTensorStorage, optional
        Is written and returned; a new one by default.
    noop : torch.Tensor, optional
        One float32; if it is 1, nothing is written. A new result is uninitialised then.

    Returns
    -------
    QuantizedTensor or QuantizedTensorStorage
        A storage if the quantizer is internal.

    Raises
    ------
    ExtensionError
        If there is no quantizer.
    QuantizedTensorError, ShapeError, DtypeError
        If `tensor` or `output` does not fit.
    """
    _required("quantize", quantizer)
    if output is None and noop is None:
        return quantizer.quantize_impl(tensor)
    if output is None:
        output = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return quantizer.update_quantized(tensor, output, noop_flag=noop)


@torch.no_grad()
def dequantize(input: Any, otype: Any) -> torch.Tensor:
    """Return the values of a quantised tensor, outside of autograd.

    Parameters
    ----------
    input : QuantizedTensor or QuantizedTensorStorage
        The tensor.
    otype : DType or torch.dtype
        float32, float16 or bfloat16.

    Raises
    ------
    ExtensionError
        If `input` is not quantised.
    """
    if not hasattr(input, "dequantize") or type(input) is torch.Tensor:
        message = f"dequantize: expected a quantised tensor, got {type(input).__name__}"
        raise ExtensionError(message)
    dtype = otype if isinstance(otype, torch.dtype) else TE_DType_To_Torch.get(DType.cast(otype))
    values: torch.Tensor = input.dequantize(dtype=dtype)
    return values


@torch.no_grad()
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Sum the rows of a gradient, as the gradient of a bias, and quantise it.

    Parameters
    ----------
    input : torch.Tensor
        ``(..., cols)``.
    quantizer : Quantizer or None
        None leaves the gradient as it is.

    Returns
    -------
    list
        The sums ``(cols,)`` in the gradient's type, and the gradient.

    Raises
    ------
    UnsupportedError
        If `quantizer` is not te_fast's.
    """
    check_rows("bgrad_quantize", input=input)
    check_quantizer("bgrad_quantize", quantizer)
    gradient = input.detach().contiguous()
    return [rows_of(gradient).sum(0), finished(gradient, quantizer)]


def multi_tensor_quantize(
    tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]
) -> list[Any]:
    """Quantise each tensor with a quantizer of its own.

    Parameters
    ----------
    tensor_list : sequence of torch.Tensor
        Tensors.
    quantizer_list : sequence of Quantizer
        As many.

    Raises
    ------
    ExtensionError
        If there are not as many.
    """
    lists = {"tensor_list": tensor_list, "quantizer_list": quantizer_list}
    check_lists("multi_tensor_quantize", **lists)
    if len(tensor_list) != len(quantizer_list):
        message = (
            f"multi_tensor_quantize: expected one quantizer a tensor, got {len(tensor_list)} tensors and "
            f"{len(quantizer_list)} quantizers"
        )
        raise ExtensionError(message)
    return [quantize(*pair) for pair in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor along its first dimension, and quantise the parts.

    Parameters
    ----------
    tensor : torch.Tensor
        ``(rows, ...)``.
    split_sections : sequence of int
        Rows of the parts; rows behind the last part are left out.
    quantizer_list : sequence of Quantizer
        One for each part.
    disable_bulk_allocation : bool, default = False
        Each part has memory of its own in any case.

    Raises
    ------
    ExtensionError
        If the sections have more rows than the tensor, or there are not as many quantizers.
    """
    check_rows("split_quantize", tensor=tensor)
    lists = {"split_sections": split_sections, "quantizer_list": quantizer_list}
    check_lists("split_quantize", **lists)
    if len(split_sections) != len(quantizer_list):
        message = (
            f"split_quantize: expected {len(split_sections)} quantizers, got {len(quantizer_list)}"
        )
        raise ExtensionError(message)
    if not split_sections:
        return []
    are_sizes = all(isinstance(rows, Integral) and rows >= 0 for rows in split_sections)
    if not are_sizes or sum(split_sections) > tensor.shape[0]:
        message = (
            f"split_quantize: sections {list(split_sections)} do not fit a tensor of shape "
            f"{list(tensor.shape)}"
        )
        raise ExtensionError(message)
    sections = [*split_sections, tensor.shape[0] - sum(split_sections)]
    parts = tensor.detach().contiguous().split(sections)[:-1]
    return multi_tensor_quantize(parts, quantizer_list)


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    pin_memory: bool,
) -> Any:
    """Make a quantised tensor of any content.

    Parameters
    ----------
    quantizer : Quantizer
        Says which.
    shape : sequence of int
        Shape.
    dtype : torch.dtype
        Nominal type.
    device : torch.device
        Where.
    pin_memory : bool
        As of ``torch.empty``.

    Raises
    ------
    ExtensionError
        If there is no quantizer.
    """
    _required("create_empty_quantized_tensor", quantizer)
    return quantizer.make_empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)
