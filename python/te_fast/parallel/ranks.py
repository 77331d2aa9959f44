"""Layers that the ranks of a tensor-parallel group share: the group, the sizes, and the collectives."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from te_fast.errors import ArgumentError, RanksError, ShapeError
from te_fast.runtime.collectives import check_is_group, get_distributed_world_size

#: Collective before the first linear op: the input is gathered, or is the same on all ranks.
Before = Literal["gather", "copy"]
#: Collective after the last linear op: the results of all ranks are summed, and scattered or left on all ranks.
Behind = Literal["scatter", "sum"]
#: Attributes of parameters that Megatron-LM and distributed checkpoints read.
_MARKS = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "sequence_parallel",
    "allreduce",
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The collectives around the linear ops of a layer.

    Attributes
    ----------
    before : {'gather', 'copy'} or None
        ``gather``: the input is all-gathered, its gradient reduce-scattered. ``copy``: its gradient is all-reduced.
    behind : {'scatter', 'sum'} or None
        ``scatter``: the result is reduce-scattered, its gradient all-gathered. ``sum``: the result is all-reduced.
    """

    before: Before | None
    behind: Behind | None

    def __bool__(self) -> bool:
        """Whether there is any collective."""
        return self.before is not None or self.behind is not None


#: No collective.
NO_EXCHANGE = Exchange(None, None)


def exchange_of(mode: str | None, size: int, *, sequence_parallel: bool) -> Exchange:
    """Return the collectives of a layer that is split along a dimension.

    Parameters
    ----------
    mode : {'column', 'row', 'both'} or None
        ``column``: along the output, ``row``: along the input, ``both``: its first linear op by column, the last by
        row.
    size : int
        Ranks.
    sequence_parallel : bool
        Whether tensors that are not split in this way are split along the rows.
    """
    if size == 1 or mode is None:
        return NO_EXCHANGE
    return Exchange(
        before=None if mode == "row" else "gather" if sequence_parallel else "copy",
        behind=None if mode == "column" else "scatter" if sequence_parallel else "sum",
    )


class _SharingState(dict[str, Any]):
    """The state of a module, whose deep copy has the same groups and marks; pickled, it is a plain dictionary."""

    def __init__(self, state: dict[str, Any], groups: list[Any]) -> None:
        super().__init__(state)
        self._groups = groups

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        for group in self._groups:
            memo[id(group)] = group
        copied = copy.deepcopy(dict(self), memo)
        self._copy_marks(memo)
        return copied

    def _copy_marks(self, memo: dict[int, Any]) -> None:
        """Mark the copies of parameters, which torch makes without attributes."""
        modules = [module for module in self.get("_modules", {}).values() if module is not None]
        parameters = list(self.get("_parameters", {}).values())
        for parameter in chain(parameters, *(module.parameters() for module in modules)):
            for name in _MARKS:
                if id(parameter) in memo and hasattr(parameter, name):
                    setattr(memo[id(parameter)], name, getattr(parameter, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def reduced_sharing(reduced: Any, groups: Iterable[Any]) -> Any:
    """Let a deep copy of a module have the same process groups, which cannot be copied, and marked parameters.

    A method ``__deepcopy__`` would do so more simply. But ``torch.compile`` of a module returns a wrapper that passes
    on attributes it lacks: a copy of the wrapper would call that method, and be a copy of the module alone.

    Parameters
    ----------
    reduced : tuple
        What the base class of the module returns from ``__reduce_ex__``.
    groups : iterable of torch.distributed.ProcessGroup or None
        The groups.

    Returns
    -------
    tuple
        What ``__reduce_ex__`` of the module has to return.
    """
    shared = [group for group in groups if group is not None]
    make, arguments, state, *rest = reduced
    return make, arguments, _SharingState(state, shared), *rest


def divided(layer: str, name: str, total: int, size: int, ranks: str = "tp_size") -> int:
    """Return a rank's share of a size; `ranks` is the users' name of the number of ranks.

    Raises
    ------
    ShapeError
        If ranks cannot have equal shares.
    """
    if total % size != 0:
        message = f"{layer}: {name} must be a multiple of {ranks} = {size}, got {total}"
        raise ShapeError(message)
    return total // size


def size_of_group(layer: str, group: Any, given: int) -> int:
    """Return the number of ranks that share a layer with ``tp_group`` and ``tp_size``.

    Raises
    ------
    ArgumentError
        If the size is not a positive integer, or not the group's.
    DtypeError
        If the group is no process group.
    RanksError
        If this rank is not in the group.
    """
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        message = f"{layer}: tp_size must be a positive integer, got {given!r}"
        raise ArgumentError(message)
    if group is None:
        return given
    check_is_group(layer, "tp_group", group)
    size = get_distributed_world_size(group)
    if size < 1:
        message = f"{layer}: this rank is not in tp_group; give the group that has it"
        raise RanksError(message)
    if given not in (1, size):
        message = f"{layer}: tp_size = {given}, and tp_group has {size} ranks; leave tp_size out"
        raise ArgumentError(message)
    return size


def check_group(layer: str, group: Any, size: int) -> None:
    """Raise unless a group has the layer's number of ranks.

    Raises
    ------
    DtypeError
        If it is no process group.
    RanksError
        If the group has another number of ranks, or this rank is not in it.
    """
    check_is_group(layer, "tp_group", group)
    got = 1 if group is None else get_distributed_world_size(group)
    if got != size:
        count = "this rank is not in it" if got < 1 else f"it has {got} ranks"
        message = (
            f"{layer}: set_tensor_parallel_group needs a group of tp_size = {size} ranks, for which the layer was "
            f"made; {count}"
        )
        raise RanksError(message)
