"""Groups of operations in graphs: programs as operators, and operations in Python between them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from te_fast.errors import UnsupportedError
from te_fast.graphs.refusal import raise_problem, refusal
from te_fast.graphs.traced import Traced
from te_fast.ops.common import autocast_dtype
from te_fast.ops.op import OperationContext
from te_fast.ops.plan import append_ops
from te_fast.parallel.in_graphs import ranks_of
from te_fast.runtime.compiling import is_exporting

if TYPE_CHECKING:
    from te_fast.ops.fuser import OperationFuser
    from te_fast.ops.plan import Plan, Step
    from te_fast.runtime.rows import Tensors


#: Quantizers of an operation's neighbours, which tell it nothing.
_ALONE: dict[str, None] = {
    "prev_op_grad_output_quantizer": None,
    "next_op_input_quantizer": None,
}


class SegmentStates:
    """The scales of a segment's linear operations, each of which has its own."""

    def __init__(self, fuser: OperationFuser, plan: Plan, step: Step) -> None:
        self._fuser = weakref.ref(fuser)
        self._run = plan.ops, plan.labels, plan.routing, step.indices
        self._ops = [plan.ops[index] for index in step.indices if plan.ops[index]._takes_to_fp8]

    def _append_to(self, program: Any) -> None:
        for _ in append_ops(program, *self._run):
            pass

    def _check_quantized_weights(self, recipe: Any) -> None:
        """Do nothing; the program itself raises for parameters that it cannot read."""

    def _init_delayed_scaling(self) -> None:
        fuser = self._fuser()
        if fuser is not None:
            fuser._init_delayed_scaling()

    def _handles_of_linears(self) -> list[Any]:
        return [op._handle for op in self._ops]

    def _delayed_states_of_linears(self, *, forward: bool) -> list[Any]:
        return [op._delayed_state("forward" if forward else "backward") for op in self._ops]


def prepare(
    fuser: OperationFuser,
    key: str,
    dtype: torch.dtype,
    extra_dtypes: tuple[torch.dtype, ...],
    autocast: torch.dtype | None,
) -> None:
    """Plan how the group runs on tensors of these types; runs once in a trace, on the real group.

    Raises
    ------
    TeFastError
        If it cannot run on them, or cannot be traced.
    """
    fuser._refuse_stale()
    samples = [torch.empty(0, dtype=kind) for kind in (dtype, *extra_dtypes)]
    plan = fuser._plan_for(samples[0], tuple(samples[1:]), autocast, None)
    if plan.is_custom:
        message = (
            f"{fuser._name}: fusions that were registered by register_forward_fusion and its kin cannot be traced; "
            "compile the model without them"
        )
        raise UnsupportedError(message)
    for step in plan.forward:
        if step.program is not None and step.traced is None:
            step.states = SegmentStates(fuser, plan, step)
            step.traced = Traced(step.program, step.states, fuser._name)
        if step.segment is not None:
            _prepare_on_ranks(fuser, step, step.segment.ranks.group)
            step.exchange, first = step.segment.exchange, step.segment.first
            # Calls outside of graphs compute a weight's gradient after a collective.
            if first is not None:
                first.delay_wgrad_compute = first.save_original_input = False
        elif step.op is not None and getattr(step.op, "_collective", None) is not None:
            _prepare_on_ranks(fuser, step, step.op.process_group)
    # A new dictionary: a trace that has read the former one would not see additions to it.
    fuser._traced_plans = {**fuser._traced_plans, key: plan}


def _prepare_on_ranks(fuser: OperationFuser, step: Step, group: Any) -> None:
    if is_exporting():
        message = (
            f"{fuser._name}: torch.export takes no operations that ranks share; export those of one rank, with whole "
            "weights"
        )
        raise UnsupportedError(message)
    step.ranks = ranks_of(fuser._name, group)


