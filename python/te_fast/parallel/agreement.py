"""Checks that the ranks of a group call a layer in the same way, once for each kind of call.

With ``TE_FAST_DEBUG=1`` the ranks compare every call.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from te_fast import _config
from te_fast.errors import RanksError
from te_fast.parallel.overlap import setting
from te_fast.runtime import native
from te_fast.runtime.collectives import get_distributed_rank, get_distributed_world_size

#: Names of the numbers that ranks exchange, which describe the kind of a call.
_DIMENSIONS = 4
_LIMIT = 256


class Agreement:
    """The kinds of calls of a layer that the ranks of a group have compared.

    A kind that is new on one rank is new on all ranks, so that all compare it in one small collective. A rank cannot
    see that another makes a call of another kind that both know; only ``TE_FAST_DEBUG=1`` finds that.

    Parameters
    ----------
    name : str
        Name of the layer, for messages.
    group : torch.distributed.ProcessGroup
        The ranks.
    layer : str
        Text of the layer's properties that must be equal on all ranks.
    argument : str
        The argument by which users give the group.
    """

    __slots__ = ("_argument", "_group", "_is_alone", "_known", "_layer", "_name")

    def __init__(self, name: str, group: Any, layer: str, argument: str = "tp_group") -> None:
        self._name, self._group, self._layer = name, group, layer
        self._argument = argument
        self._is_alone = get_distributed_world_size(group) == 1
        self._known: set[Any] = set()

    def check(
        self,
        x: torch.Tensor,
        *,
        wanted: bool,
        needs_input: bool,
        needs: Sequence[bool] = (),
        splits: Sequence[int] | None = None,
        settings: str = "",
    ) -> None:
        """Compare a call with the calls of the other ranks, if it is of a new kind, or in debug mode.

        Parameters
        ----------
        x : torch.Tensor
            Input of the layer.
        wanted, needs_input : bool
            Whether any tensor needs a gradient, and whether the input does.
        needs : list of bool
            Which parameters need one, if any tensor does: backward's collectives depend on that.
        splits : list of int, optional
            Rows of each expert.
        settings : str
            Text of what the call itself decides.

        Raises
        ------
        RanksError
            If another rank makes another call; all ranks raise.
        """
        if self._is_alone:
            return
        enabled, _, _, _, _, epoch = native.autocast_region()
        chunks = setting()
        wants = (wanted, needs_input, *needs)
        kind = (x.shape, x.dtype, x.device, wants, epoch if enabled else None, chunks, settings)
        is_known = kind in self._known and not _config.DEBUG
        if is_known or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        recipe = native.autocast_objects()[0] if enabled else None
        shown = "none" if recipe is None else str(sorted(recipe._describe().items()))
        self._compare(x, shown, splits, wants, settings)
        if len(self._known) >= _LIMIT:
            self._known.clear()
        self._known.add(kind)

    def _compare(
        self,
        x: torch.Tensor,
        recipe: str,
        splits: Sequence[int] | None,
        wants: tuple[bool, ...],
        settings: str,
    ) -> None:
        own = {
            "name of the layer that is called": [zlib.crc32(self._name.encode())],
            "input's shape": [x.dim(), *x.shape[-_DIMENSIONS:]],
            "input's type": [zlib.crc32(str(x.dtype).encode())],
            "recipe": [zlib.crc32(recipe.encode())],
            "sizes and settings of the layer": [zlib.crc32(self._layer.encode())],
            "mask, keys, values or another setting of the call": [zlib.crc32(settings.encode())],
            "set of what wants gradients": [zlib.crc32(bytes(wants))],
            "number of each expert's rows": [zlib.crc32(repr(splits).encode())],
            "communication_chunks, or CUDA_DEVICE_MAX_CONNECTIONS,": list(map(int, setting())),
        }
        own["input's shape"] += [0] * (_DIMENSIONS + 1 - len(own["input's shape"]))
        flat = [number for numbers in own.values() for number in numbers]
        mine = torch.tensor(flat, dtype=torch.int64, device=x.device)
        size = get_distributed_world_size(self._group)
        everyones = mine.new_empty(size * len(flat))
        try:
            torch.distributed.all_gather_into_tensor(everyones, mine, group=self._group)
            table = everyones.view(size, -1).tolist()
        except RuntimeError as error:
            message = (
                f"{self._name}: the ranks of {self._argument} could not compare their calls; one has stopped, is late, "
                f"or does something else: {error}"
            )
            raise RanksError(message) from error
        if all(row == flat for row in table):
            return
        first = 0
        for what, numbers in own.items():
            theirs = [row[first : first + len(numbers)] for row in table]
            first += len(numbers)
            if all(row == numbers for row in theirs):
                continue
            shown = (
                "; ".join(
                    f"rank {rank} has {row[1 : row[0] + 1]}" for rank, row in enumerate(theirs)
                )
                if what == "input's shape"
                else f"ranks {[rank for rank, row in enumerate(theirs) if row != numbers]} have another than rank "
                f"{get_distributed_rank(self._group)}"
            )
            message = f"{self._name}: the {what} must be the same on all ranks of {self._argument}; {shown}"
            raise RanksError(message)


def compare_experts_in_debug(
    layer: Any, x: torch.Tensor, splits: Sequence[int] | torch.Tensor
) -> None:
    """With ``TE_FAST_DEBUG=1``, compare a call of a layer of experts among the ranks that divide the experts' features.

    Without it nothing is compared: such a layer has no collective, and its counts differ from step to step. Nor is
    anything under capture, where counts cannot be read.

    Parameters
    ----------
    layer : te_fast.pytorch.GroupedLinear
        The layer.
    x : torch.Tensor
        Its input.
    splits : list of int or torch.Tensor
        Rows of each expert. Those of a GPU are read, which synchronises.

    Raises
    ------
    RanksError
        If another rank makes another call; all ranks raise.
    """
    if not _config.DEBUG or layer.tp_size == 1 or layer.tp_group is None:
        return
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    counts = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    settings = layer.parallel_mode, layer.num_gemms, layer.in_features, layer.out_features
    needed = [x.requires_grad, *(parameter.requires_grad for parameter in layer.parameters())]
    wanted = torch.is_grad_enabled() and any(needed)
    Agreement(layer.name, layer.tp_group, str(settings)).check(
        x,
        wanted=wanted,
        needs_input=wanted and needed[0],
        needs=needed[1:] if wanted else (),
        splits=counts,
    )
