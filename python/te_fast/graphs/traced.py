"""A program in graphs: its number, and the calls of it that were traced."""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch

from te_fast.errors import StateError
from te_fast.runtime import native
from te_fast.runtime.compiling import is_in_graph

if TYPE_CHECKING:
    from collections.abc import Callable

_Key = torch._C._TorchDispatchModeKey
_TRACERS = (_Key.FAKE, _Key.PROXY, _Key.FUNCTIONAL)
_numbers = itertools.count(1)
#: Programs by the numbers and by the addresses of their handles.
_by_number: WeakValueDictionary[int, Traced] = WeakValueDictionary()
_by_address: WeakValueDictionary[int, Traced] = WeakValueDictionary()


class Facts(NamedTuple):
    """What Python needs of a traced call; its own types are those that a trace takes for constants."""

    call: native.TracedCall
    #: Columns of output and extra outputs.
    widths: tuple[int, ...]
    #: Bytes of what backward needs of no rows, of each step of rows, and the rows of a step.
    saved: tuple[int, int, int]
    #: Bytes of FP8 weights that forward makes for backward alone.
    passing: tuple[int, ...]
    #: Tensors of the call that backward reads.
    reads: tuple[tuple[str, int], ...]
    #: Types of the parameters' gradients.
    grad_dtypes: tuple[torch.dtype, ...]
    #: Columns of the extra inputs.
    extra_widths: tuple[int, ...]
    #: Parameters whose gradients go into ``main_grad``, and those whose gradients wait for ``backward_dw``.
    fused: tuple[int, ...]
    deferred: tuple[int, ...]
    #: Those of the latter that go into ``main_grad`` then.
    fused_later: tuple[int, ...]
    #: Of the memory of kept weights, that which backward reads.
    kept_for_backward: tuple[int, ...]
    #: Names the memory of kept weights among a program's; empty where a call brings none.
    kept: str
    is_delayed: bool
    any_grad: bool
    has_saved: bool
    #: Number of tensors that forward makes.
    forward_results: int
    #: Gradients that backward makes, in order: whether of a parameter, and its number; the input is extra input -1.
    new_grads: tuple[tuple[bool, int], ...]

    @classmethod
    def of(cls, call: native.TracedCall) -> Facts:
        """Return what a native call says."""
        any_grad = call.input_grad or any((*call.param_grads, *call.extra_grads))
        has_saved = any_grad and call.saved[:2] != (0, 0)
        elsewhere = {*call.fused, *call.deferred}
        params = [i for i, wanted in enumerate(call.param_grads) if wanted and i not in elsewhere]
        extras = [i for i, wanted in enumerate(call.extra_grads) if wanted]
        return cls(
            call=call,
            widths=tuple(call.widths),
            saved=call.saved,
            passing=tuple(call.passing),
            reads=tuple(call.reads),
            grad_dtypes=tuple(call.grad_dtypes),
            extra_widths=tuple(call.extra_widths),
            fused=tuple(call.fused),
            deferred=tuple(call.deferred),
            fused_later=tuple(call.fused_later),
            kept_for_backward=tuple(call.kept_for_backward),
            kept=f"{call.weights}" if call.keeps_weights else "",
            is_delayed=call.is_delayed,
            any_grad=any_grad,
            has_saved=has_saved,
            forward_results=len(call.widths) + has_saved + len(call.passing),
            new_grads=(
                *([(False, -1)] if call.input_grad else []),
                *[(True, index) for index in params],
                *[(False, index) for index in extras],
            ),
        )


#: Traced calls by their texts.
calls: dict[str, Facts] = {}


def facts_of(text: str) -> Facts:
    """Return what is known of a call, as a constant of the trace."""
    return calls[text]


