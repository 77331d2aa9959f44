"""How a group runs: native segments, Python operations, and fused ones, per direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from te_fast.errors import StateError
from te_fast.pytorch import _ops
from te_fast.pytorch.ops._routing import Routing
from te_fast.pytorch.ops._undo import Trials
from te_fast.pytorch.ops.op import BasicOperation, Beside, FusedOperation, FusibleOperation

__all__ = ["Match", "Plan", "Step", "Types", "make_plan", "match"]

#: An operation, and the indices of the basic operations that it stands for.
Match = tuple[FusibleOperation, tuple[int, ...]]
#: Types of a group's input and of what each operation makes of it; None if all are one.
Types = tuple[torch.dtype, ...] | None


@dataclass(slots=True, eq=False)
class Step:
    """One part of a plan: a native segment, or an operation that runs in Python."""

    indices: tuple[int, ...]
    op: FusibleOperation | None = None
    program: Any = None
    #: Type that the program's input is cast to; None for none.
    dtype: torch.dtype | None = None
    #: Which of the extra inputs are added to a tensor of the program, and whether in their own memory.
    added: tuple[tuple[int, bool], ...] = ()

    def matched(
        self, x: torch.Tensor, extras: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the program's inputs in types that it takes: what is added has the type of the sum."""
        x = x if self.dtype is None else x.to(self.dtype)
        for number, in_place in self.added:
            other = extras[number].dtype
            if other != x.dtype:
                x = x.to(other if in_place else torch.promote_types(x.dtype, other))
        if any(extras[number].dtype != x.dtype for number, _ in self.added):
            numbers = [number for number, in_place in self.added if not in_place]
            extras = tuple(
                extra.to(x.dtype) if number in numbers else extra
                for number, extra in enumerate(extras)
            )
        return x, extras


@dataclass(slots=True, eq=False)
class Plan:
    """How a group runs.

    Attributes
    ----------
    ops, labels : list
        Basic operations, and their positions and types.
    routing : Routing
        Wiring of the extra tensors.
    forward, backward : list of Step
        Steps of each direction, both in the order of forward.
    native : list of Step or None
        The steps, if all are native segments.
    single : Program or None
        The one program, if it is all and no extra tensor is wired inside.
    parameters : list of list of dict
        Per basic operation, the dictionaries that hold its parameters.
    beside : list of Beside
        Per basic operation, what linear operations beside it do.
    trials : Trials
        Calls of several native segments that have gone well.
    """

    ops: list[BasicOperation]
    labels: list[str]
    routing: Routing
    forward: list[Step]
    backward: list[Step]
    native: list[Step] | None = None
    single: Any = None
    parameters: list[list[dict[str, Any]]] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)
    trials: Trials = field(default_factory=Trials)

    def parameters_of(self, index: int) -> list[Any]:
        """Return the parameters of a basic operation, as they are now."""
        found = (p for owner in self.parameters[index] for p in owner.values() if p is not None)
        return list(dict.fromkeys(found))

    def matches(self, steps: list[Step]) -> list[tuple[FusibleOperation, list[int]]]:
        """Return operations with the indices of the basic ones that they stand for."""
        found: list[tuple[FusibleOperation, list[int]]] = []
        for step in steps:
            if step.op is not None:
                found.append((step.op, list(step.indices)))
            else:
                found += [(self.ops[index], [index]) for index in step.indices]
        return found

    def explain(self, name: str) -> str:
        """Say what runs, per direction."""
        lines = [f"{name}:"]
        for step in self.forward:
            lines += _explain(step, self.labels)
        if [step.op for step in self.backward] != [step.op for step in self.forward]:
            lines.append("  backward, last to first:")
            for step in reversed(self.backward):
                lines.append(f"    {_title(step, self.labels)}")
        return "\n".join(lines)


def _title(step: Step, labels: Sequence[str]) -> str:
    covered = ", ".join(labels[index] for index in step.indices)
    if step.program is not None:
        cast = "" if step.dtype is None else f" in {step.dtype}"
        return f"native program of {covered}{cast}"
    kind = type(step.op).__name__
    how = "fused operation" if isinstance(step.op, FusedOperation) else "operation"
    return f"Python {how} {kind} of {covered}"


def _explain(step: Step, labels: Sequence[str]) -> Iterator[str]:
    yield f"  {_title(step, labels)}"
    if step.program is None:
        return
    compiled = step.program.explain()
    if not compiled:
        yield "    not compiled yet: no forward has run"
    for plan in compiled:
        yield f"    for {plan['key']}"
        for direction in ("forward", "backward"):
            yield f"      {direction}:"
            for launch, positions in plan[direction]:
                covered = ", ".join(labels[step.indices[position]] for position in positions)
                yield f"        {launch}  [{covered}]"
        yield from (f"      note: {note}" for note in plan["notes"])


