"""The plan of a group: native segments, Python operations, and fused operations, per direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from te_fast.errors import StateError
from te_fast.ops.common import NATIVE_TYPES
from te_fast.ops.op import BasicOperation, Beside, FusedOperation, FusibleOperation
from te_fast.ops.routing import Routing, Slot
from te_fast.ops.undo import Trials
from te_fast.parallel.ranks import NO_EXCHANGE, Exchange
from te_fast.parallel.segment import Segment
from te_fast.runtime import native

#: An operation, and the indices of the basic operations that it stands for.
Match = tuple[FusibleOperation, tuple[int, ...]]
#: Types of a group's input and of each operation's result; None if all are equal, empty if the input is not a float.
Types = tuple[torch.dtype, ...] | None


@dataclass(slots=True, eq=False)
class Step:
    """One part of a plan: a native segment, or an operation that runs in Python."""

    indices: tuple[int, ...]
    op: FusibleOperation | None = None
    program: Any = None
    #: Type that the program's input is cast to; None for none.
    dtype: torch.dtype | None = None
    #: The extra inputs that are added to a tensor of the program, and whether in their own memory.
    added: tuple[tuple[int, bool], ...] = ()
    #: Whether the program's inputs may have types that it does not take.
    casts: bool = False
    #: Indices of the extra inputs among a call's tensors; None for those that the step makes itself.
    takes: tuple[Any, ...] = ()
    #: Places in `takes` of the counts of experts' rows that come through channels, and the operations that take them.
    counted: tuple[tuple[int, Any], ...] = ()
    #: Extra outputs.
    makes: int = 0
    #: For each op of the program, the basic operation that it belongs to.
    owners: tuple[int, ...] = ()
    #: The torch function of the operation between programs with their own gradients; None for its ``op_forward``.
    function: Callable[[torch.Tensor], torch.Tensor] | None = None
    #: Whether the operation's forward is its ``op_forward``.
    is_plain: bool = False
    #: The program between collectives; None without any.
    segment: Segment | None = None
    #: The program in graphs, and the scales of its linear operations; made when first traced.
    traced: Any = None
    states: Any = None
    #: Its collectives in graphs.
    exchange: Exchange = NO_EXCHANGE
    ranks: Any = None

    def matched(
        self, x: torch.Tensor, extras: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the program's inputs in types that it takes; summands get the type of the sum."""
        if self.dtype is not None and x.dtype != self.dtype:
            x = x.to(self.dtype)
        if not self.added:
            return x, extras
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
    """The plan of a group.

    Attributes
    ----------
    ops, labels : list
        Basic operations, and their positions and types.
    routing : Routing
        Wiring of the extra tensors.
    forward, backward : list of Step
        Steps of each direction, both in the order of forward.
    native : list of Step or None
        The steps, if all are native segments, or functions between these.
    single : Program or None
        The one program, if it is all and no extra tensor is wired inside.
    steps : ProgramSteps or None
        The programs and functions, if these are all and there is no extra tensor.
    parameters : list of list of dict
        Per basic operation, the dictionaries that hold its parameters.
    beside : list of Beside
        Per basic operation, the quantisation that linear operations beside it do.
    returned : list of int
        Indices of the caller's outputs among a call's tensors: extra inputs, then the extra outputs of all operations.
    prepared : list of tuple of int and BasicOperation
        Operations with a ``pre_fuser_forward`` of their own, by index.
    is_custom : bool
        Whether users have registered fusions, which may depend on the recipe.
    quantizes_backward : bool
        Whether an operation quantises a gradient.
    trials : Trials
        Number of successful calls.
    """

    ops: list[BasicOperation]
    labels: list[str]
    routing: Routing
    forward: list[Step]
    backward: list[Step]
    native: list[Step] | None = None
    single: Any = None
    steps: Any = None
    parameters: list[list[dict[str, Any]]] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    prepared: list[tuple[int, BasicOperation]] = field(default_factory=list)
    is_custom: bool = False
    quantizes_backward: bool = False
    trials: Trials = field(default_factory=Trials)

    def parameters_of(self, index: int) -> list[Any]:
        """Return the parameters of a basic operation, as they are now."""
        found = [p for owner in self.parameters[index] for p in owner.values() if p is not None]
        return found if len(found) < 2 else list(dict.fromkeys(found))

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
        """Describe the steps of each direction."""
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
        return f"native program of {covered}{cast}{_around(step)}"
    kind = type(step.op).__name__
    how = "fused operation" if isinstance(step.op, FusedOperation) else "operation"
    return f"Python {how} {kind} of {covered}"


def _around(step: Step) -> str:
    """Describe the collectives around a segment."""
    if step.segment is None:
        return ""
    shown = {
        "gather": "an all-gather before it, a reduce-scatter in backward",
        "copy": "an all-reduce in backward",
        "scatter": "a reduce-scatter behind it, an all-gather in backward",
        "sum": "an all-reduce behind it",
    }
    exchange = step.segment.exchange
    parts = [shown[part] for part in (exchange.before, exchange.behind) if part is not None]
    return f", with {'; '.join(parts)}"


