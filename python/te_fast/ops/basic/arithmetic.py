"""A constant factor, and the operations that add or return a tensor in the middle of a chain."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import ShapeError
from te_fast.ops.basic.native import ExtraTensorOperation
from te_fast.ops.op import BasicOperation, OperationContext, PerOp
from te_fast.runtime.arguments import check_numbers


class ConstantScale(BasicOperation):
    """Multiply by a constant.

    Parameters
    ----------
    scale : float
        The factor.

    See Also
    --------
    Bias : Adds a row.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ConstantScale(0.5)(torch.ones(1, 2))
    tensor([[0.5000, 0.5000]])
    """

    _constant_names = frozenset({"scale"})

    def __init__(self, scale: float) -> None:
        super().__init__()
        check_numbers(type(self).__name__, scale=scale)
        self.scale = scale

    def _append_to(self, program: Any, label: str) -> None:
        program.constant_scale(label, self.scale)

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Multiply; save nothing for backward."""
        return input_ * self.scale

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Multiply."""
        return grad_output * self.scale, ()

    def extra_repr(self) -> str:
        """Factor."""
        return f"scale={self.scale}"


class AddExtraInput(ExtraTensorOperation):
    """Add an extra input, which has the shape of the input.

    Parameters
    ----------
    in_place : bool, default = False
        Allow fusions to add into the extra input's memory, which the caller must no longer need. A tensor that comes
        through a channel is never overwritten, since earlier operations may have kept it.

    See Also
    --------
    MakeExtraOutput : Leaves the tensor that comes back here.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.AddExtraInput()(torch.ones(1, 2), torch.full((1, 2), 3.0))
    tensor([[4., 4.]])
    """

    num_extra_inputs = 1
    _adds_extra = True

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    def _result_type(
        self,
        dtype: torch.dtype,
        extras: tuple[torch.dtype, ...],
        autocast: torch.dtype | None,
    ) -> torch.dtype:
        return extras[0] if self._in_place else torch.promote_types(dtype, extras[0])

    def _append_to(self, program: Any, label: str) -> None:
        program.add_extra_input(label, self._in_place and not self._extra_input_channels)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        **_: Any,
    ) -> tuple[torch.Tensor, list[tuple[()]]]:
        """Add; save nothing for backward."""
        (extra,) = basic_op_extra_inputs[0]
        if extra.shape != input_.shape:
            message = (
                f"AddExtraInput: the extra input must have the shape {list(input_.shape)} of the "
                f"input, got {list(extra.shape)}"
            )
            raise ShapeError(message)
        if self._in_place:
            into = extra.clone() if self._extra_input_channels else extra.detach()
            return into.add_(input_), [()]
        return input_ + extra, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, PerOp, PerOp]:
        """Return the gradient for both inputs."""
        return grad_output, [()], [(grad_output,)]

    def extra_repr(self) -> str:
        """Whether in place."""
        return f"in_place={self._in_place}"


class MakeExtraOutput(ExtraTensorOperation):
    """Return the tensor in the middle of a chain as an extra output, too.

    Parameters
    ----------
    in_place : bool, default = False
        Allow fusions to add the gradients into the memory of the extra output's gradient, which must have no other
        user. A gradient that comes through a channel is never overwritten, since several channels may bring one tensor.

    See Also
    --------
    AddExtraInput : Adds it elsewhere.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> chain = ops.Sequential(ops.MakeExtraOutput(), ops.ReLU())
    >>> chain(torch.tensor([[-1.0, 2.0]]))
    (tensor([[0., 2.]]), tensor([[-1.,  2.]]))
    """

    num_extra_outputs = 1
    _hands_input_out = True

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place

    def _append_to(self, program: Any, label: str) -> None:
        program.make_extra_output(label, self._in_place and not self._extra_output_channels)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor]]]:
        """Return the input twice."""
        return input_, [(input_,)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
        **_: Any,
    ) -> tuple[torch.Tensor, PerOp, PerOp]:
        """Add the gradients."""
        (extra,) = basic_op_grad_extra_outputs[0]
        if extra is None:
            return grad_output, [()], [()]
        in_place = self._in_place and not self._extra_output_channels
        if in_place and extra.is_contiguous() and extra.dtype == grad_output.dtype:
            return extra.add_(grad_output), [()], [()]
        return grad_output + extra, [()], [()]

    def extra_repr(self) -> str:
        """Whether in place."""
        return f"in_place={self._in_place}"
