"""What a :class:`CustomRecipe`'s factory is asked, and requests that it may answer with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_fast.recipe.base import Format

__all__ = ["DelayedScalingRequest", "QuantizerRequest", "QuantizerRole"]


@dataclass(frozen=True)
class QuantizerRole:
    """The tensor that a quantizer is for.

    Parameters
    ----------
    module_type : {'linear', 'grouped_linear', ''}
        The kind of operation that reads the tensor.
    tensor_type : {'input', 'weight', 'grad_output', ''}
        The operand.
    name : str
        The `name` that a layer was made with, followed by ``.fc1`` or ``.fc2`` in a ``LayerNormMLP``; empty without.

    See Also
    --------
    CustomRecipe : Whose factory takes roles.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> print(te.QuantizerRole("linear", "weight", "decoder.proj"))
    module_type=linear|tensor_type=weight|name=decoder.proj
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        """List the fields that are not empty."""
        fields = ("module_type", "tensor_type", "name")
        given = [f"{field}={getattr(self, field)}" for field in fields if getattr(self, field)]
        return "|".join(given) or "QuantizerRole()"


@dataclass(frozen=True)
class QuantizerRequest:
    """Base of requests for quantizers whose scales the library keeps.

    See Also
    --------
    DelayedScalingRequest : The only one.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> isinstance(te.DelayedScalingRequest(), te.QuantizerRequest)
    True
    """


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Ask for delayed scaling; the parameters are those of :class:`DelayedScaling`.

    Parameters
    ----------
    fp8_format : {Format.E4M3, Format.HYBRID}, default = Format.HYBRID
        Number formats of the forward and backward pass.
    margin : int, default = 0
        Scales are lowered by ``2 ** margin``.
    amax_history_len : int, default = 1024
        Length of the window of absolute maxima.
    amax_compute_algo : {'max', 'most_recent', Callable}, default = 'max'
        Picks the maximum that the scale comes from.
    scaling_factor_compute_algo : Callable, optional
        Computes the scale.
    reduce_amax : bool, default = True
        Reduce the maxima over ranks.

    See Also
    --------
    DelayedScaling : The recipe.

    Examples
    --------
    >>> import te_fast.pytorch as te
    >>> te.DelayedScalingRequest(amax_history_len=16).amax_history_len
    16
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Any], Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
