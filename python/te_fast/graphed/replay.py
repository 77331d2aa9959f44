"""Calls of captured modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_unflatten

from te_fast.errors import StateError
from te_fast.graphed.arguments import GRAPHED
from te_fast.graphed.gradients import check_main_grads
from te_fast.graphed.inputs import is_first_microbatch, take_stream
from te_fast.graphed.memory import Left
from te_fast.graphs.stand_ins import stays_outside
from te_fast.runtime import native
from te_fast.runtime.delayed import update_scales
from te_fast.runtime.global_state import autocast_state
from te_fast.runtime.second_order import differentiable_once

if TYPE_CHECKING:
    from te_fast.graphed.recorder import Graph
    from te_fast.graphed.run import Run

_region = native.CurrentRegion()


class _Call:
    """One call of a graph, with the facts that its backward needs."""

    __slots__ = ("event", "is_first", "left", "run", "stream")

    def __init__(self, run: Run, left: Left, stream: Any, event: Any) -> None:
        self.run, self.left, self.stream, self.event = run, left, stream, event
        #: Whether its backward is the region's last, which updates the scales.
        self.is_first = False


def _replay(graph: Graph, stream: Any, event: Any) -> None:
    """Replay a graph on the caller's stream, ordered with earlier and later work on the current stream."""
    if stream is None:
        graph.replay()
        return
    current = torch.cuda.current_stream()
    if stream == current:
        graph.replay()
        return
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.replay()
    if event is None:
        current.wait_stream(stream)
    else:
        current.wait_event(event)


def _copy_into(static: list[torch.Tensor], tensors: Any) -> None:
    for to, tensor in zip(static, tensors, strict=True):
        if to.data_ptr() != tensor.data_ptr():
            to.copy_(tensor)