def _explain(step: Step, labels: Sequence[str]) -> Iterator[str]:
    yield f"  {_title(step, labels)}"
    if step.program is None:
        return
    for line in explain_program(step.program, [labels[owner] for owner in step.owners]):
        yield f"    {line}"


def explain_program(program: native.Program, labels: Sequence[str]) -> Iterator[str]:
    """Describe the launches of a program, per kind of call and direction.

    Parameters
    ----------
    program : native.Program
        The program.
    labels : sequence of str
        The operation that each of its ops belongs to.
    """
    compiled = program.explain()
    if not compiled:
        yield "not compiled yet: no forward has run"
    for plan in compiled:
        yield f"for {plan['key']}"
        for direction in ("forward", "backward"):
            yield f"  {direction}:"
            for launch, positions in plan[direction]:
                covered = dict.fromkeys(labels[position] for position in positions)
                yield f"    {launch}  [{', '.join(covered)}]"
        yield from (f"  note: {note}" for note in plan["notes"])


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
        parts = _basic_of(op)
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


def _basic_of(op: FusibleOperation) -> list[Any]:
    if not isinstance(op, FusedOperation):
        return [op]
    return [part for inner in op._parts() for part in _basic_of(inner)]


def make_plan(
    ops: list[BasicOperation],
    labels: list[str],
    routing: Routing,
    forward: list[Match],
    backward: list[Match],
    types: Types,
) -> Plan:
    """Split a group into native segments and Python operations.

    Operations that a registered fusion covers in one direction run in Python in both directions, since the fusion and
    their Python methods exchange saved tensors.
    """
    covered = {
        i
        for op, indices in (*forward, *backward)
        if isinstance(op, FusedOperation)
        for i in indices
    }
    beside = [_beside(ops, index, covered) for index in range(len(ops))]
    native = [
        index not in covered
        and op._is_native(beside[index])
        # The Python methods take any type.
        and not (op._mode_names and not _are_native(types, index))
        for index, op in enumerate(ops)
    ]
    if not all(native):
        native = [
            is_native and not op._is_in_parts() for is_native, op in zip(native, ops, strict=True)
        ]
    routing, segments = _segments(ops, labels, routing, native, types)
    inside = {index for step in segments.values() for index in step.indices}
    plan = Plan(
        ops,
        labels,
        routing,
        _steps(forward, segments, inside),
        _steps(backward, segments, inside),
        beside=beside,
    )
    for step in plan.forward:
        if isinstance(step.op, BasicOperation) and covered.isdisjoint(step.indices):
            step.function = step.op._torch_function()
    if all(
        step.function is not None or (step.program is not None and step.segment is None)
        for step in plan.forward
    ):
        plan.native = plan.forward
        everything = sum(routing.made) == len(routing.outputs)
        if len(plan.forward) == 1 and everything and not routing.has_channels:
            plan.single = plan.forward[0].program
    plan.parameters = [[module._parameters for module in op.modules()] for op in ops]
    _wire(plan)
    plan.quantizes_backward = any(op.num_quantizers("backward") for op in ops)
    plan.prepared = [
        (index, op)
        for index, op in enumerate(ops)
        if getattr(op.pre_fuser_forward, "__func__", None) is not BasicOperation.pre_fuser_forward
    ]
    steps = (*plan.forward, *plan.backward)
    # A user's operation may raise at any time; te_fast's operations raise only for sizes and types of a call.
    users = any(step.op is not None and not _is_own(step.op) for step in steps)
    plan.trials.ends = not (users or plan.prepared)
    if plan.native is not None and plan.single is None and plan.trials.ends:
        plan.steps = _native_steps(plan)
    return plan


def _native_steps(plan: Plan) -> native.ProgramSteps | None:
    """Return the steps as calls without extra tensors run them; None if there are such, or a step needs more."""
    if plan.routing.inputs or plan.returned:
        return None
    for step in plan.forward:
        is_more = step.program is not None and (step.casts or step.program.has_parts)
        if is_more or step.takes or step.makes:
            return None
    return native.ProgramSteps([step.function or step.program for step in plan.forward])


def _are_native(types: Types, index: int) -> bool:
    return types is None or (len(types) > index and types[index] in NATIVE_TYPES)


def _is_own(op: FusibleOperation) -> bool:
    return type(op).__module__.startswith("te_fast.")


