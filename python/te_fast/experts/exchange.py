"""Experts that ranks share: rows travel to the rank that has their expert, and results travel back."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_fast.errors import RanksError, UnsupportedError
from te_fast.graphs.refusal import refusal
from te_fast.moe.permutation import (
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
)
from te_fast.parallel.ranks import divided
from te_fast.runtime import native
from te_fast.runtime.collectives import (
    check_is_group,
    get_distributed_rank,
    get_distributed_world_size,
    named,
)
from te_fast.runtime.second_order import differentiable_once

#: Kinds of calls that are remembered.
_LIMIT = 256
#: Applies the experts of this rank to rows, their counts and their factors.
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Splits:
    """Numbers of rows that go to each rank and come from it."""

    name: str
    group: Any
    sent: list[int]
    received: list[int]

    def reverse(self) -> _Splits:
        return _Splits(self.name, self.group, self.received, self.sent)

    def exchange(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send each rank its rows of all tensors; return the received rows."""
        made: list[torch.Tensor] = []
        handles: list[Any] = []
        with named(self.name, "an all-to-all of expert parallelism"):
            for tensor in tensors:
                out = tensor.new_empty((sum(self.received), *tensor.shape[1:]))
                handles.append(
                    torch.distributed.all_to_all_single(
                        out,
                        tensor.contiguous(),
                        self.received,
                        self.sent,
                        group=self.group,
                        async_op=True,
                    )
                )
                made.append(out)
            for handle in handles:
                handle.wait()
        return tuple(made)


class _Exchange(torch.autograd.Function):
    """Arguments: splits, tensors. One node, so that all ranks run the collectives of a backward in one order."""

    @staticmethod
    def forward(ctx: Any, splits: _Splits, *tensors: torch.Tensor) -> Any:
        ctx.splits = splits
        return splits.exchange(*tensors)

    @staticmethod
    @differentiable_once(lambda ctx: ctx.splits.name)
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, *ctx.splits.reverse().exchange(*grads))


def expert_ranks(name: str, group: Any, num_experts: int) -> ExpertRanks | None:
    """Return the ranks of a group, which have equal numbers of experts; None if one rank has all.

    Raises
    ------
    DtypeError
        If it is no process group.
    RanksError
        If this rank is not in the group.
    ShapeError
        If ranks cannot have the same number of experts.
    """
    if group is None:
        return None
    check_is_group(name, "ep_group", group)
    size = get_distributed_world_size(group)
    if size < 1:
        message = f"{name}: this rank is not in ep_group; give the group that has it"
        raise RanksError(message)
    return ExpertRanks(name, group, num_experts) if size > 1 else None


