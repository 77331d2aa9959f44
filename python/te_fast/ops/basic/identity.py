"""Operations that change no values: identity, reshape, and communication in a group of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_fast.errors import ShapeError
from te_fast.ops.common import refuse_ranks
from te_fast.ops.op import BasicOperation, OperationContext


class Identity(BasicOperation):
    """Return the input.

    See Also
    --------
    Reshape : Another shape of the same.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.Identity()(torch.ones(1, 2))
    tensor([[1., 1.]])
    """

    def _append_to(self, program: Any, label: str) -> None:
        program.identity(label)

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the input."""
        return input_

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Return the gradient."""
        return grad_output, ()


class _Communication(Identity):
    """Communication among one rank, which is none.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        Ranks; groups of one rank only so far.
    """

    def __init__(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        super().__init__()
        refuse_ranks(process_group, type(self).__name__, "process_group")
        self.process_group = process_group


class AllGather(_Communication):
    """Gather along the first dimension.

    See Also
    --------
    ReduceScatter : Another collective.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.AllGather()(torch.ones(1, 2))  # one rank
    tensor([[1., 1.]])
    """


class ReduceScatter(_Communication):
    """Sum over ranks, and split along the first dimension.

    See Also
    --------
    AllGather : Another collective.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.ReduceScatter()(torch.ones(1, 2))  # one rank
    tensor([[1., 1.]])
    """


class AllReduce(_Communication):
    """Sum over ranks.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        Ranks; groups of one rank only so far.
    reduce_in_backward : bool, default = True
        Sum the gradients, too.

    See Also
    --------
    ReduceScatter : Another collective.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.AllReduce()(torch.ones(1, 2))  # one rank
    tensor([[1., 1.]])
    """

    def __init__(
        self,
        process_group: torch.distributed.ProcessGroup | None = None,
        reduce_in_backward: bool = True,
    ) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = reduce_in_backward


class Reshape(BasicOperation):
    """Give the tensor another shape.

    Parameters
    ----------
    shape : iterable of int
        The shape; one size may be -1.

    See Also
    --------
    Identity : The same shape.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.Reshape((4, 2))(torch.ones(2, 4)).shape
    torch.Size([4, 2])
    """

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Reshape; the input's shape is kept."""
        ctx.shape = input_.shape  # type: ignore[attr-defined]
        try:
            return input_.reshape(self._shape)
        except RuntimeError:
            message = (
                f"Reshape: cannot give a tensor of shape {list(input_.shape)} shape {self._shape}"
            )
            raise ShapeError(message) from None

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Reshape back."""
        return grad_output.reshape(ctx.shape), ()  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        """Shape."""
        return f"shape={self._shape}"