def _wire(plan: Plan) -> None:
    """Return the place of each step's extra inputs."""
    routing = plan.routing
    given = {slot: place for place, slot in enumerate(routing.inputs)}
    made: dict[Slot, int] = {}
    for index, count in enumerate(routing.made):
        for number in range(count):
            made[index, number] = len(given) + len(made)
    plan.returned = [made[slot] for slot in routing.outputs]

    def place(step: Step, index: int, number: int) -> int | None:
        source = routing.sources[index][number]
        if source is None:
            return given[index, number]
        return None if source[0] in step.indices else made[source]

    for step in plan.forward:
        step.makes = sum(routing.made[index] for index in step.indices)
        slots = [
            (index, number)
            for index in step.indices
            for number in range(len(routing.sources[index]))
        ]
        step.takes = tuple(place(step, *slot) for slot in slots)
        step.counted = tuple(
            (position, plan.ops[index])
            for position, (index, number) in enumerate(slots)
            if number == 0 and plan.ops[index]._counts_rows and routing.sources[index][0]
        )
        method = getattr(getattr(step.op, "fuser_forward", None), "__func__", None)
        is_basic = method is BasicOperation.fuser_forward
        step.is_plain = is_basic and not (step.takes or step.makes)


def _beside(ops: list[BasicOperation], index: int, covered: set[int]) -> Beside:
    """Return the quantisation that native linear operations beside an operation do."""

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
) -> tuple[Routing, dict[int, Step]]:
    """Return the programs by their first operations, and the wiring without the residual connections inside of them."""
    residuals = routing.residuals_among(ops)
    runs = list(_runs(ops, routing, residuals, native, types))
    routing = routing.joined(
        {
            end: begin
            for run, _ in runs
            for end, begin in residuals.items()
            if begin in run and end in run
        }
    )
    casts = types is not None
    return routing, {
        run[0]: _compile(ops, labels, routing, run, dtype, casts=casts) for run, dtype in runs
    }


def _runs(
    ops: list[BasicOperation],
    routing: Routing,
    residuals: dict[int, int],
    native: list[bool],
    types: Types,
) -> Iterator[tuple[list[int], torch.dtype | None]]:
    """Find the runs of native operations that are a program each, and the type that its input is cast to.

    A channel's consumer, unless it is the end of a residual connection, and another type begin another program.
    """
    run: list[int] = []
    dtype = None
    edges = types or (None,) * (len(ops) + 1)
    for index, is_native in enumerate(native):
        sources = routing.sources[index] if index not in residuals else ()
        fed = any(source is not None and source[0] in run for source in sources)
        is_cast = edges[index] != edges[index + 1]
        ended = bool(run) and (ops[run[-1]]._ends_program or _parts(ops, run[-1], index))
        if run and (ended or fed or is_cast or not is_native):
            yield run, dtype
            run = []
        if is_native:
            if not run:
                dtype = edges[index + 1] if is_cast else None
            run.append(index)
    if run:
        yield run, dtype


def _parts(ops: list[BasicOperation], index: int, following: int) -> bool:
    """Whether a collective stands between two operations."""
    return ops[index]._exchange.behind is not None or ops[following]._exchange.before is not None


def _segment_of(
    ops: list[BasicOperation], run: list[int], program: native.Program, name: str
) -> Segment | None:
    """Return the program between the collectives of its first and last operation; None if they have none."""
    first, last = ops[run[0]], ops[run[-1]]
    exchange = Exchange(first._exchange.before, last._exchange.behind)
    if not exchange:
        return None
    owner: Any = first if exchange.before is not None else last
    linear: Any = first
    handle = linear._handle if exchange.before is not None else None
    kind = ", ".join(f"{type(ops[index]).__name__}({ops[index].extra_repr()})" for index in run)
    return Segment(name, program, exchange, owner.tensor_parallel_group, handle, kind)


def append_ops(
    program: Any,
    ops: list[BasicOperation],
    labels: list[str],
    routing: Routing,
    run: Sequence[int],
) -> Iterator[int]:
    """Append operations to a program one by one; yield each index after its ops were appended."""
    begun: dict[int, int] = {}
    begins = set(routing.residuals.values())
    for index in run:
        if index in begins:
            begun[index] = program.residual(labels[index])
        if index in routing.residuals:
            program.add_residual(labels[index], begun[routing.residuals[index]])
        elif index not in begins or routing.made[index]:
            ops[index]._append_to(program, labels[index])
        yield index


def _compile(
    ops: list[BasicOperation],
    labels: list[str],
    routing: Routing,
    run: list[int],
    dtype: torch.dtype | None,
    *,
    casts: bool,
) -> Step:
    first, last = (labels[run[i]].partition(":")[0] for i in (0, -1))
    name = f"op {labels[run[0]]}" if len(run) == 1 else f"ops {first}-{last}"
    program = native.Program(name)
    owners: list[int] = []
    for index in append_ops(program, ops, labels, routing, run):
        owners += [index] * (program.num_ops - len(owners))
    extras = [ops[index] for index in run for _ in routing.sources[index]]
    added = [(number, op) for number, op in enumerate(extras) if op._adds_extra]
    return Step(
        tuple(run),
        program=program,
        segment=_segment_of(ops, run, program, name),
        dtype=dtype,
        casts=casts,
        owners=tuple(owners),
        added=tuple((number, bool(getattr(op, "_in_place", False))) for number, op in added),
    )
