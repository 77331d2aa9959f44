"""The wiring of a group's extra inputs and outputs, to the caller or inside of the group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from te_fast.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_fast.ops.op import BasicOperation

#: Index of an operation, and of one of its extra inputs or outputs.
Slot = tuple[int, int]


@dataclass(slots=True)
class Routing:
    """Wiring of a group's extra tensors, from the operations' channels at the time of construction.

    Attributes
    ----------
    sources : list of list
        Per operation and extra input: the output that feeds it, or None if the caller passes it.
    inputs, outputs : list of tuple of int
        Extra inputs that the caller gives and outputs that it gets, in its order.
    consumers : dict
        Operations that take an output.
    made : list of int
        Per operation, the extra outputs that its step hands out.
    residuals : dict of int
        Residual additions inside of a program, and the beginning of each connection.
    """

    sources: list[list[Slot | None]]
    made: list[int]
    inputs: list[Slot] = field(default_factory=list)
    outputs: list[Slot] = field(default_factory=list)
    consumers: dict[Slot, list[int]] = field(default_factory=dict)
    residuals: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, ops: Sequence[BasicOperation], names: Sequence[str]) -> Routing:
        """Wire a group.

        Raises
        ------
        ArgumentError
            If a channel has two producers, or none before its consumer.
        """
        routing = cls(
            [[None] * op.num_extra_inputs for op in ops], [op.num_extra_outputs for op in ops]
        )
        producers = _producers(ops, names)
        for index, op in enumerate(ops):
            for number in range(op.num_extra_inputs):
                channel = op._extra_input_channels.get(number)
                if channel is None:
                    routing.inputs.append((index, number))
                    continue
                producer = producers.get(channel)
                if producer is None or producer[0] >= index:
                    which = "producer" if producer is None else "earlier producer"
                    message = (
                        f"op {names[index]}: extra tensor channel {channel!r} has no {which} in its "
                        "group; a plain nn.Module in between ends a group"
                    )
                    raise ArgumentError(message)
                routing.sources[index][number] = producer
                routing.consumers.setdefault(producer, []).append(index)
            for number in range(op.num_extra_outputs):
                if op._extra_output_channels.get(number, ("", True))[1]:
                    routing.outputs.append((index, number))
        return routing

    @property
    def has_channels(self) -> bool:
        """Whether anything is wired inside, or hidden from the caller."""
        return any(source is not None for sources in self.sources for source in sources)

    def residuals_among(self, ops: Sequence[BasicOperation]) -> dict[int, int]:
        """Return the residual additions inside of programs, and the operations where they begin."""
        found = {}
        for slot, users in self.consumers.items():
            begin, end = slot[0], users[0]
            if len(users) == 1 and ops[begin]._hands_input_out and ops[end]._adds_extra:
                found[end] = begin
        return found

    def joined(self, residuals: dict[int, int]) -> Routing:
        """Return the wiring with these connections moved into programs."""
        begins = set(residuals.values())
        shown = {index for index, _ in self.outputs}
        return replace(
            self,
            sources=[[] if end in residuals else taken for end, taken in enumerate(self.sources)],
            made=[
                0 if index in begins and index not in shown else made
                for index, made in enumerate(self.made)
            ],
            consumers={
                slot: users for slot, users in self.consumers.items() if slot[0] not in begins
            },
            residuals=residuals,
        )


def _producers(ops: Sequence[BasicOperation], names: Sequence[str]) -> dict[str, Slot]:
    producers: dict[str, Slot] = {}
    for index, op in enumerate(ops):
        for number, (channel, _) in sorted(op._extra_output_channels.items()):
            if channel in producers:
                message = (
                    f"op {names[index]}: extra tensor channel {channel!r} has multiple producers, "
                    f"op {names[producers[channel][0]]} is another"
                )
                raise ArgumentError(message)
            producers[channel] = (index, number)
    return producers
