"""The place of Transformer Engine's fused operations.

te_fast has no classes for them. The native program of a group decides its fusions, separately for forward and backward,
and :meth:`te_fast.pytorch.ops.Sequential.explain` shows them. Fusions of the user's own are registered with
``register_forward_fusion`` and its kin.
"""

from __future__ import annotations

from te_fast.errors import MissingError

__all__: list[str] = []


def __getattr__(name: str) -> object:
    """Raise an error that says where te_fast shows fusions."""
    if name.startswith("_"):
        raise AttributeError(name)
    message = (
        f"te_fast.pytorch.ops.fused.{name}: te_fast fuses inside of native programs and has no fused "
        "classes; Sequential.explain() shows what was fused"
    )
    raise MissingError(message)
