"""The collectives of a layer, with its name in their errors."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.runtime.collectives import (
    Handle,
    allreduce,
    gather_along_first_dim,
    get_distributed_rank,
    get_distributed_world_size,
    named,
    reduce_scatter_along_first_dim,
)


class Ranks:
    """The collectives of a layer along the first dimension, with its name in their errors.

    Parameters
    ----------
    name : str
        Name of the layer.
    group : torch.distributed.ProcessGroup
        The ranks.
    """

    __slots__ = ("group", "name", "rank", "size")

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.group = name, group
        self.size = get_distributed_world_size(group)
        self.rank = get_distributed_rank(group) if self.size > 1 else 0

    def gather(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Concatenate the rows of all ranks."""
        with named(self.name, "an all-gather of tensor parallelism"):
            return gather_along_first_dim(x, self.group, async_op=later)

    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        """Start to concatenate the rows of all ranks in `out`."""
        if x.numel() == 0:
            return None
        with named(self.name, "an all-gather of tensor parallelism"):
            return torch.distributed.all_gather_into_tensor(
                out, x.contiguous(), group=self.group, async_op=True
            )

    def scatter(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Sum over all ranks, and keep this rank's rows."""
        with named(self.name, "a reduce-scatter of tensor parallelism"):
            return reduce_scatter_along_first_dim(x, self.group, async_op=later)

    def sum(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Sum over all ranks."""
        with named(self.name, "an all-reduce of tensor parallelism"):
            return allreduce(x.contiguous(), self.group, async_op=later)

    def wait(self, handle: Handle) -> None:
        """Let later work on this stream see a collective's result."""
        if handle is not None:
            with named(self.name, "a collective of tensor parallelism"):
                handle.wait()
