"""Groups of operations: fusions, plans, and the choice between the native program and Python."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from te_fast.errors import (
    ArgumentError,
    DtypeError,
    StateError,
    TeFastError,
    UnsupportedError,
)
from te_fast.graphs.refusal import Problem, problem_of
from te_fast.ops import chain, traced
from te_fast.ops.common import (
    GRAD_INPUT_BUFFER_KEY,
    NATIVE_TYPES,
    OUTPUT_BUFFER_KEY,
    autocast_dtype,
)
from te_fast.ops.op import BasicOperation, FusedOperation, FusibleOperation
from te_fast.ops.plan import Plan, Types, make_plan, match
from te_fast.ops.routing import Routing
from te_fast.recipe import Recipe
from te_fast.runtime import native, scale_tape
from te_fast.runtime.caller_memory import check_buffer, gradient_in, result_in
from te_fast.runtime.compiling import behind, is_traced
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.runtime.parameters import needed_parameter
from te_fast.runtime.support import get_default_recipe
from te_fast.tensor.answers import LinearRoles
from te_fast.tensor.of_factory import own_region
from te_fast.tensor.primary import as_read, is_quantized
from te_fast.tensor.storage import QuantizedTensorStorage

#: ``func(ops, *, recipe) -> ops``: may replace runs of operations by fused ones.
FusionFunction = Callable[..., list[FusibleOperation]]

_fusers: WeakSet[OperationFuser] = WeakSet()


class _Running(threading.local):
    """Groups whose forward is running in a thread, the innermost last."""

    def __init__(self) -> None:
        self.groups: list[OperationFuser] = []


_running = _Running()
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def flatten(ops: Sequence[FusibleOperation], names: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Return the basic operations of a list, and their positions and types for messages."""
    basic: list[Any] = []
    labels: list[str] = []
    for op, name in zip(map(behind, ops), names, strict=True):
        if isinstance(op, FusedOperation):
            parts = op._parts()
            inner, inner_labels = flatten(parts, [f"{name}.{i}" for i in range(len(parts))])
            basic += inner
            labels += inner_labels
        else:
            basic.append(op)
            labels.append(f"{name}: {type(op).__name__}")
    return basic, labels


