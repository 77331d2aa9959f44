"""``Dropout`` where Transformer Engine has it."""

from te_fast.ops.basic.dropout import Dropout

__all__ = ["Dropout"]
