"""Results of native functions: plain, or quantised as a quantizer asks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_fast.errors import UnsupportedError
from te_fast.tensor.dtypes import TE_DType_To_Torch
from te_fast.tensor.float8 import Float8Quantizer
from te_fast.tensor.quantizer import Quantizer

#: Native functions pad the rows of the column layout to a multiple of this, tensors do not.
_COLUMN_ALIGN = 16


def check_quantizer(op: str, quantizer: Any) -> None:
    """Refuse what is no quantizer of te_fast.

    Raises
    ------
    UnsupportedError
        If `quantizer` is neither None nor a :class:`te_fast.pytorch.Quantizer`.
    """
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        message = f"{op}: quantizer must be None or one of te_fast.pytorch, got {type(quantizer).__name__}"
        raise UnsupportedError(message)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as rows ``(-1, cols)``, outside of autograd."""
    x = x.detach().contiguous()
    return x.view(x.shape[:-1].numel(), x.shape[-1])


class Fused(NamedTuple):
    """A quantised tensor whose memory a native function writes itself."""

    made: Any
    rowwise_data: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    scale_inv: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor


def fused(quantizer: Any, shape: torch.Size, like: torch.Tensor) -> Fused | None:
    """Allocate a quantised tensor for a function that casts by itself, which needs the scale beforehand.

    Parameters
    ----------
    quantizer : Quantizer or None
        Only :class:`Float8Quantizer` has its scale beforehand.
    shape : torch.Size
        Of the tensor.
    like : torch.Tensor
        Gives device and nominal type.

    Returns
    -------
    Fused or None
        None if the result must be quantised in a second pass.
    """
    if type(quantizer) is not Float8Quantizer or quantizer.scale.device != like.device:
        return None
    rows = shape[:-1].numel()
    if rows == 0 or (quantizer.columnwise_usage and rows % _COLUMN_ALIGN):
        return None
    made = quantizer.make_empty(shape, dtype=like.dtype, device=like.device)
    fp8 = TE_DType_To_Torch[quantizer.dtype]
    value = made._value
    row, col = (
        None if one is None else one.view(size).view(fp8)
        for one, size in ((value.row, (rows, shape[-1])), (value.col, (shape[-1], rows)))
    )
    return Fused(made, row, col, value.row_scale, quantizer.scale, quantizer.amax)


def finished(result: torch.Tensor, quantizer: Any, output: Any = None) -> Any:
    """Quantise a result, if there is a quantizer.

    Parameters
    ----------
    result : torch.Tensor
        Plain values.
    quantizer : Quantizer or None
        Makes the result.
    output : QuantizedTensor, optional
        Is written and returned.
    """
    if quantizer is None:
        return result
    with torch.no_grad():
        if output is not None:
            return quantizer.update_quantized(result, output)
        return quantizer.quantize_impl(result)
