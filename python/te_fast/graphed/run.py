"""One run: a forward of one callable, its backward and its weight gradients, as graphs."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from te_fast.errors import StateError
from te_fast.graphed import gradients
from te_fast.graphed.parameters import Parameters
from te_fast.graphed.scales import RunScales
from te_fast.runtime import native
from te_fast.runtime.autocast import autocast
from te_fast.runtime.inner_layers import drop_weight_caches

if TYPE_CHECKING:
    from te_fast.graphed.arguments import Options, Quantization
    from te_fast.graphed.inputs import Inputs
    from te_fast.graphed.memory import Left, SharedMemory
    from te_fast.graphed.recorder import Graph, Recorder
    from te_fast.graphed.skip import SkipFlag

_region = native.CurrentRegion()


@dataclass(frozen=True)
class Shared:
    """Data that all runs of one capture share."""

    options: Options
    quantization: Quantization
    recorder: Recorder
    memory: SharedMemory
    is_training: bool
    flag: SkipFlag


def waits_for_weight_gradients(module: torch.nn.Module) -> list[Any]:
    """Return the layers whose last backward has left their weight gradients to ``backward_dw``."""
    waiting = []
    for part in module.modules():
        handles = getattr(part, "_weight_handles", None)
        if handles is not None and any(handle.deferred_count() for handle in handles().values()):
            waiting.append(part)
    return waiting


class Run:
    """One forward of one callable, with its backward.

    Parameters
    ----------
    number : int
        Number of the callable among those that are captured.
    module : torch.nn.Module
        The callable.
    inputs : Inputs
        Its static inputs.
    shared : Shared
        Data that all runs share.
    """

    def __init__(
        self, number: int, module: torch.nn.Module, inputs: Inputs, shared: Shared
    ) -> None:
        self.number, self.module, self.inputs, self.shared = number, module, inputs, shared
        self.name = f"graph of {getattr(module, 'name', type(module).__name__)}"
        self.enabled = shared.quantization.enabled[number]
        self.is_training = shared.is_training
        self.parameters = Parameters(self.name, module)
        self.trained = [part for part in module.parameters() if part.requires_grad]
        self.buffers = gradients.main_grads(module) if self.is_training else []
        quantization = shared.quantization
        self.scales = RunScales(module, quantization.recipe, quantization.group)
        #: The region of the capture.
        self.epoch = 0
        self.forward_graph: Graph | None = None
        self.backward_graph: Graph | None = None
        self.weight_graph: Graph | None = None
        self.forward_step = self.backward_step = self.weight_step = 0
        #: The last step that reads tensors of the forward.
        self.last_step = 0
        # The results of the last forward, with their autograd graph.
        self._live: list[Any] = []
        self._reenters = False
        self.outputs: list[Any] = []
        self.output_spec: Any = None
        self.has_one_output = False
        #: For each output: whether it has a gradient.
        self.wanted: list[bool] = []
        self.output_grads: list[torch.Tensor] = []
        self.input_grads: list[torch.Tensor | None] = []
        #: Parameters that get a gradient from the backward, with the gradient.
        self.surface: list[torch.nn.Parameter] = []
        self.surface_grads: list[torch.Tensor] = []
        #: For each of them, whether its caller gets a copy.
        self.is_cloned: list[bool] = []
        #: Parameters that get a gradient from ``backward_dw``, with the gradient.
        self.later_grads: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        #: The layers whose ``backward_dw`` computes these gradients.
        self.delaying: list[Any] = []
        #: Layers whose weight gradients backwards have left to ``backward_dw``.
        self.waiting: deque[Left] = deque()
        #: Parameters whose gradient a layer adds to ``main_grad``, by graph.
        self.added: list[torch.nn.Parameter] = []
        self.added_later: list[torch.nn.Parameter] = []
        self.addresses = [(buffer, buffer.grad.data_ptr()) for buffer in self.buffers]

    # The captured functions -----------------------------------------------------------------------------

    def _differentiated(self) -> list[torch.Tensor]:
        """Return the tensors that the backward computes gradients of: inputs, then parameters."""
        return [tensor for tensor in self.inputs.tensors if tensor.requires_grad] + self.trained

    def run_forward(self) -> list[Any]:
        """Call the callable in its region."""
        quantization = self.shared.quantization
        region = autocast(
            enabled=bool(self.enabled),
            calibrating=quantization.calibrating,
            recipe=quantization.recipe,
            amax_reduction_group=quantization.group,
            _graph=True,
        )
        args, kwargs = self.inputs.arguments()
        with torch.set_grad_enabled(self.is_training), region:
            self.epoch = _region.epoch
            outputs = self.module(*args, **kwargs)
        self._live, self.output_spec = tree_flatten(outputs)
        self.has_one_output = isinstance(outputs, torch.Tensor)
        return self._live

    def run_backward(self) -> list[torch.Tensor | None]:
        """Differentiate the last result of :meth:`run_forward`."""
        outputs = [output for output, wanted in zip(self._live, self.wanted, strict=True) if wanted]
        inputs, retain = self._differentiated(), self.shared.options.retain_graph
        if not self._reenters:
            grads = torch.autograd.grad(
                outputs, inputs, self.output_grads, retain_graph=retain, allow_unused=True
            )
            return list(grads)
        with gradients.put_aside(inputs):
            torch.autograd.backward(outputs, self.output_grads, retain_graph=retain)
            return [tensor.grad for tensor in inputs]

    def run_weight_gradients(self) -> list[torch.Tensor | None]:
        """Compute the weight gradients that the last backward has left."""
        with gradients.put_aside(self.trained):
            for layer in reversed(waits_for_weight_gradients(self.module)):
                layer.backward_dw()
            return [parameter.grad for parameter in self.trained]

    # Warm-up and capture --------------------------------------------------------------------------

    def warm_up(self, kind: str) -> None:
        """Run a step without capturing it."""
        self._around_forward() if kind == "forward" else self._around_backward(kind, captures=False)

    def capture(self, kind: str, step: int) -> None:
        """Capture a step."""
        if kind == "forward":
            self.forward_step = step
            self._around_forward(captures=True)
        elif self.is_training:
            self._around_backward(kind, captures=True)
            if kind == "backward":
                self.backward_step = step
            elif self.weight_graph is not None:
                self.weight_step = step

    def _around_forward(self, *, captures: bool = False) -> None:
        options, recorder = self.shared.options, self.shared.recorder
        options.run_hooks(self.number, "forward_pre_hooks", self.module)
        if captures:
            with self.scales.noting(forward=True):
                self.forward_graph, outputs = recorder.capture(self.run_forward)
        else:
            outputs = self.run_forward()
        options.run_hooks(self.number, "forward_hooks", self.module)
        self.wanted = [
            isinstance(output, torch.Tensor) and output.requires_grad for output in outputs
        ]
        self.outputs = [
            output.detach() if isinstance(output, torch.Tensor) else output for output in outputs
        ]

    def _around_backward(self, kind: str, *, captures: bool) -> None:
        if kind == "weight gradients":
            self._weight_gradients(captures=captures)
        elif any(self.wanted):
            self._backward(captures=captures)

    def _backward(self, *, captures: bool) -> None:
        options, recorder = self.shared.options, self.shared.recorder
        if not captures:
            self.use_output_grads({})
        options.run_hooks(self.number, "backward_pre_hooks", self.module)
        with gradients.untouched(self.buffers) as added:
            if captures:
                with self.scales.noting(forward=False):
                    self.backward_graph, grads = recorder.capture(self.run_backward)
            else:
                grads = self._warm_up_backward()
        options.run_hooks(self.number, "backward_hooks", self.module)
        self.added = [parameter for parameter in self.trained if id(parameter) in added]
        self._sort(grads)

    def _warm_up_backward(self) -> list[torch.Tensor | None]:
        """Differentiate, and find out whether the callable works with ``torch.autograd.grad``.

        ``torch.autograd.grad`` runs no hooks of parameters, which may step an optimizer or start a collective.
        Reentrant checkpoints refuse it.
        """
        try:
            return self.run_backward()
        except RuntimeError as error:
            if self._reenters or "use_reentrant" not in str(error):
                raise
        self._reenters = True
        while waits_for_weight_gradients(self.module):
            self.run_weight_gradients()
        self.run_forward()
        return self.run_backward()

    def _sort(self, grads: list[torch.Tensor | None]) -> None:
        """Separate the gradients of inputs from those of parameters; parameters without a gradient are left out."""
        by_input = iter(grads)
        self.input_grads = [
            next(by_input) if tensor.requires_grad else None for tensor in self.inputs.tensors
        ]
        pairs = [
            (parameter, grad)
            for parameter, grad in zip(self.trained, by_input, strict=True)
            if grad is not None
        ]
        self.surface = [parameter for parameter, _ in pairs]
        self.surface_grads = [grad for _, grad in pairs]
        clones, added = self.shared.options.clone_param_grads, {id(part) for part in self.added}
        self.is_cloned = [
            # A gradient that a layer has added to main_grad gets a stand-in. A gradient that a hook collects is read at
            # once.
            clones and not (id(part) in added or getattr(part, "skip_backward_post_hook", False))
            for part in self.surface
        ]
        for tensor, grad in zip(self.inputs.tensors, self.input_grads, strict=True):
            if tensor.requires_grad and grad is None and not self.shared.options.allow_unused_input:
                message = (
                    f"make_graphed_callables: an input of {self.name} requires gradients and gets none; pass "
                    "allow_unused_input=True, or a sample that requires none"
                )
                raise StateError(message)

    def _weight_gradients(self, *, captures: bool) -> None:
        layers = waits_for_weight_gradients(self.module)
        if not layers:
            return
        recorder = self.shared.recorder
        with gradients.untouched(self.buffers) as added:
            if captures:
                self.weight_graph, grads = recorder.capture(self.run_weight_gradients)
            else:
                grads = self.run_weight_gradients()
        self.delaying = layers
        self.added_later = [parameter for parameter in self.trained if id(parameter) in added]
        pairs = zip(self.trained, grads, strict=True)
        self.later_grads = [(parameter, grad) for parameter, grad in pairs if grad is not None]

    # Static memory --------------------------------------------------------------------------------

    def use_output_grads(self, known: dict[Any, list[torch.Tensor]]) -> None:
        """Make the static gradients of the outputs, or take those of `known` with the same shape and type."""
        outputs = [
            output for output, wanted in zip(self.outputs, self.wanted, strict=True) if wanted
        ]
        key = tuple((output.shape, output.dtype, output.layout) for output in outputs)
        if key not in known:
            known[key] = [torch.zeros_like(output) for output in outputs]
        self.output_grads = known[key]

    @property
    def delays_weight_gradients(self) -> bool:
        """Whether a layer within leaves weight gradients to ``backward_dw``."""
        return bool(self.delaying)

    def forget_weights(self) -> None:
        """Drop the quantised weights of warm-ups, which a graph that quantises its own does not read."""
        drop_weight_caches(self.module, of_graphs=False)

    def forget_autograd(self) -> None:
        """Drop the autograd graph: its memory is free for the captures that follow."""
        self._live = []

    def release(self, *, inputs: bool = False, outputs: bool = False) -> None:
        """Let later captures use the memory of results that are no longer needed."""
        weak = self.shared.recorder.weak
        if inputs:
            self.input_grads = [grad if grad is None else weak(grad) for grad in self.input_grads]
        if outputs:
            self.outputs = [
                weak(output) if isinstance(output, torch.Tensor) else output
                for output in self.outputs
            ]
            if self.shared.options.clone_param_grads:
                self.surface_grads = weak(self.surface_grads)

    def finish(self) -> None:
        """Note, after all captures, how long tensors of a forward are read, and which parameters."""
        self.parameters.note()
        if self.shared.options.retain_graph:
            self.last_step = sys.maxsize
        else:
            self.last_step = max(self.backward_step, self.weight_step)
            self.forget_autograd()

    def reset(self) -> None:
        """Free the graphs and their static memory."""
        for graph in (self.forward_graph, self.backward_graph, self.weight_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = self.weight_graph = None
        self._live, self.outputs, self.output_grads = [], [], []
        self.input_grads, self.surface, self.surface_grads, self.later_grads = [], [], [], []
