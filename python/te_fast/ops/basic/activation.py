"""Activations without a gate, and the base class of all activations."""

from __future__ import annotations

from typing import Any, ClassVar

from te_fast.ops.basic.native import NativeOperation


class Activation(NativeOperation):
    """An activation function that is applied elementwise.

    Parameters
    ----------
    cache_quantized_input : bool, default = False
        Keep the input for backward in FP8 (E4M3, one scale): half the memory, more rounding. If the operation runs in
        Python, beside a fusion or a method of the user, the rounding is the same but no memory is saved.
    """

    _constant_names = frozenset(
        {
            "cache_quantized_input",
            "glu_interleave_size",
            "limit",
            "alpha",
            "glu_linear_offset",
            "beta1",
            "beta2",
        }
    )
    #: Name in the native program.
    _kind: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def _append_to(self, program: Any, label: str) -> None:
        cached = self.cache_quantized_input
        program.activation(label, self._kind, cache_quantized_input=cached, **self._constants())

    def _constants(self) -> dict[str, Any]:
        """Return the keywords that the native program takes."""
        return {}


class GELU(Activation):
    """Gaussian error linear unit in its tanh form: ``x/2 (1 + tanh(0.797 x + 0.036 x³))``.

    See Also
    --------
    GEGLU : The gated one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.GELU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[-0.1588,  1.9546]])
    """

    _kind = "gelu"


class QGELU(Activation):
    """Quick approximation of GELU: ``x σ(1.702 x)``.

    See Also
    --------
    QGEGLU : The gated one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.QGELU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[-0.1542,  1.9357]])
    """

    _kind = "qgelu"


class ReLU(Activation):
    """Rectified linear unit: ``max(x, 0)``.

    See Also
    --------
    ReGLU : The gated one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ReLU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 2.]])
    """

    _kind = "relu"


class SReLU(Activation):
    """Squared rectified linear unit: ``max(x, 0)²``.

    See Also
    --------
    SReGLU : The gated one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.SReLU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 4.]])
    """

    _kind = "srelu"


class SiLU(Activation):
    """Sigmoid linear unit: ``x σ(x)``.

    See Also
    --------
    SwiGLU : The gated one.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.SiLU()(torch.tensor([[-1.0, 2.0]]))
    tensor([[-0.2689,  1.7616]])
    """

    _kind = "silu"