class OperationFuser:
    """Run adjacent operations as one, with one autograd node.

    Native operations are compiled into programs, and the others run in Python between these.

    Parameters
    ----------
    ops : list of FusibleOperation
        The operations, in order.
    names : list of str, optional
        Their positions, for messages.

    See Also
    --------
    Sequential : Makes one for each group of operations.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> from te_fast.pytorch.ops.fuser import OperationFuser
    >>> OperationFuser([ops.ConstantScale(2.0), ops.ReLU()])(
    ...     torch.tensor([[-1.0, 2.0]]), basic_op_kwargs=[{}, {}]
    ... )
    tensor([[0., 4.]])
    """

    forward_backward_fusion_functions: ClassVar[list[FusionFunction]] = []
    forward_fusion_functions: ClassVar[list[FusionFunction]] = []
    backward_fusion_functions: ClassVar[list[FusionFunction]] = []

    def __init__(self, ops: list[FusibleOperation], *, names: Sequence[str] | None = None) -> None:
        names = [str(index) for index in range(len(ops))] if names is None else names
        for op, name in zip(ops, names, strict=True):
            if not isinstance(op, FusibleOperation):
                message = f"op {name}: expected a FusibleOperation, got {type(op).__name__}"
                raise ArgumentError(message)
        self._basic_ops: list[BasicOperation]
        self._basic_ops, self._labels = flatten(ops, names)
        self._name = f"ops {names[0]}-{names[-1]}" if len(names) > 1 else f"op {self._labels[0]}"
        self._refuse_removed()
        self._routing = Routing.of(self._basic_ops, self._labels)
        self._channels_stale = False
        self._plans: dict[Any, Plan] = {}
        #: Plans by the types of a call's tensors and of the parameters.
        self._chosen: dict[Any, Plan] = {}
        self._parameters = [op._parameters for op in self._basic_ops if op._parameters]
        #: The same by the types that a trace knows.
        self._traced_plans: dict[str, Plan] = {}
        #: Operations whose row counts are extra inputs from the caller, and the indices of these.
        self._counted: list[tuple[int, Any]] = [
            (place, self._basic_ops[index])
            for place, (index, number) in enumerate(self._routing.inputs)
            if number == 0 and self._basic_ops[index]._counts_rows
        ]
        #: Operations of experts, wherever their row counts come from.
        self._experts: list[Any] = [op for op in self._basic_ops if op._counts_rows]
        #: Operations whose attributes decide whether they are native, and whether they are.
        self._variable = [op for op in self._basic_ops if op._mode_names]
        self._modes = self._modes_now()
        #: A module that consists only of this group and may call its program directly.
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._ready = False
        #: Autocast region of the last forward in Python, for activation checkpointing; programs have their own.
        self._last_region: tuple[Any, ...] | None = None
        for op in self._basic_ops:
            op._captured_by(self)
        _fusers.add(self)

    @property
    def num_extra_inputs(self) -> int:
        """Extra inputs that the caller gives."""
        return len(self._routing.inputs)

    # Plans ----------------------------------------------------------------------------------------

    def _types(
        self,
        dtype: torch.dtype,
        extra_inputs: tuple[torch.Tensor, ...],
        autocast: torch.dtype | None,
    ) -> Types:
        """Return the types of an input and of each operation's result; None if all are equal."""
        types = [dtype]
        is_one = dtype in NATIVE_TYPES
        given = dict(zip(self._routing.inputs, extra_inputs, strict=True))
        for index, op in enumerate(self._basic_ops):
            extras = tuple(
                given[index, number].dtype if source is None else types[source[0]]
                for number, source in enumerate(self._routing.sources[index])
            )
            types.append(op._result_type(types[-1], extras, autocast))
            is_one = is_one and types[-1] == dtype and (not op._adds_extra or extras[0] == dtype)
        return None if is_one else tuple(types)

    def _plan(self, recipe: Recipe | None, types: Types = None) -> Plan:
        """Return how the group runs under a recipe; registered fusions may depend on its type."""
        key: tuple[Any, ...] = (types, self._modes, self._looped())
        is_custom = _is_custom()
        if is_custom:
            key += (type(recipe), getattr(recipe, "backward_override", None))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(recipe, types)
        if not is_custom and types is None and not self._experts:
            self._direct(plan.single or plan.steps)
        return plan

    def _looped(self) -> tuple[bool, ...]:
        """Tell of each operation of experts whether they run one by one: the region decides it, and tracers."""
        return tuple([op._is_looped() for op in self._experts])

    def _plan_for(
        self,
        x: torch.Tensor,
        extra_inputs: tuple[torch.Tensor, ...],
        autocast: torch.dtype | None,
        recipe: Recipe | None,
    ) -> Plan:
        """Return how the group runs on these inputs."""
        dtypes = [p.dtype for owner in self._parameters for p in owner.values() if p is not None]
        key = (self._looped(), autocast, x.dtype, *[extra.dtype for extra in extra_inputs], *dtypes)
        plan = self._chosen.get(key)
        if plan is None or plan.is_custom:
            self._refuse_removed()
            types: Types = ()
            if x.is_floating_point():
                types = self._types(x.dtype, extra_inputs, autocast)
            plan = self._chosen[key] = self._plan(recipe, types)
        return plan

    def _modes_now(self) -> tuple[bool, ...]:
        return tuple([op._is_native() for op in self._variable])

    def _mode_changed(self) -> None:
        """Check again which operations are native; the plans of other modes stay."""
        modes = self._modes_now()
        if modes != self._modes:
            self._modes = modes
            self._chosen.clear()
            self._traced_plans.clear()
            self._direct(None)

    def runs_for(self, module: torch.nn.Module) -> None:
        """Let a module that consists only of this group call the group, or its program, directly."""
        module = behind(module)
        self._module = weakref.ref(module)
        module.__dict__["_direct_call"] = self.call_directly

    def _direct(self, program: native.Program | native.ProgramSteps | None) -> None:
        module = None if self._module is None else self._module()
        if module is not None:
            module.__dict__["_direct_program"] = program

    def _refuse_removed(self) -> None:
        """Raise for an operation that lacks a parameter that it always has."""
        for op, label in zip(self._basic_ops, self._labels, strict=True):
            for name in op._needed_names:
                needed_parameter(op, name, f"op {label}", "operation")

    def _refuse_parametrized(self) -> None:
        """Raise for an operation with a parameter under ``torch.nn.utils.parametrize``: programs cannot read it."""
        for op, label in zip(self._basic_ops, self._labels, strict=True):
            computed: Any = op._modules.get("parametrizations")
            if computed is not None:
                names = ", ".join(computed)
                message = (
                    f"op {label}: torch.nn.utils.parametrize does not work on operations, got {names}; parametrize "
                    "a layer such as te_fast.pytorch.Linear instead, or take it away by remove_parametrizations"
                )
                raise UnsupportedError(message)

    def _make_plan(self, recipe: Recipe | None, types: Types) -> Plan:
        self._refuse_parametrized()
        if not self._ready:
            for op in self._basic_ops:
                op.pre_first_fuser_forward()
            self._ready = True
        kind = OperationFuser
        joint = _fused(self._basic_ops, kind.forward_backward_fusion_functions, recipe)
        forward = _fused(joint, kind.forward_fusion_functions, recipe)
        backward = _fused(joint, kind.backward_fusion_functions, recipe)
        plan = make_plan(
            self._basic_ops,
            self._labels,
            self._routing,
            match(forward, self._basic_ops, self._labels),
            match(backward, self._basic_ops, self._labels),
            types,
        )
        plan.is_custom = _is_custom()
        return plan

    def _forget(self, *, stale: bool = False) -> None:
        """Forget all plans; a stale group never runs again."""
        self._plans.clear()
        self._chosen.clear()
        self._traced_plans.clear()
        self._direct(None)
        self._channels_stale = self._channels_stale or stale

    def _last_plan(self) -> Plan:
        plans = [plan for (_, modes, *_), plan in self._plans.items() if modes == self._modes]
        return plans[-1] if plans else self._plan(None)

    def explain(self) -> str:
        """Describe the steps of each direction; compiled programs are shown with their launches."""
        return self._last_plan().explain(self._name)

    # Transformer Engine's tests look here whether a registered fusion was applied.

    @property
    def _forward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        """The operations of forward, and the basic operations that each stands for; fused ones are the user's."""
        return self._last_plan().matches(self._last_plan().forward)

    @property
    def _backward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        """The same for backward, in its order."""
        return self._last_plan().matches(self._last_plan().backward)[::-1]

    # Running --------------------------------------------------------------------------------------

    def __call__(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the group.

        Parameters
        ----------
        input : torch.Tensor
            Input. A linear operation reads an FP8 input as it is; for other operations it is dequantised. An
            IdentityTensor and a tensor of two values are always dequantised.
        *extra_inputs : torch.Tensor
            Extra inputs of the operations, in their order.
        basic_op_kwargs : list of dict, optional
            Keyword arguments of the basic operations.
        is_first_microbatch : bool, optional
            As of :class:`te_fast.pytorch.Linear`.

        Returns
        -------
        torch.Tensor or tuple
            Output; with extra outputs, and those.
        """
        if type(input) not in _PLAIN_TENSORS:
            input = as_read(input)
        if is_traced(input):
            if basic_op_kwargs and self._counted:
                basic_op_kwargs, buffers = self._without_buffers(basic_op_kwargs)
                if any([buffer is not None for buffer in buffers]):
                    message = f"{self._name}: a graph allocates its memory; leave output and grad_input out"
                    raise UnsupportedError(message)
            return traced.run(self, input, extra_inputs, basic_op_kwargs, is_first_microbatch)
        self._check(input, extra_inputs, basic_op_kwargs)
        if extra_inputs:
            extra_inputs = tuple(
                [
                    extra.dequantize() if isinstance(extra, QuantizedTensorStorage) else extra
                    for extra in extra_inputs
                ]
            )
        if is_first_microbatch is not None:
            is_first_microbatch = bool(is_first_microbatch)
        return self._start(input, extra_inputs, basic_op_kwargs, is_first_microbatch)

    def call_directly(
        self,
        input: torch.Tensor,
        extra_inputs: tuple[torch.Tensor, ...],
        is_first_microbatch: bool | None,
    ) -> Any:
        """Run for a module that consists only of this group; the native call has checked that it has no hooks.

        Tensors are plain.
        """
        if (
            self._channels_stale
            or len(extra_inputs) != self.num_extra_inputs
            or _are_functorch_transforms_active()
        ):
            assert self._module is not None
            module: Any = self._module()
            return module.forward(input, *extra_inputs, is_first_microbatch=is_first_microbatch)
        return self._start(input, extra_inputs, None, is_first_microbatch)

    def _start(
        self,
        input: torch.Tensor,
        extra_inputs: tuple[torch.Tensor, ...],
        basic_op_kwargs: list[dict[str, Any]] | None,
        is_first_microbatch: bool | None,
    ) -> Any:
        """Run in the current region, or in the region that a recomputation repeats."""
        arguments = (input, extra_inputs, basic_op_kwargs, is_first_microbatch)
        own = own_region(self)
        if own is not None:
            with own:
                return self._run(*arguments, native.autocast_region())
        region, last = native.autocast_region(), self._last_region
        if last is not None and scale_tape.is_outside():
            if torch._C._current_graph_task_id() >= 0:
                with scale_tape.recorded_region(last):
                    return self._run(*arguments, native.autocast_region())
            self._last_region = None
        return self._run(*arguments, region)

    def _run(
        self,
        input: torch.Tensor,
        extra_inputs: tuple[torch.Tensor, ...],
        basic_op_kwargs: list[dict[str, Any]] | None,
        is_first_microbatch: bool | None,
        region: tuple[Any, ...],
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self._counted:
            extra_inputs = self._with_counts(input, extra_inputs)
        recipe = objects = None
        if region[0]:
            objects = native.autocast_objects()
            recipe = objects[0] or get_default_recipe()
        autocast = None
        if _is_any_autocast_enabled():
            autocast = autocast_dtype(input)
        plan = self._plan_for(input, extra_inputs, autocast, recipe)
        buffers = None
        if basic_op_kwargs and self._counted:
            basic_op_kwargs, (output, grad_input) = self._without_buffers(basic_op_kwargs)
            if output is not None or grad_input is not None:
                self._check_buffers(input, output, grad_input)
                if plan.single is None or basic_op_kwargs:
                    given = (extra_inputs, basic_op_kwargs, is_first_microbatch, region)
                    return self._run_and_copy(input, output, grad_input, given)
                buffers = native.Buffers(output, grad_input)
        if plan.native is not None and not basic_op_kwargs:
            arguments = (
                self,
                plan,
                input,
                extra_inputs,
                is_first_microbatch,
                recipe,
                region[5],
                buffers,
            )
            if autocast is None:
                return chain.run_native(*arguments)
            # The plan has the casts.
            with torch.autocast(input.device.type, enabled=False):
                return chain.run_native(*arguments)
        if _running.groups:
            self._refuse_nesting()
        self._last_region = None
        if objects is not None:
            enabled, calibrating, graph, is_first, *_ = region
            self._last_region = (enabled, calibrating, *objects, is_first, graph)
        _running.groups.append(self)
        try:
            call = chain.Call(self, plan, basic_op_kwargs, is_first_microbatch, recipe)
            return call.run(input, extra_inputs, region[5])
        finally:
            _running.groups.pop()

    def _with_counts(
        self, x: torch.Tensor, extra_inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the extra inputs, with the counts of experts' rows in the programs' type."""
        extras = list(extra_inputs)
        for place, op in self._counted:
            extras[place] = op._counts_of_rows(extras[place], x)
        return tuple(extras)

    def _without_buffers(
        self, basic_op_kwargs: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]] | None, tuple[Any, Any]]:
        """Return the keyword arguments that are left, and the caller's memory for result and input gradient.

        Raises
        ------
        UnsupportedError
            If the memory is for a tensor inside of the group.
        """
        rest = [dict(kwargs) for kwargs in basic_op_kwargs]
        found: dict[str, Any] = {}
        places = {OUTPUT_BUFFER_KEY: len(rest) - 1, GRAD_INPUT_BUFFER_KEY: 0}
        for index, (op, kwargs) in enumerate(zip(self._basic_ops, rest, strict=True)):
            for key, place in places.items() if op._counts_rows else ():
                buffer = kwargs.pop(key, None)
                if buffer is None:
                    continue
                if index != place:
                    message = (
                        f"op {self._labels[index]}: {key} is memory for a tensor inside of {self._name}, which has no "
                        "memory of its own there; leave it out"
                    )
                    raise UnsupportedError(message)
                found[key] = buffer
        buffers = found.get(OUTPUT_BUFFER_KEY), found.get(GRAD_INPUT_BUFFER_KEY)
        return (rest if any(rest) else None), buffers

    def _check_buffers(
        self,
        x: torch.Tensor,
        output: Any,
        grad_input: Any,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Check the caller's memory; a program checks its type, so that `dtype` is None for one."""
        rows = x.shape[:-1]
        for key, buffer, place, name in (
            (OUTPUT_BUFFER_KEY, output, -1, "out_features"),
            (GRAD_INPUT_BUFFER_KEY, grad_input, 0, "in_features"),
        ):
            if buffer is not None:
                size = getattr(self._basic_ops[place], name)
                shapes = ((*rows, size), (rows.numel(), size))
                check_buffer(f"op {self._labels[place]}", key, buffer, shapes, dtype, x)

    def _run_and_copy(
        self, x: torch.Tensor, output: Any, grad_input: Any, given: tuple[Any, ...]
    ) -> Any:
        """Run a group that is not one program, and copy its result and the input's gradient."""
        if grad_input is not None:
            self._check_buffers(x, None, grad_input, x.dtype)
            x = gradient_in(x, grad_input)
        result = self._run(x, *given)
        if output is None:
            return result
        y, *others = result if isinstance(result, tuple) else (result,)
        self._check_buffers(x, output, None, y.dtype)
        y = result_in(y, output)
        return (y, *others) if others else y

    @property
    def is_running(self) -> bool:
        """Whether a forward of the group is running in this thread."""
        return self in _running.groups

    def _refuse_nesting(self) -> None:
        """Raise if an operation is already running in a forward of a group."""
        for group in _running.groups:
            for op, label in zip(self._basic_ops, self._labels, strict=True):
                if any(op is other for other in group._basic_ops):
                    message = (
                        f"op {label}: its group {self._name} was called from an operation of "
                        f"{group._name}, which has it too and is running"
                    )
                    raise StateError(message)

    def _refuse_stale(self) -> None:
        if self._channels_stale:
            message = (
                f"{self._name}: extra tensor channels changed after the group was made; make a new "
                "OperationFuser or Sequential"
            )
            raise StateError(message)

    def _check(
        self,
        x: Any,
        extra_inputs: tuple[Any, ...],
        basic_op_kwargs: list[dict[str, Any]] | None,
    ) -> None:
        """Check the arguments before anything runs."""
        self._refuse_stale()
        if len(extra_inputs) != self.num_extra_inputs:
            takers = ", ".join(self._labels[index] for index, _ in self._routing.inputs) or "none"
            message = (
                f"{self._name}: expected {self.num_extra_inputs} extra inputs ({takers}), "
                f"got {len(extra_inputs)}"
            )
            raise ArgumentError(message)
        for what, tensor in (("input", x), *(("extra input", extra) for extra in extra_inputs)):
            if not isinstance(tensor, torch.Tensor):
                message = (
                    f"{self._name}: the {what} must be a torch.Tensor, got {type(tensor).__name__}"
                )
                raise DtypeError(message)
        if not (type(x) in _PLAIN_TENSORS or is_quantized(x)) or _are_functorch_transforms_active():
            message = (
                f"{self._name}: tensor subclasses and torch.func transforms do not work in ops, got "
                f"{type(x).__name__}"
            )
            raise UnsupportedError(message)
        if basic_op_kwargs:
            self._check_kwargs(basic_op_kwargs)

    def _check_kwargs(self, basic_op_kwargs: list[dict[str, Any]]) -> None:
        if len(basic_op_kwargs) != len(self._basic_ops):
            message = (
                f"{self._name}: expected keyword arguments of {len(self._basic_ops)} basic ops, "
                f"got {len(basic_op_kwargs)}"
            )
            raise ArgumentError(message)
        for op, label, kwargs in zip(self._basic_ops, self._labels, basic_op_kwargs, strict=True):
            unknown = [name for name in kwargs if not _takes(op, name)]
            if unknown:
                message = f"op {label} takes no keyword argument {', '.join(sorted(unknown))}"
                raise ArgumentError(message)

    def _is_like(self, other: OperationFuser) -> bool:
        """Tell whether another group has operations of the same kinds, labels and modes."""
        mine, theirs = ([type(op) for op in fuser._basic_ops] for fuser in (self, other))
        return (
            (self._modes, self._labels) == (other._modes, other._labels)
            and mine == theirs
            and not other._channels_stale
            and (other._ready or not any(map(_waits_for_call, other._basic_ops)))
        )

    def _prepare_traced(self, *arguments: Any) -> Problem | None:
        """Plan this group for a trace, and those that are like it: one without a plan would not fit the graph.

        Returns the error of this group, if there is one.
        """
        try:
            traced.prepare(self, *arguments)
        except TeFastError as error:
            return problem_of(error)
        for other in list(_fusers):
            if other is not self and self._is_like(other):
                with contextlib.suppress(TeFastError):  # its own call raises it
                    traced.prepare(other, *arguments)
        return None

    _prepare_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _state_name(self) -> str:
        return self._name

    def _linear_roles(self) -> list[LinearRoles]:
        """Return what a CustomRecipe's factory is asked for each linear operation, or for `Quantize` without one."""
        asked = [roles for op in self._basic_ops for roles in op._linear_roles()]
        return [roles for roles in asked if roles.weight.module_type] or asked[:1]

    def _init_delayed_scaling(self) -> None:
        """Register scales with the dispatcher; it calls this when the autocast region is new."""
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        epoch = native.autocast_region()[5]
        for op in self._basic_ops:
            op._init_scales(recipe, epoch)


FusibleOperation._make_fuser = OperationFuser


def _waits_for_call(op: BasicOperation) -> bool:
    """Tell whether the first forward of an operation is to do more: make parameters, or what users' classes do."""
    own = type(op).pre_first_fuser_forward
    return not own.__module__.startswith("te_fast.") or any(
        parameter is not None and parameter.is_meta for parameter in op._parameters.values()
    )


def _is_custom() -> bool:
    """Tell whether users have registered fusions."""
    kind = OperationFuser
    return bool(
        kind.forward_backward_fusion_functions
        or kind.forward_fusion_functions
        or kind.backward_fusion_functions
    )


def _takes(op: BasicOperation, name: str) -> bool:
    """Tell whether an operation's forward takes a keyword argument; te_fast's own operations take none."""
    own = type(op)
    overrides = own.fuser_forward is not BasicOperation.fuser_forward
    method = own.fuser_forward if overrides else own.op_forward
    if op._counts_rows:
        return name in (OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY)
    if method.__module__.startswith(f"{__package__}."):
        return False
    if overrides:
        return True  # it reads basic_op_kwargs itself
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    return name in parameters and name not in ("self", "ctx", "input_")


def _fused(
    ops: Sequence[FusibleOperation], functions: list[FusionFunction], recipe: Recipe | None
) -> list[FusibleOperation]:
    fused = list(ops)
    for function in functions:
        fused = function(fused, recipe=recipe)
    return fused


def _register(functions: list[FusionFunction], function: FusionFunction, *, first: bool) -> None:
    functions.insert(0 if first else len(functions), function)
    for fuser in _fusers:
        fuser._forget()


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion whose operation has both ``fuser_forward`` and ``fuser_backward``.

    Its backward may use tensors that its forward kept. These fusions come before the fusions of one direction.

    Parameters
    ----------
    op_fusion_func : Callable
        ``func(ops, *, recipe) -> ops``; may replace runs of basic operations by
        :class:`FusedOperation` objects.
    prepend : bool, default = False
        Apply it before the fusions that were registered earlier, not after.

    See Also
    --------
    register_forward_fusion : For another direction.
    FusedOperation : Base of the operations that a fusion returns.

    Examples
    --------
    >>> from te_fast.pytorch import ops
    >>> def nothing_to_fuse(operations, **options):
    ...     return operations
    >>> ops.register_forward_backward_fusion(nothing_to_fuse)  # doctest: +SKIP
    """
    _register(OperationFuser.forward_backward_fusion_functions, op_fusion_func, first=prepend)


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion of forward: its ``fuser_forward`` keeps the tensors that the basic operations would keep.

    Parameters
    ----------
    op_fusion_func, prepend
        As of :func:`register_forward_backward_fusion`.

    See Also
    --------
    register_backward_fusion : For another direction.
    FusedOperation : Base of the operations that a fusion returns.

    Examples
    --------
    >>> from te_fast.pytorch import ops
    >>> def nothing_to_fuse(operations, **options):
    ...     return operations
    >>> ops.register_forward_fusion(nothing_to_fuse)  # doctest: +SKIP
    """
    _register(OperationFuser.forward_fusion_functions, op_fusion_func, first=prepend)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion of backward: its ``fuser_backward`` reads the tensors that the basic operations kept.

    Parameters
    ----------
    op_fusion_func, prepend
        As of :func:`register_forward_backward_fusion`.

    See Also
    --------
    register_forward_fusion : For another direction.
    FusedOperation : Base of the operations that a fusion returns.

    Examples
    --------
    >>> from te_fast.pytorch import ops
    >>> def nothing_to_fuse(operations, **options):
    ...     return operations
    >>> ops.register_backward_fusion(nothing_to_fuse)  # doctest: +SKIP
    """
    _register(OperationFuser.backward_fusion_functions, op_fusion_func, first=prepend)
