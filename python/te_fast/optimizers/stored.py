"""Storage of optimizers' FP32 numbers: as they are, in FP16 or FP8 with a scale, in BF16, or as remainders."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.tensor.dtypes import DType
from te_fast.tensor.float8 import Float8Quantizer, Float8Tensor

#: Types in which moments may be stored; FP8 is named by the type of its bytes.
MOMENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
MASTER_DTYPES = (torch.float32, torch.float16)
# Scales have a finite reciprocal: moments of weights without gradients decay to less than any number.
_LEAST_SCALE = torch.finfo(torch.float32).tiny
# The largest number after scaling: half of FP16's, since the moments grow before the next scale, and all of E4M3's.
_LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2.0, torch.uint8: 448.0}


def make(like: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return zeros of a tensor's shape in a storage type, and their scale if the type has one.

    Parameters
    ----------
    like : torch.Tensor
        A tensor with the shape and the device.
    dtype : torch.dtype
        One of :data:`MOMENT_DTYPES`.
    """
    kind: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
    if dtype is not torch.uint8:
        scale = torch.ones(1, **kind) if dtype in _LARGEST else None
        return torch.zeros_like(like, dtype=dtype), scale
    ones, zeros = torch.ones(1, **kind), torch.zeros(1, **kind)
    quantizer = Float8Quantizer(ones, zeros, DType.kFloat8E4M3, columnwise=False)
    return quantizer(torch.zeros_like(like, dtype=torch.float32)), torch.ones_like(ones)


def read(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers in FP32; if they are stored in FP32, return the stored tensor itself."""
    if stored.dtype is torch.float32 and not isinstance(stored, Float8Tensor):
        return stored
    values = stored.float()
    return values if scale is None or isinstance(stored, Float8Tensor) else values.mul_(scale[0])


def write(stored: torch.Tensor, scale: torch.Tensor | None, values: torch.Tensor) -> None:
    """Store FP32 numbers, with a new scale if the type has one.

    Parameters
    ----------
    stored : torch.Tensor
        The stored tensor.
    scale : torch.Tensor, optional
        Its scale, FP32 ``(1,)``, written, too.
    values : torch.Tensor
        The numbers, FP32.
    """
    if stored is values:
        return
    if scale is None:
        stored.copy_(values)
        return
    is_fp8 = isinstance(stored, Float8Tensor)
    largest = _LARGEST[torch.uint8 if is_fp8 else torch.float16]
    # An empty tensor has no maximum.
    found = values.abs().amax() if values.numel() else values.new_zeros(())
    scale.copy_((found / largest).clamp_min(_LEAST_SCALE) * (found > 0))
    factor = torch.where(scale > 0, scale.reciprocal(), 1.0)
    if isinstance(stored, Float8Tensor):
        quantizer: Any = stored._quantizer
        quantizer.scale.copy_(factor)
        stored.quantize_(values)
    else:
        stored.copy_(values * factor[0])


# Remainders: an FP32 number as a BF16 one, rounded, and its lower 16 bits.


def split(values: torch.Tensor, rounded: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write FP32 numbers as the nearest BF16 numbers and the lower 16 bits; :func:`join` is the inverse.

    Parameters
    ----------
    values : torch.Tensor
        FP32.
    rounded : torch.Tensor
        BF16, written.
    remainder : torch.Tensor
        int16, written.
    """
    bits = values.contiguous().view(torch.int32)
    low = bits.to(torch.int16)
    # Rounding must not carry a NaN over into the sign.
    high = (bits >> 16) + ((low < 0) & ~values.isnan())
    rounded.copy_(high.to(torch.int16).view(torch.bfloat16))
    remainder.copy_(low)


def join(rounded: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the FP32 numbers that :func:`split` was given."""
    high = rounded.contiguous().view(torch.int16).to(torch.int32)
    high = high - ((remainder < 0) & ~rounded.isnan()).to(torch.int32)
    bits = (high << 16) | (remainder.to(torch.int32) & 0xFFFF)
    return bits.view(torch.float32)
