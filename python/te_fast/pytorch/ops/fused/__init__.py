"""Where Transformer Engine keeps its fused operations.

te_fast has no classes for them: the native program of a group decides its fusions, forward and
backward apart, and :meth:`te_fast.pytorch.ops.Sequential.explain` shows them. Fusions of the user's
own are registered with ``register_forward_fusion`` and its kin.
"""

from __future__ import annotations

from te_fast.errors import MissingError

__all__: list[str] = []


def __getattr__(name: str) -> object:
    """Say where fusions are instead, to those who import one."""
    if name.startswith("_"):
        raise AttributeError(name)
    message = (
        f"te_fast.pytorch.ops.fused.{name}: te_fast fuses inside of native programs and has no fused "
        "classes; Sequential.explain() shows what was fused"
    )
    raise MissingError(message)
