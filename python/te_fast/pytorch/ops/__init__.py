"""Operations that fuse: Transformer Engine's ``transformer_engine.pytorch.ops`` on native programs."""

from __future__ import annotations

from te_fast._names import publish
from te_fast.pytorch._missing import missing
from te_fast.pytorch.ops import basic, fused, fuser, linear, op, sequential
from te_fast.pytorch.ops.basic import *  # noqa: F403 - its __all__ is part of this one
from te_fast.pytorch.ops.fuser import *  # noqa: F403
from te_fast.pytorch.ops.linear import *  # noqa: F403
from te_fast.pytorch.ops.op import *  # noqa: F403
from te_fast.pytorch.ops.sequential import *  # noqa: F403

__all__ = ["fused"]
__all__ += basic.__all__
__all__ += fuser.__all__
__all__ += linear.__all__
__all__ += op.__all__
__all__ += sequential.__all__

publish(__name__)


def __getattr__(name: str) -> object:
    """Say so of what Transformer Engine has here and te_fast does not yet."""
    raise missing(__name__, name)