# What torch.compiler.assume_constant_result sets, which imports torch._dynamo to do so.
facts_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Traced:
    """A program in graphs.

    Parameters
    ----------
    program : Program
        The native program.
    owner : object
        What has the scales of its linear operations: ``_init_delayed_scaling()`` makes them, and
        ``_delayed_states_of_linears(forward)`` returns them in the order of the operations.
    name : str
        Name in messages.
    """

    #: Defines the operators of a call; the module of operators puts its function here.
    define: ClassVar[Callable[[Facts], None]]

    def __init__(self, program: native.Program, owner: object, name: str) -> None:
        self._number = next(_numbers)
        #: Names the program in graphs: one element, its number. A graph for several layers of one kind takes the tensor
        #: as an argument, where torch would make a number a constant. It is made on the device of the calls.
        self.handle: torch.Tensor | None = None
        self.program = program
        self.owner = weakref.ref(owner)
        self.name = name
        #: Texts of calls, by what a trace knows of them.
        self.texts: dict[str, str] = {}
        #: Memory of quantised weights, row and column layouts in turn, by the sizes of these.
        self.kept: dict[str, list[torch.Tensor]] = {}
        _by_number[self._number] = self

    def prepare(
        self,
        key: str,
        is_first_microbatch: bool | None,
        tensors: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...],
        extras: int,
        wants: tuple[bool, ...],
        region: tuple[bool, int, bool],
        is_first: bool | None,
        overwrites_main_grad: bool,
    ) -> None:
        """Describe a call; runs once in a trace, on the real program.

        Parameters
        ----------
        key : str
            What distinguishes the call for a trace.
        is_first_microbatch : bool, optional
            As of the layer.
        tensors : tuple
            Shape, type and device of input, extra inputs and parameters. Numbers of rows do not matter.
        extras : int
            Number of extra inputs.
        wants : tuple of bool
            Which of the tensors want a gradient.
        region : tuple
            Whether layers quantise, the number of the recipe, and whether the graph itself enters the region.
        is_first : bool, optional
            Whether this is the first FP8 module of a region that the graph enters; None around the graph.
        overwrites_main_grad : bool
            ``main_grad`` is overwritten whatever `is_first_microbatch` says.
        """
        from torch.utils._python_dispatch import _disable_current_modes

        from te_fast.graphs.region import as_entered

        with _disable_current_modes(), torch.no_grad(), as_entered(region):
            samples = [
                torch.empty((), dtype=dtype, device=device).expand(shape)
                for shape, dtype, device in tensors
            ]
            at = 1 + extras
            call = native.traced_call(
                self.program,
                samples[0],
                samples[1:at],
                samples[at:],
                is_first_microbatch,
                (wants[0], wants[at:], wants[1:at]),
                is_first,
                overwrites_main_grad,
            )
            facts = calls.setdefault(call.text, Facts.of(call))
            Traced.define(facts)
            # Layers of one kind have one graph where each is compiled by itself: it must find them prepared, too.
            signature = self.program.signature
            for other in list(_by_number.values()):
                if other is self or other.program.signature == signature:
                    other._prepare_for(key, facts, samples[0].device, is_own=other is self)

    def _prepare_for(self, key: str, facts: Facts, device: torch.device, *, is_own: bool) -> None:
        owner: Any = self.owner()
        if owner is None:
            return
        if self.handle is None or self.handle.device != device:
            self.handle = _static(torch.tensor([self._number], device=device))
            _by_address[self.handle.data_ptr()] = self
        if facts.is_delayed:
            # Another layer of this kind may have scales of another recipe, which are its own affair.
            known = owner._delayed_states_of_linears(forward=True)
            if is_own or any(state is None for state in known):
                owner._init_delayed_scaling()
            for forward in (True, False):
                for state in owner._delayed_states_of_linears(forward=forward):
                    _static(state.scale)
                    _static(state.amax_history)
        kept = self.kept.get(facts.kept)
        if facts.kept and (kept is None or kept[0].device != device):
            fresh = [
                _static(torch.empty(size, dtype=torch.uint8, device=device))
                for sizes in facts.call.weights
                for size in sizes
            ]
            self.kept = {**self.kept, facts.kept: fresh}
        # Another dictionary: a trace that has read the former one would not see what is added to it.
        self.texts = {**self.texts, key: facts.call.text}

    prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced(x: Any) -> bool:
    """Tell whether a call is traced, by a tracer that the tensor is of or that watches all operators."""
    if is_in_graph():
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(x, fake.FakeTensor):
        return True
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def _static(tensor: torch.Tensor) -> torch.Tensor:
    """Tell CUDA graphs that a tensor stays where it is, so that they read and write it in its place."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.mark_static_address(tensor, guard=False)
    return tensor


def traced_of(handle: torch.Tensor) -> Traced:
    """Return the program of a handle.

    Raises
    ------
    StateError
        If it is gone.
    """
    traced = _by_address.get(handle.data_ptr())
    if traced is None and handle.device.type == "cpu":
        traced = _by_number.get(int(handle.item()))
    if traced is None:
        message = "a compiled graph runs a layer that was deleted; keep the model alive, or compile it again"
        raise StateError(message)
    return traced
