"""The collectives of a layer, with its name in their errors."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.runtime.collectives import (
    Handle,
    gather_of,
    get_distributed_rank,
    get_distributed_world_size,
    named,
    reduce_scatter_of,
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

    __slots__ = ("_gathers", "_scatters", "_sums", "_waits", "group", "name", "rank", "size")

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.group = name, group
        self.size = get_distributed_world_size(group)
        self.rank = get_distributed_rank(group) if self.size > 1 else 0
        self._gathers = named(name, "an all-gather of tensor parallelism")
        self._scatters = named(name, "a reduce-scatter of tensor parallelism")
        self._sums = named(name, "an all-reduce of tensor parallelism")
        self._waits = named(name, "a collective of tensor parallelism")

    def gather(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Concatenate the rows of all ranks."""
        if self.size == 1:
            return x, None
        with self._gathers:
            return gather_of(self.size, x, self.group, async_op=later)

    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        """Start to concatenate the rows of all ranks in `out`."""
        if x.numel() == 0:
            return None
        with self._gathers:
            return torch.distributed.all_gather_into_tensor(
                out, x.contiguous(), group=self.group, async_op=True
            )

    def scatter(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Sum over all ranks, and keep this rank's rows."""
        if self.size == 1:
            return x, None
        with self._scatters:
            return reduce_scatter_of(self.size, x, self.group, async_op=later)

    def sum(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Sum over all ranks, in the memory of `x` if it is contiguous."""
        x = x.contiguous()
        if self.size == 1 or x.numel() == 0:
            return x, None
        with self._sums:
            return x, torch.distributed.all_reduce(x, group=self.group, async_op=later)

    def wait(self, handle: Handle) -> None:
        """Let later work on this stream see a collective's result."""
        if handle is not None:
            with self._waits:
                handle.wait()
