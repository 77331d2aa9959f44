"""Activations without gate, and what all activations have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn import functional

from te_fast.errors import DtypeError, ShapeError
from te_fast.ops.common import compute_dtype
from te_fast.ops.op import BasicOperation, OperationContext

__all__ = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU"]

_E4M3_MAX = 448.0
_QUICK = 1.702


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU's tanh form."""
    return functional.gelu(x, approximate="tanh")


def qgelu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x σ(1.702 x)``."""
    return x * torch.sigmoid(_QUICK * x)


def srelu(x: torch.Tensor) -> torch.Tensor:
    """Return ``max(x, 0)²``."""
    return functional.relu(x).square()


#: Formulas of activations, and of the gates of gated ones, by their native names.
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "qgelu": qgelu,
    "relu": functional.relu,
    "srelu": srelu,
    "silu": functional.silu,
    "geglu": gelu,
    "glu": torch.sigmoid,
    "qgeglu": qgelu,
    "reglu": functional.relu,
    "sreglu": srelu,
    "swiglu": functional.silu,
}


class Activation(BasicOperation):
    """An activation function that is applied elementwise.

    Parameters
    ----------
    cache_quantized_input : bool, default = False
        Keep the input for backward in FP8 (E4M3, one scale): half the memory, more rounding.
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

    def _result_type(
        self,
        dtype: torch.dtype,
        extras: tuple[torch.dtype, ...],
        autocast: torch.dtype | None,
    ) -> torch.dtype:
        return autocast or dtype

    def _formula(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of an FP32 or FP64 tensor, differentiably."""
        return FORMULAS[self._kind](x)

    def _check(self, x: torch.Tensor) -> None:
        """Raise if the activation cannot be applied."""
        if not x.is_floating_point():
            message = f"{type(self).__name__}: the input must be floating point, got {x.dtype}"
            raise DtypeError(message)

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Apply the activation in FP32 and round once; keep the input."""
        self._check(input_)
        x = input_.to(compute_dtype(input_))
        if ctx.requires_grad:
            _keep(ctx, x, quantized=self.cache_quantized_input)
        return self._formula(x.float()).to(x.dtype)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Differentiate the formula at the kept input."""
        x = _kept(ctx)
        _, (dx,) = differentiate(self._formula, (x.float(),), grad_output.float())
        return dx.to(x.dtype), ()


def differentiate(
    function: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return a function's value and the gradients of its inputs."""
    with torch.enable_grad():
        leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        value = function(*leaves)
        return value.detach(), torch.autograd.grad(value, leaves, grad)


def _keep(ctx: OperationContext, x: torch.Tensor, *, quantized: bool) -> None:
    ctx.dtype = x.dtype  # type: ignore[attr-defined]
    if not quantized:
        ctx.save_for_backward(x)
        return
    amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    usable = amax.isfinite() & (amax > 0)
    scale = torch.where(usable, _E4M3_MAX / amax, torch.ones_like(amax))
    scaled = (x.float() * scale).clamp(-_E4M3_MAX, _E4M3_MAX)
    ctx.save_for_backward(scaled.to(torch.float8_e4m3fn), scale.reciprocal())


def _kept(ctx: OperationContext) -> torch.Tensor:
    assert ctx.saved_tensors is not None
    x, *inverse = ctx.saved_tensors
    assert x is not None
    if inverse:
        scale_inv: Any = inverse[0]
        x = (x.float() * scale_inv).to(ctx.dtype)  # type: ignore[attr-defined]
    return x


class GELU(Activation):
    """Gaussian error linear unit in its tanh form: ``x/2 (1 + tanh(0.797 x + 0.036 x³))``."""

    _kind = "gelu"


class QGELU(Activation):
    """Quick approximation of GELU: ``x σ(1.702 x)``."""

    _kind = "qgelu"


class ReLU(Activation):
    """Rectified linear unit: ``max(x, 0)``."""

    _kind = "relu"


class SReLU(Activation):
    """Squared rectified linear unit: ``max(x, 0)²``."""

    _kind = "srelu"


class SiLU(Activation):
    """Sigmoid linear unit: ``x σ(x)``."""

    _kind = "silu"


def check_halves(op: BasicOperation, x: torch.Tensor, interleave: int | None) -> None:
    """Raise unless the last dimension holds gates and linear units in whole blocks."""
    multiple = 2 * (interleave or 1)
    if x.dim() == 0 or x.shape[-1] % multiple:
        message = (
            f"{type(op).__name__}: the input's last dimension must be a multiple of {multiple}, "
            f"got a tensor of shape {list(x.shape)}"
        )
        raise ShapeError(message)
