"""Whether a compiler is at work that sees native calls as operators."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

#: The first release of torch whose traces read attributes of native objects.
CAN_COMPILE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def is_in_graph() -> bool:
    """Tell whether this code is traced. Older releases leave their graph at a native call, and run it."""
    return CAN_COMPILE and is_compiling()


def is_exporting() -> bool:
    """Tell whether ``torch.export`` traces; not for code that a compiler looks into, for which torch says so always."""
    return CAN_COMPILE and torch.compiler.is_exporting()
