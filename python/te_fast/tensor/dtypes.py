"""Element types by Transformer Engine's numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from te_fast.errors import ArgumentError, DtypeError


class DType(IntEnum):
    """Element types by the numbers that Transformer Engine's native half has for them.

    See Also
    --------
    Float8Quantizer : Takes one as its FP8 type.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> te.DType.kFloat8E4M3.name
    'kFloat8E4M3'
    """

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, value: Any) -> DType:
        """Return the type for a number, or for a type of Transformer Engine or of torch.

        Raises
        ------
        ArgumentError
            If there is no such type.
        """
        if isinstance(value, torch.dtype):
            value = TE_DType.get(value, value)
        try:
            return cls(int(value))
        except (TypeError, ValueError):
            message = f"DType: expected an element type or its number, got {value!r}"
            raise ArgumentError(message) from None


#: torch's types to Transformer Engine's.
TE_DType = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.half: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
#: The inverse.
TE_DType_To_Torch = {kind: dtype for dtype, kind in TE_DType.items()}

#: The types that quantised tensors hold, by the names that the native half has for them.
NATIVE_NAMES = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2"}
FROM_NATIVE = {name: kind for kind, name in NATIVE_NAMES.items()}


def fp8_name(dtype: Any) -> str:
    """Return the native name of an FP8 type.

    Raises
    ------
    DtypeError
        If it is not one.
    """
    name = NATIVE_NAMES.get(dtype if type(dtype) is DType else DType.cast(dtype))
    if name is None:
        message = (
            f"quantizer: the type must be DType.kFloat8E4M3 or DType.kFloat8E5M2, got {dtype!r}"
        )
        raise DtypeError(message)
    return name