def match(
    fused: Sequence[FusibleOperation], basic: Sequence[BasicOperation], labels: Sequence[str]
) -> list[Match]:
    """Find which basic operations each operation of a fusion's result stands for.

    Raises
    ------
    StateError
        If they are not the group's, in order.
    """
    matches: list[Match] = []
    index = 0
    for op in fused:
        parts = _parts(op)
        if any(a is not b for a, b in zip(parts, basic[index : index + len(parts)], strict=False)):
            break
        matches.append((op, tuple(range(index, index + len(parts)))))
        index += len(parts)
    else:
        if index == len(basic):
            return matches
    message = (
        "a registered fusion returned operations that are not the group's in order: expected "
        f"[{', '.join(labels)}], got [{', '.join(type(op).__name__ for op in fused)}]"
    )
    raise StateError(message)


def _parts(op: FusibleOperation) -> list[Any]:
    if not isinstance(op, FusedOperation):
        return [op]
    return [part for inner in op._parts() for part in _parts(inner)]


def make_plan(
    ops: list[BasicOperation],
    labels: list[str],
    routing: Routing,
    forward: list[Match],
    backward: list[Match],
    types: Types = None,
) -> Plan:
    """Split a group into native segments and what runs in Python.

    Operations that a registered fusion covers in one direction run in Python in both: its other half
    reads what their Python methods keep.
    """
    covered = {
        i
        for op, indices in (*forward, *backward)
        if isinstance(op, FusedOperation)
        for i in indices
    }
    beside = [_beside(ops, index, covered) for index in range(len(ops))]
    native = [index not in covered and op._is_native(beside[index]) for index, op in enumerate(ops)]
    segments = {step.indices[0]: step for step in _segments(ops, labels, routing, native, types)}
    inside = {index for step in segments.values() for index in step.indices}
    plan = Plan(
        ops,
        labels,
        routing,
        _steps(forward, segments, inside),
        _steps(backward, segments, inside),
        beside=beside,
    )
    if all(step.program is not None for step in plan.forward):
        plan.native = plan.forward
        everything = sum(op.num_extra_outputs for op in ops) == len(routing.outputs)
        if len(plan.forward) == 1 and everything and not routing.has_channels:
            plan.single = plan.forward[0].program
    plan.parameters = [[module._parameters for module in op.modules()] for op in ops]
    return plan


def _beside(ops: list[BasicOperation], index: int, covered: set[int]) -> Beside:
    """Say what the native linear operations beside an operation do."""

    def takes(other: int) -> bool:
        inside = 0 <= other < len(ops) and other not in covered
        return inside and ops[other]._takes_to_fp8 and ops[other]._is_native()

    before = index - 1
    while before >= 0 and before not in covered and ops[before]._hands_gradient_on:
        before -= 1
    return Beside(gradient=takes(before), output=takes(index + 1))


def _steps(matches: list[Match], segments: dict[int, Step], inside: set[int]) -> list[Step]:
    steps: list[Step] = []
    for op, indices in matches:
        if indices[0] in segments:
            steps.append(segments[indices[0]])
        elif indices[0] not in inside:
            steps.append(Step(indices, op=op))
    return steps


def _segments(
    ops: list[BasicOperation],
    labels: list[str],
    routing: Routing,
    native: list[bool],
    types: Types,
) -> Iterator[Step]:
    """Compile the runs of native operations; a channel's consumer, and another type, begin another program."""
    run: list[int] = []
    dtype = None
    for index, is_native in enumerate(native):
        fed = any(source is not None and source[0] in run for source in routing.sources[index])
        is_cast = types is not None and types[index] != types[index + 1]
        if run and (fed or is_cast or not is_native):
            yield _compile(ops, labels, run, dtype)
            run = []
        if is_native:
            if not run:
                dtype = types[index + 1] if types is not None and is_cast else None
            run.append(index)
    if run:
        yield _compile(ops, labels, run, dtype)


def _compile(
    ops: list[BasicOperation], labels: list[str], run: list[int], dtype: torch.dtype | None
) -> Step:
    first, last = (labels[run[i]].partition(":")[0] for i in (0, -1))
    name = f"op {labels[run[0]]}" if len(run) == 1 else f"ops {first}-{last}"
    program = _ops.Program(name)
    for index in run:
        ops[index]._append_to(program, labels[index])
    extras = [ops[index] for index in run for _ in range(ops[index].num_extra_inputs)]
    added = [(number, op) for number, op in enumerate(extras) if op._adds_extra]
    return Step(
        tuple(run),
        program=program,
        dtype=dtype,
        added=tuple((number, bool(getattr(op, "_in_place", False))) for number, op in added),
    )
