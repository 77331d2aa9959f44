"""Activations whose rows are multiplied by an extra input, such as the probabilities of experts."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.ops.basic.activation import Activation
from te_fast.ops.basic.glu import Capped, Clamped, check_interleave
from te_fast.ops.basic.native import ExtraTensorOperation
from te_fast.ops.op import OperationContext, PerOp


class ScaledActivation(ExtraTensorOperation, Activation):
    """An activation times one factor per row, its extra input ``(...,)``.

    Parameters
    ----------
    activation_recompute_in_mlp : bool, default = False
        The linear operation behind the activation keeps no copy of the activation's result for its weight gradient:
        backward computes the activation again. Not with delayed scaling.
    """

    num_extra_inputs = 1

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def _append_to(self, program: Any, label: str) -> None:
        recompute: dict[str, Any] = {"recompute": True} if self.activation_recompute_in_mlp else {}
        program.activation(label, self._kind, scaled=True, **recompute, **self._constants())

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        **__: Any,
    ) -> tuple[torch.Tensor, list[tuple[()]]]:
        """Run the native program."""
        return self._forward(basic_op_ctxs[0], input_, *basic_op_extra_inputs[0]), [()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, PerOp, PerOp]:
        """Run the native program again, and its backward."""
        dx, _grads, extra_grads = self._backward(basic_op_ctxs[0], grad_output)
        return dx, [()], [extra_grads]


class ScaledSReLU(ScaledActivation):
    """``max(x, 0)²`` times one factor per row, the extra input.

    See Also
    --------
    SReLU : Without the factor.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ScaledSReLU()(torch.tensor([[-1.0, 3.0]]), torch.tensor([2.0]))
    tensor([[ 0., 18.]])
    """

    _kind = "srelu"


class ScaledGatedActivation(ScaledActivation):
    """A gated activation times one factor per row.

    Parameters
    ----------
    glu_interleave_size : int, optional
        As in :class:`SwiGLU`.
    activation_recompute_in_mlp : bool, default = False
        As in :class:`ScaledSReLU`.
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
        return {**super()._constants(), "interleave": self.glu_interleave_size or 0}


class ScaledSwiGLU(ScaledGatedActivation):
    """``SiLU(a) · b`` times one factor per row, the extra input.

    See Also
    --------
    SwiGLU : Without the factor.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ScaledSwiGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]), torch.tensor([2.0]))
    tensor([[-1.6136,  1.7616]])
    """

    _kind = "swiglu"


class ScaledClampedQGeGLU(Clamped, ScaledGatedActivation):
    """:class:`ClampedSwiGLU` times one factor per row, the extra input.

    Parameters
    ----------
    glu_interleave_size, activation_recompute_in_mlp
        As in :class:`ScaledSwiGLU`.
    limit, alpha, glu_linear_offset : float
        As in :class:`ClampedSwiGLU`.

    See Also
    --------
    ClampedSwiGLU : Without the factor.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ScaledClampedQGeGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]), torch.tensor([2.0]))
    tensor([[-1.2336,  5.8070]])
    """

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
        self._set_clamps(limit, alpha, glu_linear_offset)


class ScaledSiTUGLU(Capped, ScaledGatedActivation):
    """:class:`SiTUGLU` times one factor per row, the extra input.

    Parameters
    ----------
    glu_interleave_size, activation_recompute_in_mlp
        As in :class:`ScaledSwiGLU`.
    beta1, beta2 : float, default = 4.0, 25.0
        As in :class:`SiTUGLU`.

    See Also
    --------
    SiTUGLU : Without the factor.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ScaledSiTUGLU()(torch.tensor([[-1.0, 2.0, 3.0, 0.5]]), torch.tensor([2.0]))
    tensor([[-1.5733,  1.6279]])
    """

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
        self._set_caps(beta1, beta2)
