"""A program in graphs: its number, and its traced calls."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from te_fast.errors import TeFastError, UnsupportedError
from te_fast.graphs.refusal import Problem, problem_of
from te_fast.runtime import native
from te_fast.runtime.compiling import is_exporting, static
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.runtime.module_hooks import are_called_plainly

_numbers = itertools.count(1)
#: Programs by their numbers. A compiler would look into a ``WeakValueDictionary``, which is code in Python.
_by_number: dict[int, weakref.ref[Traced]] = {}
#: Memory of kept weights, by their handles, then by device and bytes of both layouts. A handle notes what its memory
#: holds, so all programs that have the weight must find that memory.
_memory: WeakKeyDictionary[
    native.WeightHandle, dict[tuple[torch.device, tuple[int, int]], list[torch.Tensor]]
] = WeakKeyDictionary()


#: The place of a tensor: a new tensor, or a kind of the call's tensors and the number among that kind.
Place = tuple[str, int]
#: How a tensor is quantised: block, FP8 type, whether it has a column layout, and number of values.
Kind = tuple[int, str, bool, int]
#: A part of a tensor: rows, whether it wants a gradient, and, if it is the whole, whether its ``main_grad`` is always
#: overwritten.
Part = tuple[int, bool, bool]
#: Options of a call, as :meth:`Traced.prepare` takes them.
How = tuple[bool | None, bool | None, bool]
#: Shape, type and device of a tensor, its quantisation, and its parts; a tensor in one piece is its own part.
Described = tuple[tuple[int, ...], torch.dtype, torch.device, Kind | None, tuple[Part, ...]]


class Facts(NamedTuple):
    """The facts of a traced call that Python needs, in types that a trace takes for constants."""

    call: native.TracedCall
    #: Number of the call in operators.
    number: int
    #: Columns of the input, and of output and extra outputs.
    cols: int
    widths: tuple[int, ...]
    #: Places of output and extra outputs.
    outputs: tuple[Place, ...]
    #: Bytes of the tensors for backward: for no rows, for each step of rows; and the rows of a step.
    saved: tuple[int, int, int]
    #: Bytes of the buffers of quantised weights.
    memory: tuple[int, ...]
    #: The same for each linear operation, row and column layout; 0 for a layout that it lacks.
    weights: tuple[tuple[int, int], ...]
    #: Parameters that are quantised tensors.
    given: tuple[int, ...]
    #: The weights that backward reads in FP8: buffers and parameters.
    weights_of_backward: tuple[Place, ...]
    #: Tensors of the call that backward reads.
    reads: tuple[Place, ...]
    #: Places of the gradients of the input, of each parameter and of each extra input; None if not needed.
    grad_input: Place | None
    grad_params: tuple[Place | None, ...]
    grad_extras: tuple[Place | None, ...]
    #: For each parameter the rows of its parts, and whether each of them wants a gradient.
    parts: tuple[tuple[int, ...], ...]
    part_grads: tuple[tuple[bool, ...], ...]
    #: Shapes of the parameters, and types of their gradients.
    param_shapes: tuple[tuple[int, ...], ...]
    grad_dtypes: tuple[torch.dtype, ...]
    #: Columns and types of the extra inputs.
    extra_widths: tuple[int, ...]
    extra_dtypes: tuple[torch.dtype, ...]
    #: Parameters whose gradients go into ``main_grad``: those in one piece, and those in parts.
    fused: tuple[int, ...]
    fused_parts: tuple[int, ...]
    #: Parameters whose gradients wait for ``backward_dw``.
    deferred: tuple[int, ...]
    #: The deferred gradients that ``backward_dw`` adds to ``main_grad``.
    fused_later: tuple[int, ...]
    #: Whether backward writes tensors that are not in the graph.
    writes_elsewhere: bool
    #: Name of the memory of kept weights in a program; empty if a call has none.
    kept: str
    is_delayed: bool
    any_grad: bool
    has_saved: bool

    @classmethod
    def of(cls, call: native.TracedCall) -> Facts:
        """Return the facts of a native call."""
        any_grad = call.input_grad or any((*call.param_grads, *call.extra_grads))
        elsewhere = {*call.fused, *call.fused_parts, *call.deferred}
        return cls(
            call=call,
            number=call.number,
            cols=call.cols,
            widths=tuple(call.widths),
            outputs=tuple(call.outputs),
            saved=call.saved,
            memory=tuple(call.memory),
            weights=tuple(call.weights),
            given=tuple(call.given),
            weights_of_backward=tuple(call.weights_of_backward),
            reads=tuple(call.reads),
            grad_input=call.grad_input if call.input_grad else None,
            grad_params=tuple(
                ("new", 0) if wanted and index not in elsewhere else None
                for index, wanted in enumerate(call.param_grads)
            ),
            grad_extras=tuple(
                place if wanted else None
                for place, wanted in zip(call.grad_extras, call.extra_grads, strict=True)
            ),
            parts=tuple(map(tuple, call.parts)),
            part_grads=tuple(map(tuple, call.part_grads)),
            param_shapes=tuple(call.param_shapes),
            grad_dtypes=tuple(call.grad_dtypes),
            extra_widths=tuple(call.extra_widths),
            extra_dtypes=tuple(call.extra_dtypes),
            fused=tuple(call.fused),
            fused_parts=tuple(call.fused_parts),
            deferred=tuple(call.deferred),
            fused_later=tuple(call.fused_later),
            writes_elsewhere=bool(call.deferred) or call.fuses_parts,
            kept=f"memory of {call.weights}" if call.keeps_weights else "",
            is_delayed=call.is_delayed,
            any_grad=any_grad,
            has_saved=any_grad and call.saved[:2] != (0, 0),
        )


#: Traced calls by their texts.
calls: dict[str, Facts] = {}


def facts_of(text: str) -> Facts:
    """Return the facts of a call, as a constant of the trace."""
    return calls[text]


# torch.compiler.assume_constant_result sets this attribute, too, but imports torch._dynamo.
facts_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forgetting(number: int) -> Callable[[object], object]:
    pop = _by_number.pop  # the interpreter's end may clear this module first
    return lambda _: pop(number, None)


class Traced(torch.nn.Module):
    """A program in graphs.

    It is a module, though it has neither parameters nor a forward, for the guards of compiled functions: torch compares
    the versions of a module's dictionaries, and only if one has changed, everything that the trace has read in them.

    Parameters
    ----------
    program : Program
        The native program.
    owner : object
        The owner of the scales of its linear operations: ``_init_delayed_scaling()`` makes them, and
        ``_delayed_states_of_linears(forward)`` returns them in the order of the operations, and
        ``_handles_of_linears()`` the handles of the weights. Its ``scale_owners``, if it has some, own the scales.
    name : str
        Name in messages.
    """

    def __init__(self, program: native.Program, owner: object, name: str) -> None:
        super().__init__()
        self._number = next(_numbers)
        #: The program's handle in graphs: a tensor of one element, its number, on the device of the calls. A graph for
        #: several layers of one kind takes it as an argument, where torch would make a number a constant.
        self.handle: torch.Tensor | None = None
        #: Handles that others have replaced. Backwards of earlier forwards may have them; and a copy that a compiler
        #: makes of another program's handle must not get their addresses.
        self._former_handles: list[torch.Tensor] = []
        #: The scales that it uses, with what happens when they are gone.
        self._states: dict[int, weakref.ref[DelayedScalingRecipeState]] = {}
        #: What traces know of a layer beside its tensors (:class:`te_fast.graphs.form.Form`), as a text.
        self.form = ""
        self.program = program
        self.owner = weakref.ref(owner)
        self.name = name
        _by_number[self._number] = weakref.ref(self, _forgetting(self._number))

    # The following methods run in a trace, on the real objects, and their results are constants of the trace. A trace
    # would compare an argument with the object that it saw, and so compile a function again for each layer.

    def is_owner_called_plainly(self) -> bool:
        """Tell whether a call of the owner, a layer, is its forward alone."""
        owner: Any = self.owner()
        return are_called_plainly(owner)

    def owner_has(self, name: str) -> bool:
        """Tell whether the owner, a layer, has a parameter of this name."""
        owner: Any = self.owner()
        return owner._parameters.get(name) is not None

    def reads_bytes(self) -> bool:
        """Tell whether eager calls in FP8 read the bytes of a quantised input; if not, they dequantise it."""
        return self.program.reads_fp8

    def prepare(
        self,
        key: str,
        tensors: tuple[Described, ...],
        extras: int,
        region: tuple[bool, int, bool],
        how: How,
    ) -> Problem | None:
        """Describe a call. Runs once in a trace, on the real program.

        Returns the error that eager code would raise, if there is one.

        The call's text becomes the attribute `key`. The memory of its kept weights, if there is any, becomes the
        attribute :attr:`Facts.kept`. A trace looks up each attribute by itself and guards it, but would take a
        dictionary as it was at the first look.

        Parameters
        ----------
        key : str
            Name of the call for a trace.
        tensors : tuple
            Input, extra inputs and parameters. Numbers of rows of inputs do not matter.
        extras : int
            Number of extra inputs.
        region : tuple
            Whether layers quantise, the number of the recipe, and whether the graph itself enters the region.
        how : tuple
            ``is_first_microbatch``; whether this is the first FP8 module of a region that the graph enters, None around
            the graph; whether the graph keeps copies of the scales that forward is given, for its recomputation.
        """
        from torch.utils._python_dispatch import _disable_current_modes

        from te_fast.graphs.region import as_entered

        try:
            self._refuse_functorch()
            with _disable_current_modes(), torch.no_grad(), as_entered(region):
                self._describe(key, tensors, extras, how)
        except TeFastError as error:
            return problem_of(error)
        return None

    def _refuse_functorch(self) -> None:
        if torch._C._are_functorch_transforms_active():
            message = (
                f"{self.name}: torch.func transforms (vmap, grad, ...) do not work here; call torch.nn layers inside "
                "of them"
            )
            raise UnsupportedError(message)

    def _describe(self, key: str, tensors: tuple[Described, ...], extras: int, how: How) -> None:
        samples = [
            torch.empty((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device, *_ in tensors
        ]
        at = 1 + extras
        given = [kind for *_, kind, _ in tensors[at:]]
        parts = [parts for *_, parts in tensors]
        wants = [any(wanted for _, wanted, _ in one) for one in parts[:at]]
        owner: Any = self.owner()
        if owner is not None and any(kind is not None for kind in given):
            owner._check_quantized_weights(FP8GlobalStateManager.get_fp8_recipe())
        call = native.traced_call(
            self.program,
            samples[0],
            samples[1:at],
            samples[at:],
            (wants[0], parts[at:], wants[1:]),
            how,
            given,
        )
        call = native.traced_describe(call)
        facts = calls.setdefault(call.text, Facts.of(call))
        # Layers of one kind share a graph if each is compiled by itself, so the graph must find each of them prepared.
        signature = self.program.signature
        for reference in list(_by_number.values()):
            other = reference()
            if other is None:
                continue
            if other is self or other.program.signature == signature:
                other._prepare_for(key, facts, samples[0].device, is_own=other is self)

    def _prepare_for(self, key: str, facts: Facts, device: torch.device, *, is_own: bool) -> None:
        from te_fast.graphs.region import order

        owner: Any = self.owner()
        if owner is None:
            return
        if self.handle is None or self.handle.device != device:
            self._make_handle(owner, device)
        if facts.is_delayed:
            order.prepare(device)
            # Another layer of this kind may have scales of another recipe; its own call handles them.
            known = owner._delayed_states_of_linears(forward=True)
            if is_own:
                owner._init_delayed_scaling()
            elif any(state is None for state in known):
                _prepare_scales_of(owner)
            self._watch(owner)
        kept = getattr(self, facts.kept, None) if facts.kept else None
        if facts.kept and (kept is None or kept[0].device != device):
            pairs = zip(owner._handles_of_linears(), facts.weights, strict=True)
            found = [_memory_of(handle, sizes, device) for handle, sizes in pairs]
            # A tuple, since torch does not trust that a list is unchanged.
            setattr(self, facts.kept, tuple(buffer for buffers in found for buffer in buffers))
        setattr(self, key, facts.call.text)

    def _make_handle(self, owner: object, device: torch.device) -> None:
        from torch.utils._python_dispatch import _disable_current_modes

        # Scales may move, or be dropped, in any trace: under fake tensors, too. Tensors that are made under
        # torch.inference_mode() cannot be arguments of training.
        with _disable_current_modes(), torch.inference_mode(mode=False):
            handle = static(torch.tensor([self._number], device=device))
            native.traced_register(handle, self._number, self.program, owner)
        if self.handle is not None:
            self._former_handles.append(self.handle)
        self.handle = handle

    def _watch(self, owner: Any) -> None:
        """Make another handle when scales move.

        A recorded CUDA graph knows the addresses of the scales. It is recorded again if one of its arguments moves,
        among which there are no scales, but the handle.
        """
        myself = weakref.ref(self)

        def renew(_: object = None) -> None:
            traced = myself()
            owner = traced and traced.owner()
            if traced is not None and owner is not None and traced.handle is not None:
                traced._make_handle(owner, traced.handle.device)

        for forward in (True, False):
            for state in owner._delayed_states_of_linears(forward=forward):
                static(state.scale)  # graphs copy those that recomputations are given
                if id(state) not in self._states or self._states[id(state)]() is not state:
                    self._states[id(state)] = weakref.ref(state, renew)
                    state.when_moved.append(renew)

    is_owner_called_plainly._dynamo_marked_constant = True  # type: ignore[attr-defined]
    owner_has._dynamo_marked_constant = True  # type: ignore[attr-defined]
    reads_bytes._dynamo_marked_constant = True  # type: ignore[attr-defined]
    prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def exported(
        self, region: tuple[bool, int, bool], cols: int, kinds: tuple[Kind | None, ...]
    ) -> tuple[str, Problem | None]:
        """Return the text of the program in a trace of ``torch.export``, else nothing. Runs once in a trace.

        Beside it, returns the error if a part of the program cannot be saved.

        Parameters
        ----------
        region : tuple
            As of :meth:`prepare`.
        cols : int
            Columns of the input.
        kinds : tuple
            How each parameter is quantised, if it is.
        """
        if not is_exporting():
            return "", None
        from torch.utils._python_dispatch import _disable_current_modes

        from te_fast.graphs.inference import describe
        from te_fast.graphs.region import as_entered

        owner: Any = self.owner()
        recipe = None
        with _disable_current_modes(), as_entered(region):
            if region[0]:
                recipe = FP8GlobalStateManager.get_fp8_recipe()
            is_delayed = recipe is not None and recipe.delayed()
            if is_delayed and None in owner._delayed_states_of_linears(forward=True):
                owner._init_delayed_scaling()
        try:
            return describe(self.name, owner, self.program, recipe, cols, kinds), None
        except TeFastError as error:
            return "", problem_of(error)

    exported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _memory_of(
    handle: native.WeightHandle, sizes: tuple[int, int], device: torch.device
) -> list[torch.Tensor]:
    """Return the memory of a kept weight, in which each program that has the weight finds it."""
    known = _memory.setdefault(handle, {})
    if (device, sizes) not in known:
        # Tensors that are made under torch.inference_mode() cannot be written outside of it.
        with torch.inference_mode(mode=False):
            known[device, sizes] = [
                static(torch.empty(size, dtype=torch.uint8, device=device))
                for size in sizes
                if size
            ]
    return known[device, sizes]


def _prepare_scales_of(owner: Any) -> None:
    """Make the scales of layers that are not called now. If a layer has a recipe, that of its last call stays noted."""
    for layer in getattr(owner, "scale_owners", (owner,)):
        if None not in layer._delayed_states_of_linears(forward=True):
            continue
        meta = getattr(layer, "fp8_meta", None)
        former = None if meta is None else meta.get("recipe")
        if meta is None or former is None:
            layer._init_delayed_scaling()
            continue
        meta["recipe"] = None
        try:
            layer._init_delayed_scaling()
        finally:
            meta["recipe"] = former
