"""Activations whose rows are multiplied by an extra input, as the probabilities of MoE's experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import torch

from te_fast.errors import ShapeError, StateError, UnsupportedError
from te_fast.ops.basic.activation import Activation, check_halves, differentiate, srelu
from te_fast.ops.basic.glu import (
    check_interleave,
    check_positive,
    clamped_swiglu,
    clamps,
    halves,
    situ_glu,
)
from te_fast.ops.common import compute_dtype
from te_fast.ops.op import BasicOperation, OperationContext

__all__ = ["ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU"]

Grads = Iterable[Iterable[torch.Tensor | None]]


class ExtraTensorOperation(BasicOperation):
    """An operation with extra inputs or outputs: it has no ``op_forward``."""

    def op_forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: such an operation has ``fuser_forward``."""
        self._no_op_method("fuser_forward")

    def op_backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: such an operation has ``fuser_backward``."""
        self._no_op_method("fuser_backward")

    def _no_op_method(self, method: str) -> NoReturn:
        message = f"{type(self).__name__} has extra inputs or outputs: use {method}"
        raise StateError(message)


class ScaledActivation(ExtraTensorOperation):
    """An activation times one factor per row, its extra input ``(...,)``.

    Parameters
    ----------
    activation_recompute_in_mlp : bool, default = False
        For the grouped MLP, which te_fast does not have yet.
    """

    num_extra_inputs = 1
    _constant_names = Activation._constant_names
    _kind: ClassVar[str]

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        if activation_recompute_in_mlp:
            message = (
                f"{type(self).__name__}: activation_recompute_in_mlp needs the grouped MLP, which "
                "te_fast does not have yet; leave it at its default"
            )
            raise UnsupportedError(message)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def _append_to(self, program: Any, label: str) -> None:
        program.activation(label, self._kind, scaled=True, **self._constants())

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
        raise NotImplementedError

    def _check(self, x: torch.Tensor, scales: torch.Tensor) -> None:
        if scales.numel() * x.shape[-1] != x.numel():
            message = (
                f"{type(self).__name__}: the extra input must have one factor per row, "
                f"{list(x.shape[:-1])}, got {list(scales.shape)}"
            )
            raise ShapeError(message)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        **__: Any,
    ) -> tuple[torch.Tensor, list[tuple[()]]]:
        """Apply the activation in FP32, multiply, and round once; keep both inputs."""
        (scales,) = basic_op_extra_inputs[0]
        self._check(input_, scales)
        x = input_.to(compute_dtype(input_))
        ctx = basic_op_ctxs[0]
        if ctx.requires_grad:
            ctx.save_for_backward(x, scales)
        return self._scaled(x.float(), scales.float()).to(x.dtype), [()]

    def _scaled(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self._formula(x) * scales.reshape(*x.shape[:-1], 1)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, Grads, Grads]:
        """Differentiate the formula at the kept inputs."""
        x, scales = basic_op_ctxs[0].saved_tensors or ()
        assert x is not None
        assert scales is not None
        inputs = (x.float(), scales.float())
        _value, (dx, dscales) = differentiate(self._scaled, inputs, grad_output.float())
        return dx.to(x.dtype), [()], [(dscales.to(scales.dtype),)]


class ScaledSReLU(ScaledActivation):
    """``max(x, 0)²`` times one factor per row, the extra input."""

    _kind = "srelu"

    def _formula(self, x: torch.Tensor) -> torch.Tensor:
        return srelu(x)


class ScaledGatedActivation(ScaledActivation):
    """A gated activation times one factor per row.

    Parameters
    ----------
    glu_interleave_size : int, optional
        As in :class:`SwiGLU`.
    activation_recompute_in_mlp : bool, default = False
        For the grouped MLP, which te_fast does not have yet.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.glu_interleave_size = check_interleave(glu_interleave_size, type(self).__name__)

    def _constants(self) -> dict[str, Any]:
        return {"interleave": self.glu_interleave_size or 0}

    def _check(self, x: torch.Tensor, scales: torch.Tensor) -> None:
        check_halves(self, x, self.glu_interleave_size)
        super()._check(x, scales)

    def _formula(self, x: torch.Tensor) -> torch.Tensor:
        return self._of_halves(*halves(x, self.glu_interleave_size))

    def _of_halves(self, gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ScaledSwiGLU(ScaledGatedActivation):
    """``SiLU(a) · b`` times one factor per row, the extra input."""

    _kind = "swiglu"

    def _of_halves(self, gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * linear


class ScaledClampedQGeGLU(ScaledGatedActivation):
    """:class:`ClampedSwiGLU` times one factor per row, the extra input.

    Parameters
    ----------
    glu_interleave_size, activation_recompute_in_mlp
        As in :class:`ScaledSwiGLU`.
    limit, alpha, glu_linear_offset : float
        As in :class:`ClampedSwiGLU`.
    """

    _kind = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        check_positive(type(self).__name__, limit=limit)
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset

    def _constants(self) -> dict[str, Any]:
        return {**super()._constants(), **clamps(self)}

    def _of_halves(self, gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        return clamped_swiglu(gate, linear, self.limit, self.alpha, self.glu_linear_offset)


class ScaledSiTUGLU(ScaledGatedActivation):
    """:class:`SiTUGLU` times one factor per row, the extra input.

    Parameters
    ----------
    glu_interleave_size, activation_recompute_in_mlp
        As in :class:`ScaledSwiGLU`.
    beta1, beta2 : float, default = 4.0, 25.0
        As in :class:`SiTUGLU`.
    """

    _kind = "situ_glu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )
        check_positive(type(self).__name__, beta1=beta1, beta2=beta2)
        self.beta1 = beta1
        self.beta2 = beta2

    def _constants(self) -> dict[str, Any]:
        return {**super()._constants(), "beta1": self.beta1, "beta2": self.beta2}

    def _of_halves(self, gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        return situ_glu(gate, linear, self.beta1, self.beta2)
