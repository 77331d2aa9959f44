"""Runs a plan: only native programs, or Python operations and native segments under one autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import ShapeError, StateError
from te_fast.ops.op import OperationContext
from te_fast.runtime import native, rows
from te_fast.runtime.delayed import update_scales
from te_fast.runtime.rows import Tensors
from te_fast.runtime.second_order import differentiable_once, no_forward_mode

if TYPE_CHECKING:
    from te_fast.ops.fuser import OperationFuser
    from te_fast.ops.op import BasicOperation
    from te_fast.ops.plan import Plan, Step
    from te_fast.ops.routing import Slot
    from te_fast.recipe import Recipe

#: Size, type and device of a tensor between two steps.
Edge = tuple[torch.Size, torch.dtype, torch.device]


def _edge(tensor: torch.Tensor) -> Edge:
    return tensor.shape, tensor.dtype, tensor.device


def _grad_of(edge: Edge, grad: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor's gradient in the tensor's type; zeros if there is none."""
    shape, dtype, device = edge
    if grad is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return grad if grad.dtype == dtype else grad.to(dtype)


def run_native(
    owner: OperationFuser,
    plan: Plan,
    x: torch.Tensor,
    extra_inputs: Tensors,
    is_first_microbatch: bool | None,
    recipe: Recipe | None,
    epoch: int,
    buffers: native.Buffers | None = None,
) -> Any:
    """Run a group of native operations; each program has an autograd node of its own."""
    if plan.single is not None:
        if plan.forward[0].casts:
            x, extra_inputs = plan.forward[0].matched(x, extra_inputs)
        return _apply(plan, plan.forward[0], owner, x, extra_inputs, is_first_microbatch, buffers)

    def run() -> Any:
        return _run_programs(owner, plan, x, extra_inputs, is_first_microbatch)

    result = plan.trials.run(run, plan.ops, recipe, epoch, x, extra_inputs)
    if plan.steps is not None and torch._C._current_graph_task_id() < 0:
        plan.steps.learn(x)
    return result


def _apply(
    plan: Plan,
    step: Step,
    owner: OperationFuser,
    x: torch.Tensor,
    extras: Tensors,
    is_first_microbatch: bool | None,
    buffers: native.Buffers | None,
) -> Any:
    program, params = step.program, None
    if x.numel() == 0 and program.has_parts:  # without launches, torch joins the parts
        ops = [plan.ops[index] for index in step.indices]
        params = joined_on_nothing(program, ops, owner._name, is_first_microbatch)
    return native.program_apply(
        program, owner, x, extras, is_first_microbatch, params, None, buffers
    )


def joined_on_nothing(
    program: native.Program,
    ops: Sequence[BasicOperation],
    name: str,
    is_first_microbatch: bool | None,
) -> Tensors:
    """Return the parameters of a program of these operations for a call on zero rows."""
    fused = {id(part) for op in ops for part in op._fused_parts()}
    overwrite, join = is_first_microbatch is True, rows.joined_on_nothing
    return tuple(
        [
            join(parts, name, fuse=id(parts[0]) in fused, overwrite=overwrite)
            for parts in program.parameter_parts()
        ]
    )


def _run_programs(
    owner: OperationFuser,
    plan: Plan,
    x: torch.Tensor,
    extra_inputs: Tensors,
    is_first_microbatch: bool | None,
) -> Any:
    tensors = [*extra_inputs]
    for step in plan.forward:
        if step.function is not None:
            x = step.function(x)
            continue
        extras = tuple([tensors[place] for place in step.takes]) if step.takes else ()
        if step.casts:
            x, extras = step.matched(x, extras)
        result = _apply(plan, step, owner, x, extras, is_first_microbatch, None)
        if step.makes:
            x = result[0]
            tensors += result[1:]
        else:
            x = result
    if plan.returned:
        return (x, *(tensors[place] for place in plan.returned))
    return x


def _output_slots(plan: Plan, step: Step) -> list[Slot]:
    return [(i, number) for i in step.indices for number in range(plan.routing.made[i])]