class Graphed(torch.autograd.Function):
    """The node of a replayed forward: its backward replays the captured one."""

    @staticmethod
    def forward(ctx: Any, call: _Call, _anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        """Replay the forward; `tensors` are the inputs, and the parameters that get gradients."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = _forward(call, tensors[: len(call.run.inputs.tensors)])
        call.run.shared.memory.leave(call.left)
        without = [
            output
            for output, wanted in zip(outputs, call.run.wanted, strict=True)
            if not wanted and isinstance(output, torch.Tensor)
        ]
        ctx.mark_non_differentiable(*without)
        return tuple(outputs)

    @staticmethod
    @differentiable_once(lambda ctx: ctx.call.run.name)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Replay the backward."""
        call: _Call = ctx.call
        run = call.run
        _check_left(run, call.left)
        check_main_grads(run.name, run.addresses)
        wanted = [grad for grad, is_wanted in zip(grads, run.wanted, strict=True) if is_wanted]
        for to, grad in zip(run.output_grads, wanted, strict=True):
            if grad is None:
                to.zero_()
            elif to.data_ptr() != grad.data_ptr():
                to.copy_(grad)
        assert run.backward_graph is not None  # since _check_left has seen that it was not reset
        _replay(run.backward_graph, call.stream, call.event)
        memory = run.shared.memory
        memory.replayed(run.backward_step, run.name)
        if run.weight_graph is not None:
            run.waiting.append(call.left)
        elif not run.shared.options.retain_graph:
            call.left.by = "its own backward"
            memory.forget(call.left)
        for parameter in run.added:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        run.scales.mark_ran(forward=False)
        if call.is_first:
            update_scales(forward=False)
        return (None, None, *_returned(run))


def _returned(run: Run) -> list[torch.Tensor | None]:
    """Return the gradients of the inputs and of the parameters for autograd."""
    grads = [grad if grad is None else grad.detach() for grad in run.input_grads]
    for grad, is_cloned in zip(run.surface_grads, run.is_cloned, strict=True):
        grads.append(grad.detach().clone() if is_cloned else grad.detach())
    return grads


def _check_left(run: Run, left: Left) -> None:
    if run.forward_graph is None:
        message = f"{run.name}: reset() has freed it; capture once more"
        raise StateError(message)
    if left.by == "its own backward":
        message = (
            f"{run.name}: a second backward reads what the first has freed; capture with "
            f"retain_graph_in_backward=True"
        )
        raise StateError(message)
    if left.by is not None:
        message = (
            f"{run.name}: what its forward left for this backward was overwritten by {left.by}; graphs that "
            "share memory "
            "are replayed in the order of their capture. Several forwards before their backwards need a graph each "
            "(_order)"
        )
        raise StateError(message)


def _forward(call: _Call, tensors: Any) -> list[Any]:
    """Replay a forward on inputs; its outputs, which the next replay overwrites."""
    run = call.run
    assert run.forward_graph is not None  # the call has checked this
    _copy_into(run.inputs.tensors, tensors)
    _replay(run.forward_graph, call.stream, call.event)
    run.shared.memory.replayed(run.forward_step, run.name)
    run.scales.mark_ran(forward=True)
    return [
        output.detach() if isinstance(output, torch.Tensor) else output for output in run.outputs
    ]


class GraphedCallable:
    """A callable that replays graphs.

    Calls take the arguments of the samples, and ``is_first_microbatch`` if quantised weights are cached. They also take
    ``cuda_graph_stream``, the stream to replay on, and ``cuda_graph_event``, which the current stream then waits for.

    Parameters
    ----------
    run : Run
        The captured run.
    original : callable
        The module's own forward.
    """

    def __init__(self, run: Run, original: Callable[..., Any]) -> None:
        self._run = run
        self._original = original
        self._anchor = torch.zeros((), requires_grad=run.is_training)
        #: Restores the module's own methods.
        self._on_reset: Callable[[], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the forward; if the module's mode is not that of the capture, call the module itself.

        Raises
        ------
        StateError
            If submodules, parameters or buffers were replaced or moved, a frozen parameter trains now, the region is
            another one, or the graphs were reset.
        ArgumentError, ShapeError, DtypeError, DeviceError
            If the arguments are unlike the samples.
        """
        run = self._run
        if run.module.training != run.is_training:
            return self._original(*args, **kwargs)
        if run.forward_graph is None:
            message = f"{run.name}: reset() has freed it; capture once more"
            raise StateError(message)
        self._check_region()
        caches = run.shared.quantization.caches_weights
        is_first = is_first_microbatch(run.name, kwargs) if caches else False
        stream, event = take_stream(kwargs)
        tensors = run.inputs.of_call(args, kwargs, caches_weights=caches)
        with_grad = torch.is_grad_enabled()
        run.parameters.check(wants_gradients=with_grad and run.is_training)
        run.scales.prepare()
        if caches:
            run.shared.flag.set(not is_first)
        call = _Call(run, Left(run.forward_step, run.last_step), stream, event)
        outputs = self._with_node(call, tensors) if with_grad else _forward(call, tensors)
        return outputs[0] if run.has_one_output else tree_unflatten(outputs, run.output_spec)

    def _with_node(self, call: _Call, tensors: list[torch.Tensor]) -> Any:
        run = call.run
        if run.backward_graph is None:
            if any(tensor.requires_grad for tensor in tensors):
                message = (
                    f"{run.name}: captured without a backward, since the module did not train or no output requires "
                    "gradients; call it under torch.no_grad(), or with inputs that require none"
                )
                raise StateError(message)
            return _forward(call, tensors)
        if run.scales.backward:
            call.is_first = bool(native.autocast_take_first())
        return Graphed.apply(call, self._anchor, *tensors, *run.surface)

    def _check_region(self) -> None:
        run = self._run
        epoch = _region.epoch
        if run.epoch != 0:
            if epoch == run.epoch:
                return
            recipe = run.shared.quantization.recipe
            here = autocast_state.fp8_recipe if epoch else "no region that quantises"
            message = (
                f"{run.name}: captured under {recipe}, called under {here}; call it in te.autocast with the recipe and "
                "group that it was captured with, or capture it once more"
            )
            raise StateError(message)
        if run.enabled is None and _region.enabled:
            message = (
                f"{run.name}: captured without low precision, called in a region that quantises; capture it with "
                "enabled=True and the recipe, or with enabled=False to say that it never quantises"
            )
            raise StateError(message)

    def backward_dw(self) -> None:
        """Replay the weight gradients that the last backward has left, and run the layers' hooks.

        Raises
        ------
        StateError
            If no backward has left any, or their inputs were overwritten.
        """
        run = self._run
        if run.weight_graph is None:
            return
        if not run.waiting:
            message = f"{run.name}: backward_dw() was called without a backward before it"
            raise StateError(message)
        left = run.waiting.popleft()
        _check_left(run, left)
        check_main_grads(run.name, run.addresses)
        run.weight_graph.replay()
        run.shared.memory.replayed(run.weight_step, run.name)
        run.shared.memory.forget(left)
        clones = run.shared.options.clone_param_grads
        for parameter in run.added_later:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        for parameter, grad in run.later_grads:
            if parameter.grad is None:
                parameter.grad = grad.detach().clone() if clones else grad.detach()
            else:
                parameter.grad += grad
        for layer in run.delaying:
            layer._trigger_wgrad_accumulation_and_reduce_hooks()

    def reset(self) -> None:
        """Free the graphs and their memory; a module is then called as before its capture."""
        self._run.reset()
        if self._on_reset is not None:
            self._on_reset()

    def replaces_forward(self) -> None:
        """Let the module's calls replay."""
        module = self._run.module
        attributes = ("forward", "backward_dw", "reset", GRAPHED)
        former = {name: module.__dict__[name] for name in attributes if name in module.__dict__}

        def put_back() -> None:
            for name in attributes:
                module.__dict__.pop(name, None)
            module.__dict__.update(former)
            self._on_reset = None

        self._on_reset = put_back
        values = (self, self.backward_dw, self.reset, True)
        module.__dict__.update(zip(attributes, values, strict=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would replay the graphs of the original."""
        message = (
            f"{self._run.name}: graphs cannot be copied; reset() the module first, and capture the copy for "
            "itself"
        )
        raise StateError(message)

    def __reduce__(self) -> NoReturn:
        """Refuse: graphs cannot be saved."""
        message = f"{self._run.name}: graphs cannot be pickled; reset() the module first, or save its state_dict()"
        raise StateError(message)


stays_outside(
    GraphedCallable,
    "__call__",
    "it replays graphs of make_graphed_callables, which compiled code calls from outside of its own",
)