class ExpertRanks:
    """Two or more ranks, each of which has the same number of experts, in the order of the ranks.

    Parameters
    ----------
    name : str
        Name of the layer, for messages.
    group : torch.distributed.ProcessGroup
        The ranks.
    num_experts : int
        Experts of all ranks.
    """

    def __init__(self, name: str, group: Any, num_experts: int) -> None:
        self.name, self.group = name, group
        self.size, self.rank = get_distributed_world_size(group), get_distributed_rank(group)
        self.num_experts = num_experts
        self.num_local = divided(
            name, "num_experts", num_experts, self.size, "the ranks of ep_group"
        )
        self._kinds: dict[Any, int] = {}
        #: The ranks have called with the same number of experts.
        self._has_met = False

    def apply(
        self, experts: Experts, rows: torch.Tensor, splits: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        """Return the results of all experts for this rank's rows.

        The host reads the number of rows to receive, which the all-to-all needs, and so waits for the router.

        Parameters
        ----------
        experts : Callable
            This rank's.
        rows : torch.Tensor
            ``(rows, columns)``, sorted by expert.
        splits : torch.Tensor
            Rows of each expert, ``(num_experts,)``.
        factors : torch.Tensor
            One for each row, ``(rows,)``.

        Raises
        ------
        RanksError
            If ranks call the layer differently, or a rank is gone; all ranks raise.
        UnsupportedError
            Under a compiler or a capture.
        """
        if torch.compiler.is_compiling():
            message = (
                f"{self.name}: experts that ranks share (ep_group) cannot be traced, since the host reads how many "
                "rows come; call the block outside of torch.compile, by torch.compiler.disable"
            )
            raise refusal(message)
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():
            message = (
                f"{self.name}: a CUDA graph cannot capture experts that ranks share (ep_group): the host reads how "
                "many rows come"
            )
            raise UnsupportedError(message)
        needs_rows = torch.is_grad_enabled() and (rows.requires_grad or factors.requires_grad)
        kind = self._kind(rows, needs_rows=needs_rows)
        if not self._has_met:
            self._meet(kind, rows.device)
        table, sent, received = self._counts(splits, kind)
        mine = table[:, self.rank * self.num_local : (self.rank + 1) * self.num_local]
        travel = _Splits(self.name, self.group, sent, received)
        came, came_factors = _Exchange.apply(travel, rows, factors)
        # Rows arrive by rank, then by expert; sorting brings the chunks of one expert together.
        order = torch.arange(mine.numel(), device=rows.device).view(self.size, -1)
        by_expert = order.t().reshape(-1)
        by_rank = order.view(self.num_local, self.size).t().reshape(-1)
        sorted_rows, sorted_factors = moe_sort_chunks_by_index_with_probs(
            came, came_factors, mine.reshape(-1), by_expert
        )
        results = experts(sorted_rows, mine.sum(0), sorted_factors)
        unsorted = moe_sort_chunks_by_index(results, mine.t().reshape(-1), by_rank)
        (back,) = _Exchange.apply(travel.reverse(), unsorted)
        found: torch.Tensor = back
        return found

    def sum(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' counts."""
        total = counts.clone()
        with named(self.name, "an all-reduce of expert parallelism"):
            torch.distributed.all_reduce(total, group=self.group)
        return total

    def _meet(self, kind: int, device: torch.device) -> None:
        """Compare the first call on all ranks, before counts travel: their number is that of the experts."""
        everyones = self._of_all_ranks(torch.tensor([kind], dtype=torch.int64, device=device))
        self._check_kinds(everyones[:, 0].tolist())
        self._has_met = True

    def _counts(self, splits: torch.Tensor, kind: int) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return the numbers of rows that each rank has for each expert, and that this rank sends and receives.

        A number of the call's kind travels beside the counts, so that ranks that disagree notice before rows travel.
        """
        number = torch.full((1,), kind, dtype=torch.int64, device=splits.device)
        everyones = self._of_all_ranks(torch.cat((splits.to(torch.int64), number)))
        table = everyones[:, :-1]
        by_rank = table.view(self.size, self.size, self.num_local).sum(2)
        read = torch.stack((everyones[:, -1], by_rank[self.rank], by_rank[:, self.rank]))
        kinds, sent, received = read.tolist()
        self._check_kinds(kinds)
        return table, sent, received

    def _of_all_ranks(self, given: torch.Tensor) -> torch.Tensor:
        everyones = given.new_empty(self.size * given.numel())
        with named(self.name, "the exchange of counts of expert parallelism"):
            torch.distributed.all_gather_into_tensor(everyones, given, group=self.group)
        return everyones.view(self.size, -1)

    def _check_kinds(self, kinds: list[int]) -> None:
        others = [rank for rank, one in enumerate(kinds) if one != kinds[self.rank]]
        if others:
            message = (
                f"{self.name}: the input's columns and type, the number of experts, the recipe and whether anything "
                f"wants gradients must be the same on all ranks of ep_group; ranks {others} have others than rank "
                f"{self.rank}"
            )
            raise RanksError(message)

    def _kind(self, rows: torch.Tensor, *, needs_rows: bool) -> int:
        """Return a number of the call's kind, which must be equal on all ranks."""
        enabled, *_, epoch = native.autocast_region()
        grad = torch.is_grad_enabled(), needs_rows
        key = rows.shape[1], rows.dtype, grad, epoch if enabled else None
        kind = self._kinds.get(key)
        if kind is None:
            recipe = native.autocast_objects()[0] if enabled else None
            shown = None if recipe is None else sorted(recipe._describe().items())
            kind = zlib.crc32(f"{key[:3]} {self.num_experts} {shown}".encode())
            if len(self._kinds) >= _LIMIT:
                self._kinds.clear()
            self._kinds[key] = kind
        return kind
