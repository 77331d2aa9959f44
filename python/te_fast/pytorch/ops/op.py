"""Base classes of operations where Transformer Engine has them."""

from te_fast.ops.op import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
)

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "OperationContext",
]