class _Function(torch.autograd.Function):
    """Arguments: input, call, then parameters and extra inputs, which autograd must know of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call, *_: torch.Tensor) -> Any:
        outputs, saved = call.forward(x)
        ctx.save_for_backward(*saved)
        ctx.call = call
        ctx.set_materialize_grads(False)
        whole = [y for y in outputs if not y.is_floating_point()]
        if whole:
            ctx.mark_non_differentiable(*whole)
        return outputs if len(outputs) > 1 else outputs[0]

    jvp = no_forward_mode(lambda ctx: ctx.call.fuser._name)

    @staticmethod
    @differentiable_once(lambda ctx: ctx.call.fuser._name)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return ctx.call.backward(ctx.saved_tensors, grads)


# The C++ method: Python's wrapper serves functorch, whose transforms groups refuse.
_apply_function = super(torch.autograd.Function, _Function).apply


class Call:
    """One forward of a group with Python operations, and the tensors that its backward needs."""

    __slots__ = (
        "contexts",
        "edges",
        "first",
        "fuser",
        "input_needs_grad",
        "is_first_microbatch",
        "kept",
        "kwargs",
        "native_outputs",
        "plan",
        "recipe",
        "saved",
        "tensors",
        "updates_scales",
    )

    def __init__(
        self,
        fuser: OperationFuser,
        plan: Plan,
        kwargs: list[dict[str, Any]] | None,
        is_first_microbatch: bool | None,
        recipe: Recipe | None,
    ) -> None:
        self.fuser = fuser
        self.plan = plan
        self.kwargs = kwargs
        self.is_first_microbatch = is_first_microbatch
        self.recipe = recipe
        #: Contexts of the Python operations, by index.
        self.contexts: dict[int, OperationContext] = {}
        #: Extra inputs that the caller gave, and the extra outputs so far, while forward runs.
        self.tensors: list[Any] = []
        #: Native state of the segments, by their first index.
        self.kept: dict[int, Any] = {}
        #: Places of the tensors that an operation or segment saved, by its first index.
        self.saved: dict[int, slice] = {}
        #: Size, type and device of each step's result, by its last index.
        self.edges: dict[int, Edge] = {}
        #: The same for the segments' extra outputs.
        self.native_outputs: dict[Slot, Edge] = {}
        #: First operation with a backward.
        self.first = len(plan.ops)
        self.input_needs_grad = False
        self.updates_scales = False

    def run(self, x: torch.Tensor, extra_inputs: Tensors, epoch: int) -> Any:
        """Run forward in a region of this epoch, with autograd if a gradient is needed."""
        plan = self.plan
        self.tensors += extra_inputs
        parameters: list[torch.Tensor] = []
        if torch.is_grad_enabled():
            self.input_needs_grad = x.requires_grad
            self._find_first(parameters, extra_inputs)

        def run() -> Any:
            for index, op in plan.prepared:
                op.pre_fuser_forward(requires_grad=index >= self.first)
            if self.first < len(plan.ops):
                self._take_scale_update()
                outputs = _apply_function(x, self, *parameters, *extra_inputs)
                # A Quantize of a recomputation has got this from its first run.
                self._take_scale_update()
                return outputs
            if torch.is_grad_enabled():
                with torch.no_grad():
                    outputs, _ = self.forward(x)
            else:
                outputs, _ = self.forward(x)
            return outputs if len(outputs) > 1 else outputs[0]

        return plan.trials.run(run, plan.ops, self.recipe, epoch, x, extra_inputs)

    def _find_first(self, parameters: list[torch.Tensor], extra_inputs: Tensors) -> None:
        """Gather the parameters, and find the first operation with a backward."""
        plan = self.plan
        first = 0 if self.input_needs_grad else len(plan.ops)
        for (index, _), tensor in zip(plan.routing.inputs, extra_inputs, strict=True):
            if index < first and tensor.requires_grad:
                first = index
        for index, owners in enumerate(plan.parameters):
            if not any(owners):
                continue
            own = plan.parameters_of(index)
            parameters += own
            if index < first and any([parameter.requires_grad for parameter in own]):
                first = index
        self.first = first

    def _take_scale_update(self) -> None:
        """Let this backward update the gradients' scales if the group is the region's first with such scales.

        The native segments leave the update to the group, whose Python operations may quantise after them.
        """
        is_delayed = self.recipe is not None and self.recipe.delayed()
        if is_delayed and self.plan.quantizes_backward and not self.updates_scales:
            self.updates_scales = native.autocast_take_first()

    # Forward --------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> tuple[Tensors, list[torch.Tensor | None]]:
        """Return the outputs and the tensors that autograd must save."""
        plan = self.plan
        saved: list[torch.Tensor | None] = []
        wanted = self.first < len(plan.ops)
        for step in plan.forward:
            run = self._python_forward if step.program is None else self._native_forward
            x = run(step, x, saved)
            if wanted:
                self.edges[step.indices[-1]] = (x.shape, x.dtype, x.device)
        tensors, self.tensors = self.tensors, []
        if not plan.returned:
            return (x,), saved
        outputs = [x, *(tensors[place] for place in plan.returned)]
        # Two outputs of one autograd node must not be one tensor.
        for position, y in enumerate(outputs):
            if any(y is earlier for earlier in outputs[:position]):
                outputs[position] = y.detach()
        return tuple(outputs), saved

    def _native_forward(
        self, step: Step, x: torch.Tensor, saved: list[torch.Tensor | None]
    ) -> torch.Tensor:
        plan, first, start = self.plan, step.indices[0], len(saved)
        wanted = self.first < len(plan.ops)
        extras: Tensors = ()
        extra_grads: list[bool] = []
        if step.takes:
            extras = tuple(self._taken(step, x))
            extra_grads = [wanted and tensor.requires_grad for tensor in extras]
        if step.casts:
            x, extras = step.matched(x, extras)
        result: Any
        if step.segment is not None:
            result = self._forward_on_ranks(step, x, extras, extra_grads)
        elif x.numel() == 0:
            if self.recipe is not None and self.recipe.delayed():
                # Other ranks may have rows, and reduce their maxima with this rank.
                self.fuser._init_delayed_scaling()
            parameters = tuple([p for index in step.indices for p in plan.parameters_of(index)])
            overwrite = self.is_first_microbatch is True
            result = rows.run_on_nothing(step.program, x, extras, parameters, overwrite)
        else:
            result = native.program_run_forward(
                step.program,
                self.fuser,
                x,
                extras,
                self.is_first_microbatch,
                self.input_needs_grad or self.first < first,
                extra_grads,
                wanted,
            )
        y, outputs, kept, tensors = result
        if step.makes:
            for slot, output in zip(_output_slots(plan, step), outputs, strict=True):
                self.tensors.append(self._marked(slot[0], output))
                self.native_outputs[slot] = _edge(output)
        if wanted:
            self.kept[first] = kept
            saved += tensors
            self.saved[first] = slice(start, len(saved))
        return y

    def _taken(self, step: Step, x: torch.Tensor) -> list[Any]:
        """Return a step's extra inputs; the fuser has checked the counts of experts' rows that the caller gave."""
        found = [None if place is None else self.tensors[place] for place in step.takes]
        for position, op in step.counted:
            if found[position] is not None:
                found[position] = op._counts_of_rows(found[position], x)
        return found

    def _forward_on_ranks(
        self, step: Step, x: torch.Tensor, extras: Tensors, extra_grads: list[bool]
    ) -> Any:
        """Run a program between collectives; the result is as of ``program_run_forward``."""
        segment, first = step.segment, step.indices[0]
        assert segment is not None
        wanted = self.first < len(self.plan.ops)
        needs_x = self.input_needs_grad or self.first < first
        parameters = tuple([p for index in step.indices for p in self.plan.parameters_of(index)])
        needs = [parameter.requires_grad for parameter in parameters] if wanted else ()
        segment.check(x, wanted=wanted, needs_x=needs_x, needs=needs)
        quantizer = getattr(self.plan.ops[first], "_quantizer_of_rows", None)
        y, outputs, run, _ = segment.forward(
            self.fuser,
            x,
            extras,
            self.is_first_microbatch,
            (needs_x, extra_grads, wanted),
            parameters,
            quantizer=quantizer,
        )
        saved, run.saved = run.saved, []
        return y, outputs, run, saved

    def _python_forward(
        self, step: Step, x: torch.Tensor, saved: list[torch.Tensor | None]
    ) -> torch.Tensor:
        op: Any = step.op
        contexts = []
        for index in step.indices:
            context = self.contexts[index] = OperationContext()
            context.requires_grad = index >= self.first
            context.beside = self.plan.beside[index]
            context.is_first_microbatch = self.is_first_microbatch
            contexts.append(context)
        if step.is_plain:
            x = op.op_forward(
                contexts[0],
                x,
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                **(self.kwargs[step.indices[0]] if self.kwargs else {}),
            )
        else:
            x = self._fuser_forward(step, contexts, x)
        if not isinstance(x, torch.Tensor):
            label, kind = self.plan.labels[step.indices[0]], type(op).__name__
            message = f"op {label}: {kind} returned {_named(x)}, expected a torch.Tensor"
            raise StateError(message)
        for index, context in zip(step.indices, contexts, strict=True):
            start = len(saved)
            saved += context.to_save or ()
            context.to_save = None
            self.saved[index] = slice(start, len(saved))
        return x

    def _fuser_forward(self, step: Step, contexts: list[OperationContext], x: torch.Tensor) -> Any:
        """Run an operation with extra tensors, or one that stands for several; return its output."""
        op: Any = step.op
        kwargs: list[dict[str, Any]] = [{} for _ in step.indices]
        if self.kwargs:
            kwargs = [self.kwargs[index] for index in step.indices]
        widths = [len(self.plan.routing.sources[index]) for index in step.indices]
        found = self._taken(step, x)
        result: Any = op.fuser_forward(
            contexts,
            x,
            basic_op_extra_inputs=_split(found, widths),
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=kwargs,
        )
        x, outputs = _returned(result, 2, step, self.plan, "fuser_forward")
        if isinstance(x, torch.Tensor):
            self._take_outputs(step, [tuple(ys) for ys in outputs])
        return x

    def _take_outputs(self, step: Step, outputs: list[tuple[Any, ...]]) -> None:
        labels, routing = self.plan.labels, self.plan.routing
        expected = [self.plan.routing.made[index] for index in step.indices]
        got = [len(ys) for ys in outputs]
        if got != expected:
            message = (
                f"op {labels[step.indices[0]]}: {type(step.op).__name__} returned {got} extra outputs "
                f"of its basic ops, expected {expected}"
            )
            raise StateError(message)
        for index, ys in zip(step.indices, outputs, strict=True):
            for number, y in enumerate(ys):
                slot = (index, number)
                users = routing.consumers.get(slot, ())
                is_tensor = isinstance(y, torch.Tensor)
                self.tensors.append(self._marked(index, y) if is_tensor else None)
                if is_tensor:
                    continue
                if slot in routing.outputs:
                    reason = "is public"
                elif any(user not in step.indices for user in users):
                    reason = "is read by an operation outside its forward fusion"
                else:
                    continue
                message = (
                    f"op {labels[index]}: extra output {number} {reason}, but {type(step.op).__name__} returned "
                    f"{_named(y)} for it"
                )
                raise StateError(message)

    def _marked(self, index: int, y: torch.Tensor) -> torch.Tensor:
        """Return an extra output whose ``requires_grad`` tells its consumer whether it needs a gradient."""
        wanted = index >= self.first and y.is_floating_point()
        return y if y.requires_grad == wanted else y.detach().requires_grad_(wanted)

    # Backward -------------------------------------------------------------------------------------

    def backward(
        self, saved: tuple[torch.Tensor | None, ...], grads: tuple[torch.Tensor | None, ...]
    ) -> tuple[Any, ...]:
        """Return the gradients of the autograd function's arguments."""
        plan, routing = self.plan, self.plan.routing
        dy, *extra = grads
        output_grads: dict[Slot, torch.Tensor | None] = dict(
            zip(routing.outputs, extra, strict=True)
        )
        input_grads: dict[Slot, torch.Tensor | None] = {}
        parameter_grads: list[tuple[Any, ...]] = [()] * len(plan.ops)
        for step in reversed(plan.backward):
            if step.indices[-1] < self.first:
                dy = None
                break
            dy = self._edge_grad(step, dy)
            run = self._python_backward if step.program is None else self._native_backward
            dy, params, inputs = run(step, saved, dy, output_grads)
            for index, own, taken in zip(step.indices, params, inputs, strict=True):
                parameter_grads[index] = own
                for number, (source, grad) in enumerate(
                    zip(routing.sources[index], taken, strict=True)
                ):
                    if source is None:
                        input_grads[index, number] = grad
                    elif grad is not None and source[0] not in step.indices:
                        former = output_grads.get(source)
                        output_grads[source] = grad if former is None else former + grad
        if self.updates_scales:
            update_scales(forward=False)
        flat = [
            grad
            for index, own in enumerate(parameter_grads)
            for grad in self._all_parameter_grads(index, own)
        ]
        dx = dy if self.input_needs_grad else None
        return (dx, None, *flat, *(input_grads.get(slot) for slot in routing.inputs))

    def _edge_grad(self, step: Step, dy: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of a step's output."""
        edge = self.edges.get(step.indices[-1])
        if edge is None:  # inside of an operation that fuses only forward
            if dy is None:
                label = self.plan.labels[step.indices[-1] + 1]
                message = f"op {label}: backward returned no gradient of its input"
                raise StateError(message)
            return dy
        if dy is not None and dy.numel() != edge[0].numel():
            label = self.plan.labels[step.indices[-1] + 1]
            message = (
                f"op {label}: backward returned a gradient of shape {list(dy.shape)} of its input of "
                f"shape {list(edge[0])}"
            )
            raise ShapeError(message)
        return _grad_of(edge, dy)

    def _all_parameter_grads(self, index: int, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        count = len(self.plan.parameters_of(index))
        if len(grads) not in (0, count):
            message = (
                f"op {self.plan.labels[index]}: backward returned {len(grads)} gradients of "
                f"parameters, the op has {count}"
            )
            raise StateError(message)
        return grads or (None,) * count

    def _native_backward(
        self,
        step: Step,
        saved: tuple[torch.Tensor | None, ...],
        dy: torch.Tensor,
        output_grads: dict[Slot, torch.Tensor | None],
    ) -> tuple[Any, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        first = step.indices[0]
        extra = tuple(
            _grad_of(self.native_outputs[slot], output_grads.get(slot))
            for slot in _output_slots(self.plan, step)
        )
        kept, tensors = self.kept[first], saved[self.saved[first]]
        if step.segment is None:
            dx, params, inputs = rows.run_backward(kept, tensors, dy, extra)
        else:
            weight = partial(getattr, self.plan.ops[first], "weight")
            quantizer = getattr(self.plan.ops[step.indices[-1]], "_quantizer_of_rows", None)
            dx, params, inputs = step.segment.backward(
                kept, tensors, dy, extra, weight, quantizer=quantizer
            )
        counts = [len(self.plan.parameters_of(index)) for index in step.indices]
        widths = [len(self.plan.routing.sources[index]) for index in step.indices]
        return dx, _split(params, counts), _split(inputs, widths)

    def _python_backward(
        self,
        step: Step,
        saved: tuple[torch.Tensor | None, ...],
        dy: torch.Tensor,
        output_grads: dict[Slot, torch.Tensor | None],
    ) -> tuple[Any, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        assert step.op is not None
        contexts = [self.contexts[index] for index in step.indices]
        for index, context in zip(step.indices, contexts, strict=True):
            context.saved_tensors = saved[self.saved[index]]
        result: Any = step.op.fuser_backward(
            contexts,
            dy,
            basic_op_grad_extra_outputs=[
                tuple(
                    output_grads.get((index, number))
                    for number in range(self.plan.routing.made[index])
                )
                for index in step.indices
            ],
        )
        for context in contexts:
            context.saved_tensors = None
        dx, *lists = _returned(result, 3, step, self.plan, "fuser_backward")
        params, inputs = (_per_op(grads, step, self.plan) for grads in lists)
        for number, index in enumerate(step.indices):
            count = len(self.plan.routing.sources[index])
            if len(inputs[number]) not in (0, count):
                message = (
                    f"op {self.plan.labels[index]}: backward returned {len(inputs[number])} gradients "
                    f"of extra inputs, the op has {count}"
                )
                raise StateError(message)
            inputs[number] = inputs[number] or (None,) * count
        return dx, params, inputs


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _returned(result: Any, count: int, step: Step, plan: Plan, method: str) -> tuple[Any, ...]:
    """Return the result of a Python operation's method; raise unless it is a tuple of the right length."""
    if isinstance(result, tuple | list) and len(result) == count:
        return tuple(result)
    got = f"{len(result)} values" if isinstance(result, tuple | list) else _named(result)
    message = (
        f"op {plan.labels[step.indices[0]]}: {type(step.op).__name__}.{method} must return {count} "
        f"values, got {got}"
    )
    raise StateError(message)


def _per_op(grads: Any, step: Step, plan: Plan) -> list[tuple[Any, ...]]:
    """Return the gradients of each basic operation; None for those that a Python operation left out."""
    found = [tuple(own or ()) for own in grads or ()]
    if len(found) > len(step.indices):
        message = (
            f"op {plan.labels[step.indices[0]]}: {type(step.op).__name__}.fuser_backward returned "
            f"gradients of {len(found)} basic ops, expected {len(step.indices)}"
        )
        raise StateError(message)
    return found + [()] * (len(step.indices) - len(found))


def _split(flat: Sequence[Any], counts: list[int]) -> list[tuple[Any, ...]]:
    parts, start = [], 0
    for count in counts:
        parts.append(tuple(flat[start : start + count]))
        start += count
    return parts