def run(
    fuser: OperationFuser,
    x: torch.Tensor,
    extra_inputs: Tensors,
    basic_op_kwargs: list[dict[str, Any]] | None,
    is_first_microbatch: bool | None,
) -> Any:
    """Run a group under a tracer."""
    from te_fast.graphs import operators

    autocast = autocast_dtype(x)
    extra_dtypes = tuple([extra.dtype for extra in extra_inputs])
    key = f"{x.dtype} {extra_dtypes} {autocast} {fuser._modes}"
    raise_problem(fuser._prepare_traced(key, x.dtype, extra_dtypes, autocast))
    plan = fuser._traced_plans[key]
    tensors: list[Any] = list(fuser._with_counts(x, extra_inputs))
    for step in plan.forward:
        if step.program is None:
            x = _run_in_python(plan, step, x, tensors, basic_op_kwargs, is_first_microbatch)
            continue
        ranks: Any = step.ranks
        extras = tuple([tensors[place] for place in step.takes])
        if step.casts:
            x, extras = step.matched(x, extras)
        params = tuple([p for index in step.indices for p in _read(plan, index)])
        if ranks is not None:
            x = ranks.before(step.exchange, x)
        result = operators.apply(step.traced, step.states, x, extras, params, is_first_microbatch)
        if step.makes:
            x = result[0]
            tensors += result[1:]
        else:
            x = result
        if ranks is not None:
            x = ranks.behind(step.exchange, x)
    if plan.returned:
        return (x, *[tensors[place] for place in plan.returned])
    return x


def _parameters(plan: Plan, index: int) -> list[torch.Tensor]:
    return [p for owner in plan.parameters[index] for p in owner.values() if p is not None]


def _read(plan: Plan, index: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the parts of the parameters of a basic operation that the program reads."""
    parts = plan.ops[index]._parts_of_parameters()
    return [(whole,) for whole in _parameters(plan, index)] if parts is None else parts


def _run_in_python(
    plan: Plan,
    step: Step,
    x: torch.Tensor,
    tensors: list[Any],
    kwargs: list[dict[str, Any]] | None,
    is_first_microbatch: bool | None,
) -> torch.Tensor:
    op: Any = step.op
    if not step.is_plain or len(step.indices) != 1:
        message = (
            f"op {plan.labels[step.indices[0]]}: {type(op).__name__} has extra tensors or stands for several "
            "operations, and runs in Python, which cannot be traced; compile what is around it"
        )
        raise refusal(message)
    index = step.indices[0]
    if op._collective is not None:
        shared: torch.Tensor = getattr(step.ranks, op._collective)(x)
        return shared
    given = {} if kwargs is None else kwargs[index]
    tensors_of_op = [x, *_parameters(plan, index)]
    wanted = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors_of_op])
    if wanted and is_exporting():
        message = (
            f"op {plan.labels[index]}: torch.export keeps no backward of an operation in Python; export under "
            "torch.no_grad(), or train by torch.compile"
        )
        raise refusal(message)
    beside = plan.beside[index]
    y: torch.Tensor
    if not wanted:
        ctx: Any = OperationContext()
        ctx.beside, ctx.requires_grad = beside, False
        ctx.is_first_microbatch = is_first_microbatch
        y = op.op_forward(ctx, x, **_ALONE, **given)
    else:
        y = _PythonOperation.apply(op, beside, is_first_microbatch, given, *tensors_of_op)
    return y


class _PythonOperation(torch.autograd.Function):
    """Arguments: operation, quantisation beside it, the call's `is_first_microbatch`, keywords, input, parameters.

    The node is the operation's context.
    """

    @staticmethod
    def forward(
        ctx: Any,
        op: Any,
        beside: Any,
        is_first_microbatch: bool | None,
        kwargs: dict[str, Any],
        x: torch.Tensor,
        *_: torch.Tensor,
    ) -> torch.Tensor:
        ctx.beside = beside
        ctx.is_first_microbatch = is_first_microbatch
        ctx.op = op
        if is_dynamo_compiling():  # otherwise a context has this attribute, which cannot be written
            ctx.requires_grad = True
        y: torch.Tensor = op.op_forward(ctx, x, **_ALONE, **kwargs)
        # A view, since torch 2.11 loses the gradient of a traced function that returns the result of an operation that
        # changed nothing, such as a conversion to the same type.
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dx, grads = ctx.op.op_backward(ctx, dy)
        return (None, None, None, None, dx, *grads)
