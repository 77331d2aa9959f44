"""Gated activations. The first half of the last dimension is the gate, unlike in ``torch.nn.GLU``."""

from __future__ import annotations

import math
from typing import Any

from te_fast.errors import ArgumentError
from te_fast.ops.basic.activation import Activation


def check_interleave(size: int | None, op: str) -> int | None:
    """Return the size of the blocks of gates and linear units.

    Raises
    ------
    ArgumentError
        If it is not a positive integer.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        message = f"{op}: glu_interleave_size must be a positive integer or None, got {size!r}"
        raise ArgumentError(message)
    return size


def check_positive(op: str, **values: float) -> None:
    """Raise for a parameter that is not a positive, finite number.

    Raises
    ------
    ArgumentError
        With its name.
    """
    for name, value in values.items():
        try:
            is_fine = not isinstance(value, str) and 0 < float(value) < math.inf
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ):  # torch raises RuntimeError for a tensor of several numbers
            is_fine = False
        if not is_fine:
            message = f"{op}: {name} must be positive and finite, got {value!r}"
            raise ArgumentError(message)


class GatedActivation(Activation):
    """An activation ``f(a) · b`` of the halves of the last dimension.

    Parameters
    ----------
    cache_quantized_input : bool, default = False
        Keep the input for backward in FP8 (E4M3, one scale): half the memory, more rounding.
    glu_interleave_size : int, optional
        Gates and linear units alternate in blocks of this size, instead of being halves.
    """

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = check_interleave(glu_interleave_size, type(self).__name__)

    def _constants(self) -> dict[str, Any]:
        return {**super()._constants(), "interleave": self.glu_interleave_size or 0}


class GLU(GatedActivation):
    """Gated linear unit ``σ(a) · b``; `a` is the first half, unlike in ``torch.nn.GLU``.

    See Also
    --------
    SwiGLU : Another gated one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.GLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]))
    tensor([[0.8068, 0.4404]])
    """

    _kind = "glu"


class GEGLU(GatedActivation):
    """``GELU(a) · b`` with GELU's tanh form.

    See Also
    --------
    GELU : Of one half.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.GEGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]))
    tensor([[-0.4764,  0.9773]])
    """

    _kind = "geglu"


class QGEGLU(GatedActivation):
    """``a σ(1.702 a) · b``.

    See Also
    --------
    QGELU : Of one half.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.QGEGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]))
    tensor([[-0.4626,  0.9678]])
    """

    _kind = "qgeglu"


class ReGLU(GatedActivation):
    """``max(a, 0) · b``.

    See Also
    --------
    ReLU : Of one half.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ReGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]))
    tensor([[0., 1.]])
    """

    _kind = "reglu"


class SReGLU(GatedActivation):
    """``max(a, 0)² · b``.

    See Also
    --------
    SReLU : Of one half.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.SReGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]))
    tensor([[0., 2.]])
    """

    _kind = "sreglu"


class SwiGLU(GatedActivation):
    """``SiLU(a) · b``.

    See Also
    --------
    SiLU : Of one half.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.SwiGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]))
    tensor([[-0.8068,  0.8808]])
    """

    _kind = "swiglu"


class Clamped(Activation):
    """GPT-OSS's SwiGLU, whose halves are clamped first."""

    _kind = "clamped_swiglu"

    def _set_clamps(self, limit: float, alpha: float, glu_linear_offset: float) -> None:
        check_positive(type(self).__name__, limit=limit)
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset

    def _constants(self) -> dict[str, Any]:
        names = ("limit", "alpha", "glu_linear_offset")
        return {**super()._constants(), **{name: getattr(self, name) for name in names}}


class Capped(Activation):
    """SwiGLU with both halves softly capped."""

    _kind = "situ_glu"

    def _set_caps(self, beta1: float, beta2: float) -> None:
        check_positive(type(self).__name__, beta1=beta1, beta2=beta2)
        self.beta1 = beta1
        self.beta2 = beta2

    def _constants(self) -> dict[str, Any]:
        return {**super()._constants(), "beta1": self.beta1, "beta2": self.beta2}


class ClampedSwiGLU(Clamped, GatedActivation):
    """GPT-OSS's SwiGLU: ``a σ(α a) · (b + offset)`` with both halves clamped first.

    Parameters
    ----------
    limit : float, default = 7.0
        ``a`` is clamped from above, ``b`` from both sides.
    alpha : float, default = 1.702
        Factor in the sigmoid.
    glu_linear_offset : float, default = 1.0
        Added to the clamped ``b``.
    cache_quantized_input, glu_interleave_size
        As in :class:`SwiGLU`.

    See Also
    --------
    SwiGLU : Another gated one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ClampedSwiGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]))
    tensor([[-0.6168,  2.9035]])
    """

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size
        )
        self._set_clamps(limit, alpha, glu_linear_offset)


class SiTUGLU(Capped, GatedActivation):
    """``β₁ tanh(a/β₁) σ(a) · β₂ tanh(b/β₂)``: SwiGLU with both halves softly capped.

    Parameters
    ----------
    beta1, beta2 : float, default = 4.0, 25.0
        Caps.
    cache_quantized_input, glu_interleave_size
        As in :class:`SwiGLU`.

    See Also
    --------
    SwiGLU : Another gated one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.SiTUGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]))
    tensor([[-0.7867,  0.8140]])
    """

    def __init__(
        self,
        beta1: float = 4.0,
        beta2: float = 25.0,
        *,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size
        )
        self._set_caps(beta1, beta2)
