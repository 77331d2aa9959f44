"""Operations that compute nothing: identity, reshape, and communication among ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_fast.errors import ShapeError
from te_fast.ops.common import size_of_ranks, sizes_of
from te_fast.ops.op import ALONE, BasicOperation, Beside, OperationContext
from te_fast.parallel.agreement import Agreement
from te_fast.parallel.collectives import Ranks
from te_fast.runtime.collectives import check_rows


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
    """Communication along the first dimension; with one rank there is none.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.
    """

    def __init__(self, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        super().__init__()
        name = type(self).__name__
        self.process_group = process_group
        self.process_group_size = size_of_ranks(process_group, name, "process_group")
        self._ranks = Ranks(name, process_group)
        self._agreement = Agreement(name, process_group, name)

    def _check(self, ctx: OperationContext, x: torch.Tensor) -> None:
        """Raise unless the tensors of all ranks have the same shape and type, and rows to gather or to share out."""
        if self.process_group_size > 1 and self._collective != "sum" and x.dim() == 0:
            message = f"{self._ranks.name}: the input must have a first dimension, got a scalar"
            raise ShapeError(message)
        if self._collective == "scatter":
            check_rows(x.shape[0], self.process_group_size, self._ranks.name)
        self._agreement.check(x, wanted=ctx.requires_grad, needs_input=ctx.requires_grad)

    def _is_native(self, beside: Beside = ALONE) -> bool:
        return self.process_group_size == 1 and super()._is_native(beside)


class AllGather(_Communication):
    """Gather the rows of all ranks; gradients are summed and shared out.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.

    See Also
    --------
    ReduceScatter : the other way.

    Examples
    --------
    With one rank it is the identity:

    >>> import torch
    >>> import te_fast.pytorch as te
    >>> tuple(te.ops.AllGather()(torch.ones(4, 8)).shape)
    (4, 8)
    """

    _collective = "gather"

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Gather."""
        self._check(ctx, input_)
        return self._ranks.gather(input_)[0]

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Sum over ranks, and keep this rank's rows."""
        return self._ranks.scatter(grad_output)[0], ()


class ReduceScatter(_Communication):
    """Sum over ranks, and keep this rank's rows; gradients are gathered.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.

    See Also
    --------
    AllGather : the other way.

    Examples
    --------
    With one rank it is the identity:

    >>> import torch
    >>> import te_fast.pytorch as te
    >>> tuple(te.ops.ReduceScatter()(torch.ones(4, 8)).shape)
    (4, 8)
    """

    _collective = "scatter"

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Sum over ranks, and keep this rank's rows."""
        self._check(ctx, input_)
        return self._ranks.scatter(input_)[0]

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Gather."""
        return self._ranks.gather(grad_output)[0], ()


class AllReduce(_Communication):
    """Sum over ranks; every rank's input has the gradient of the sum.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.
    reduce_in_backward : bool, default = True
        Has no effect, as in Transformer Engine: all ranks have the gradient of the sum.

    See Also
    --------
    ReduceScatter : each rank keeps its rows of the sum.

    Examples
    --------
    With one rank it is the identity:

    >>> import torch
    >>> import te_fast.pytorch as te
    >>> tuple(te.ops.AllReduce()(torch.ones(4, 8)).shape)
    (4, 8)
    """

    _collective = "sum"

    def __init__(
        self,
        process_group: torch.distributed.ProcessGroup | None = None,
        reduce_in_backward: bool = True,
    ) -> None:
        super().__init__(process_group)
        self._reduce_in_backward = reduce_in_backward

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Sum over ranks, in new memory, since the input may have other readers."""
        if self.process_group_size == 1:
            return input_
        self._check(ctx, input_)
        return self._ranks.sum(input_.clone(memory_format=torch.contiguous_format))[0]


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
        self._shape = sizes_of(shape, "Reshape", "shape")

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Reshape; save the input's shape."""
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
