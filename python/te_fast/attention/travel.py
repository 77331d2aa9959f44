"""How keys and values of context parallelism reach other ranks, and their gradients the way back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_fast.runtime.collectives import (
    gather_of,
    get_distributed_rank,
    get_distributed_world_size,
    named,
    reduce_scatter_of,
)


class KeysAndValues(NamedTuple):
    """Keys and values of one rank in one memory.

    Attributes
    ----------
    memory : torch.Tensor
        ``(elements,)``, or ``(ranks, elements)``.
    of_k, of_v : torch.Size
        Shapes of one rank's keys and values.
    """

    memory: torch.Tensor
    of_k: torch.Size
    of_v: torch.Size

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> KeysAndValues:
        """Copy keys and values."""
        return cls(torch.cat([k.reshape(-1), v.reshape(-1)]), k.shape, v.shape)

    def like(self, memory: torch.Tensor) -> KeysAndValues:
        """Return other values of the same shapes."""
        return KeysAndValues(memory, self.of_k, self.of_v)

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of keys and values; memory of several ranks gives them one more dimension in front."""
        leading = self.memory.shape[:-1]
        k, v = self.memory.split([self.of_k.numel(), self.of_v.numel()], -1)
        return k.view(*leading, *self.of_k), v.view(*leading, *self.of_v)


class Travel:
    """Memory on its way to the next rank; another's comes from the rank before."""

    def __init__(self, group: Any, name: str, memory: torch.Tensor) -> None:
        self._name, self._sent, self._received = name, memory, torch.empty_like(memory)
        known = torch.distributed
        rank, ranks = get_distributed_rank(group), get_distributed_world_size(group)
        behind, before = (known.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        ops = [
            known.P2POp(known.isend, memory, behind, group),
            known.P2POp(known.irecv, self._received, before, group),
        ]
        with named(name, "the travel of keys and values"):
            self._works = known.batch_isend_irecv(ops)

    def wait(self) -> torch.Tensor:
        """Return what has arrived."""
        with named(self._name, "the travel of keys and values"):
            for work in self._works:
                work.wait()
        return self._received


def gathered(group: Any, name: str, own: KeysAndValues) -> KeysAndValues:
    """Return the keys and values of all ranks."""
    ranks = get_distributed_world_size(group)
    with named(name, "the gather of keys and values"):
        memory, _ = gather_of(ranks, own.memory, group, async_op=False)
    return own.like(memory.view(ranks, -1))


def scattered(group: Any, name: str, grads: KeysAndValues) -> KeysAndValues:
    """Return the sum over ranks of the gradients of this rank's keys and values."""
    with named(name, "the reduction of the gradients of keys and values"):
        flat = grads.memory.flatten()
        mine, _ = reduce_scatter_of(len(grads.memory), flat, group, async_op=False)
    return grads.like(mine)
