"""Collectives of tensor parallelism for tracers, each with the collective of its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from te_fast.runtime.collectives import check_rows

if TYPE_CHECKING:
    from te_fast.parallel.ranks import Exchange

_ops = torch.ops._c10d_functional


def _gathered(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    made = _ops.all_gather_into_tensor(x.contiguous(), size, group)
    whole: torch.Tensor = _ops.wait_tensor(made)
    return whole


def _scattered(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    made = _ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    share: torch.Tensor = _ops.wait_tensor(made)
    return share


def _summed(x: torch.Tensor, group: str) -> torch.Tensor:
    total: torch.Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))
    return total


class _Gather(torch.autograd.Function):
    """Arguments: tensor, size and name of the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.ranks = size, group
        return _gathered(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _scattered(grad, *ctx.ranks), None, None


class _Scatter(torch.autograd.Function):
    """Arguments: tensor, size and name of the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.ranks = size, group
        return _scattered(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gathered(grad, *ctx.ranks), None, None


class _Copy(torch.autograd.Function):
    """Arguments: tensor, name of the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """Arguments: tensor, name of the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


@dataclass(frozen=True, slots=True)
class Ranks:
    """A group of ranks as graphs know it.

    Attributes
    ----------
    name : str
        Name of the layer that shares the tensors, for messages.
    group : str
        torch's name of the group.
    size : int
        Ranks.
    """

    name: str
    group: str
    size: int

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the rows of all ranks; the gradient is summed and shared out."""
        y: torch.Tensor = _Gather.apply(x, self.size, self.group)
        return y

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, and keep this rank's rows; the gradient is gathered."""
        check_rows(x.shape[0] if x.dim() > 1 else 1, self.size, f"{self.name}: sequence_parallel")
        y: torch.Tensor = _Scatter.apply(x, self.size, self.group)
        return y

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which all ranks have; the gradient is summed."""
        y: torch.Tensor = _Copy.apply(x, self.group)
        return y

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; every rank's part has the gradient of the sum."""
        y: torch.Tensor = _Sum.apply(x, self.group)
        return y

    def before(self, exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
        """Run the collective before the linear ops of a layer."""
        if exchange.before is None:
            return x
        return self.gather(x) if exchange.before == "gather" else self.copy(x)

    def behind(self, exchange: Exchange, y: torch.Tensor) -> torch.Tensor:
        """Run the collective after the linear ops."""
        if exchange.behind is None:
            return y
        return self.scatter(y) if exchange.behind == "scatter" else self.sum(y)


def ranks_of(name: str, group: Any) -> Ranks:
    """Return a process group as graphs know it.

    Parameters
    ----------
    name : str
        Name of the layer that shares the tensors.
    group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.
    """
    # Traces take the shapes of results from what it registers.
    import_module("torch.distributed._functional_collectives")
    group = torch.distributed.group.WORLD if group is None else group
    return Ranks(name, group.group_name, torch.distributed.get_world_size(group=group))
