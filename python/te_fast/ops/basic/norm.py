"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from te_fast.errors import ArgumentError, ShapeError, UnsupportedError
from te_fast.ops.basic.activation import differentiate
from te_fast.ops.common import compute_dtype, parameter_options, to_real
from te_fast.ops.op import ALONE, BasicOperation, Beside, OperationContext

__all__ = ["LayerNorm", "RMSNorm"]


class Norm(BasicOperation):
    """A normalisation over the last dimensions, with learnt factors.

    Parameters
    ----------
    normalized_shape : int or iterable of int
        Dimensions that are normalised together.
    eps : float, default = 1e-5
        Added to the variance, or mean square.
    device, dtype : optional
        As of :class:`BasicLinear`.
    zero_centered_gamma : bool, default = False
        The factor is ``1 + weight``, and the weight zero at first.
    sm_margin : int or dict, default = 0
        Multiprocessors left to other kernels; only 0 is supported.
    """

    _constant_names = frozenset({"eps", "zero_centered_gamma"})
    #: Name in the native program.
    _kind: ClassVar[str]
    _names: ClassVar[tuple[str, ...]]
    weight: torch.Tensor

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        if not shape or any(size < 1 for size in shape):
            message = f"{name}: normalized_shape must be positive sizes, got {normalized_shape!r}"
            raise ArgumentError(message)
        margins = sm_margin.values() if isinstance(sm_margin, dict) else (sm_margin,)
        if any(margins):
            message = f"{name}: sm_margin is not supported yet; leave it at its default"
            raise UnsupportedError(message)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        options = parameter_options(device, dtype, name)
        for parameter in self._names:
            self.register_parameter(parameter, torch.nn.Parameter(torch.empty(shape, **options)))
        if options["device"].type != "meta":
            self.reset_parameters()

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        """Dimensions that are normalised together."""
        return tuple(self.weight.shape)

    def reset_parameters(self) -> None:
        """Initialise the parameters, after making those real that are on the meta device."""
        weight = to_real(self, "weight")
        torch.nn.init.constant_(weight, 0.0 if self.zero_centered_gamma else 1.0)
        if "bias" in self._names:
            torch.nn.init.zeros_(to_real(self, "bias"))

    def pre_first_fuser_forward(self) -> None:
        """Make parameters on the meta device real."""
        if self.weight.is_meta:
            self.reset_parameters()

    def _is_native(self, beside: Beside = ALONE) -> bool:
        # The native program normalises the last dimension alone.
        return len(self.normalized_shape) == 1 and super()._is_native(beside)

    def _result_type(
        self,
        dtype: torch.dtype,
        extras: tuple[torch.dtype, ...],
        autocast: torch.dtype | None,
    ) -> torch.dtype:
        return autocast or self.weight.dtype

    def _append_to(self, program: Any, label: str) -> None:
        program.norm(
            label,
            self._kind,
            self._parameters,
            "weight",
            "bias" if "bias" in self._names else None,
            self.normalized_shape[0],
            self.eps,
            self.zero_centered_gamma,
        )

    def _check(self, x: torch.Tensor) -> None:
        shape = self.normalized_shape
        if x.dim() < len(shape) or tuple(x.shape[x.dim() - len(shape) :]) != shape:
            message = (
                f"{type(self).__name__}: the input's last dimensions must be {list(shape)}, got a "
                f"tensor of shape {list(x.shape)}"
            )
            raise ShapeError(message)

    def _formula(self, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        """Return the normalised input in FP32, differentiably."""
        raise NotImplementedError

    def _gamma(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 1.0 if self.zero_centered_gamma else weight

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Normalise in FP32 and round once; keep the input."""
        self._check(input_)
        x = input_.to(compute_dtype(input_, self.weight))
        ctx.dtype = x.dtype  # type: ignore[attr-defined]
        parameters = [getattr(self, name) for name in self._names]
        if ctx.requires_grad:
            ctx.save_for_backward(x, *parameters)
        return self._formula(x.float(), *(p.float() for p in parameters)).to(x.dtype)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Differentiate the formula at the kept input."""
        inputs = tuple(tensor for tensor in ctx.saved_tensors or () if tensor is not None)
        wide = tuple(tensor.float() for tensor in inputs)
        _, grads = differentiate(self._formula, wide, grad_output.float())
        dx, *rest = (grad.to(old.dtype) for grad, old in zip(grads, inputs, strict=True))
        return dx, tuple(rest)

    def extra_repr(self) -> str:
        """Shape and options."""
        return (
            f"{self.normalized_shape}, eps={self.eps}, "
            f"zero_centered_gamma={self.zero_centered_gamma}"
        )


class LayerNorm(Norm):
    """``(x - mean) / sqrt(variance + eps) · γ + β``."""

    _kind = "LayerNorm"
    _names = ("weight", "bias")
    bias: torch.Tensor

    def _formula(self, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        gamma = self._gamma(weight)
        return torch.nn.functional.layer_norm(x, weight.shape, gamma, bias[0], self.eps)


class RMSNorm(Norm):
    """``x / sqrt(mean(x²) + eps) · γ``."""

    _kind = "RMSNorm"
    _names = ("weight",)

    def _formula(self, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(-weight.dim(), 0))
        rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + self.eps)
        return x * rstd * self._gamma(weight)
