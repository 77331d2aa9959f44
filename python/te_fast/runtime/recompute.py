"""Activation checkpointing, with the scales of the forward that is recomputed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from te_fast.errors import DtypeError, RanksError
from te_fast.runtime import native, scale_tape
from te_fast.runtime.arguments import check_functions
from te_fast.runtime.collectives import (
    check_is_group,
    gather_split_1d_tensor,
    is_initialized,
    named,
    split_tensor_into_1d_equal_chunks,
)
from te_fast.runtime.compiling import is_in_graph
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.runtime.rng import repeating

# The tape of regions without their own: first in, first out over all of them.
_default_tape = scale_tape.Tape()


class _Phase(NamedTuple):
    """An entered region of recomputation, and its phase."""

    region: Any
    was_enabled: bool
    context: Any


#: The entered regions by thread, outermost first.
_entered: dict[int, list[_Phase]] = {}


def _in_force() -> _Phase | None:
    """Return the region in force: this thread's, or that of the thread that this one works for."""
    own = _entered.get(get_ident())
    if own is None and _entered and not native.autocast_held()[1]:
        own = next(iter(list(_entered.values())), None)
    return own[-1] if own else None


class activation_recompute_forward:
    """Run layers as one phase of activation recomputation.

    In the first phase, layers of delayed scaling note their scales. In the second phase, each layer uses them again in
    the order of its calls, and records no maximum.

    Parameters
    ----------
    activation_recompute : bool, default = False
        Whether activations are recomputed; if not, the region has no effect.
    recompute_phase : bool, default = False
        Whether this is the recomputation.

    See Also
    --------
    get_activation_recompute_contexts : Makes both phases.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch import distributed
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> with distributed.activation_recompute_forward(activation_recompute=True), torch.no_grad(), te.autocast():
    ...     y = layer(torch.ones(16, 32))
    >>> y.shape
    torch.Size([16, 32])
    """

    def __init__(
        self,
        activation_recompute: bool = False,
        recompute_phase: bool = False,
        *,
        _tape: scale_tape.Tape | None = None,
    ) -> None:
        self.activation_recompute = activation_recompute
        self.recompute_phase = recompute_phase
        self._tape = _default_tape if _tape is None else _tape

    def __enter__(self) -> None:
        """Put the phase in force for this thread."""
        context: Any = nullcontext()
        if self.activation_recompute:
            tape = self._tape
            if self.recompute_phase and tape is not _default_tape:
                tape = tape.copy()  # backward may run twice
            context = scale_tape.phase(tape, reads=self.recompute_phase)
        context.__enter__()
        phase = _Phase(self, FP8GlobalStateManager.is_fp8_enabled(), context)
        _entered.setdefault(get_ident(), []).append(phase)

    def __exit__(self, *exception: Any) -> None:
        """Put the former phase of this thread back in force."""
        own = _entered[get_ident()]
        phase = own.pop()
        if not own:
            del _entered[get_ident()]
        phase.context.__exit__(*exception)


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether FP8 layers run in a phase of activation recomputation.

    In FP8 the phase may have been entered, or the checkpointed function may have entered a region of its own.

    See Also
    --------
    in_fp8_activation_recompute_phase : In the second phase.

    Examples
    --------
    >>> from te_fast.pytorch import distributed
    >>> distributed.is_fp8_activation_recompute_enabled()
    False
    """
    phase = _in_force()
    if phase is None or not phase.region.activation_recompute:
        return False
    return phase.was_enabled or FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether FP8 layers run for the second time.

    See Also
    --------
    is_fp8_activation_recompute_enabled : In either phase.

    Examples
    --------
    >>> from te_fast.pytorch import distributed
    >>> distributed.in_fp8_activation_recompute_phase()
    False
    """
    phase = _in_force()
    return phase is not None and bool(phase.region.recompute_phase)


def get_activation_recompute_contexts() -> tuple[
    activation_recompute_forward, activation_recompute_forward
]:
    """Return a region for a forward and a region for its recomputation with the forward's scales.

    Pass this function as ``context_fn`` of ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``.

    Returns
    -------
    tuple of activation_recompute_forward
        The region of the forward and the region of its recomputation.

    See Also
    --------
    te_fast.pytorch.checkpoint : te_fast's own.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch import distributed
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> x = torch.ones(16, 32, requires_grad=True)
    >>> with te.autocast():
    ...     y = checkpoint(layer, x, use_reentrant=False, context_fn=distributed.get_activation_recompute_contexts)
    >>> y.sum().backward()
    >>> x.grad.shape
    torch.Size([16, 32])
    """
    tape = scale_tape.Tape(updates=False)  # the first phase has gradients
    return (
        activation_recompute_forward(True, False, _tape=tape),
        activation_recompute_forward(True, True, _tape=tape),
    )


def _outputs_of_its_own(result: Any) -> Any:
    """Return aliases of the results of a run without gradients.

    torch's reentrant node makes every tensor that it gets here its own result, in place. A tensor of the layer among
    them (the bias of one with ``return_bias``) would belong to that node, and the next backward through it would run
    the function again, without end.
    """

    def own(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    return tuple(map(own, result)) if isinstance(result, tuple) else own(result)


class _RandomStates:
    """A tracker's states of random numbers at one time.

    Generators among them advance in place, so that their values are noted.

    Parameters
    ----------
    tracker : object
        The tracker, with ``get_states`` and ``set_states``.
    """

    def __init__(self, tracker: Any) -> None:
        self._states = tracker.get_states()
        values = self._states.values() if isinstance(self._states, dict) else ()
        self._generators = [(state, state.get_state()) for state in values if _can_be_noted(state)]

    def give_to(self, tracker: Any) -> None:
        """Let a tracker continue from these states."""
        for generator, value in self._generators:
            generator.set_state(value)
        tracker.set_states(self._states)


def _can_be_noted(state: Any) -> bool:
    """Tell whether a state is a generator that has a value; a capture's generators have values in replays alone."""
    return isinstance(state, torch.Generator) and not (
        state.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )


class _Checkpointed:
    """A checkpointed function: notes scales in its first call, and repeats it with them later.

    Parameters
    ----------
    function : Callable
        The function.
    kwargs : dict
        Its keyword arguments.
    tracker : Callable, optional
        Returns the tracker of random numbers.
    updates : bool
        As of :class:`te_fast.runtime.scale_tape.Tape`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        kwargs: dict[str, Any],
        tracker: Any | None,
        *,
        updates: bool,
    ) -> None:
        self._function = function
        self._updates = updates
        self._kwargs = kwargs
        self._tracker = tracker
        self._first: scale_tape.Recording | None = None
        self._rng_states: _RandomStates | None = None

    def __call__(self, *args: Any) -> Any:
        if self._first is None:
            self._first = scale_tape.Recording(updates=self._updates)
            if self._tracker is not None:
                self._rng_states = _RandomStates(self._tracker())
            with activation_recompute_forward(True, False, _tape=self._first.tape):
                result = self._function(*args, **self._kwargs)
            return result if torch.is_grad_enabled() else _outputs_of_its_own(result)
        with repeating():
            return self._repeat(args)

    def _repeat(self, args: tuple[Any, ...]) -> Any:
        assert self._first is not None
        rng_states = None
        if self._tracker is not None and self._rng_states is not None:
            rng_states = _RandomStates(self._tracker())
            self._rng_states.give_to(self._tracker())
        try:
            with (
                self._first.region(),
                activation_recompute_forward(True, True, _tape=self._first.tape),
            ):
                return self._function(*args, **self._kwargs)
        finally:
            if self._tracker is not None and rng_states is not None:
                rng_states.give_to(self._tracker())


def _place_of(tensor: torch.Tensor) -> Any:
    """Return what tells a tensor's elements from those of other views of its memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _distributed(x: Any, group: Any) -> saved_tensors_hooks:
    """Let autograd save a copy of this rank's share instead of a tensor."""
    if not isinstance(x, torch.Tensor):
        message = (
            "checkpoint: distribute_saved_activations needs a tensor as the function's first argument, got "
            f"{type(x).__name__}"
        )
        raise DtypeError(message)
    check_is_group("checkpoint", "tp_group", group)
    if not is_initialized():
        message = (
            "checkpoint: distribute_saved_activations needs a process group; call torch.distributed's "
            "init_process_group() first, or leave the argument out"
        )
        raise RanksError(message)
    share = split_tensor_into_1d_equal_chunks(x.detach(), group, new_buffer=True)
    # `pack` must not refer to the tensor: torch keeps `pack` as long as its result.
    shape, place = x.shape, _place_of(x)

    def pack(tensor: torch.Tensor) -> Any:
        return share if _place_of(tensor) == place else (tensor,)

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, tuple):
            (tensor,) = kept
            return tensor
        with named("checkpoint", "the gather of distributed saved activations"):
            return gather_split_1d_tensor(kept, group).view(shape)

    return saved_tensors_hooks(pack, unpack)


class _Tracing:
    """Data that a trace passes to the layers in it."""

    def __init__(self) -> None:
        #: They are inside of a checkpointed function whose graph keeps the scales that they ask for.
        #: Graphs are guarded by what an instance's dictionary holds, so that it is there from the beginning.
        self.keeps_scales = False


tracing = _Tracing()


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    is_kept = getattr(operator, "_name", "") == "te_fast::keep_scale"
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts_in_graph() -> Any:
    """Return a policy: a compiler must not repeat the operators that keep the forward's scales."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_policy)


def checkpoint_in_graph(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Any:
    """Checkpoint by the compiler, with recomputed and other operators in one graph.

    The graph keeps the scales of layers of delayed scaling, unless `options` have a ``context_fn``.

    Parameters
    ----------
    function : Callable
        Function or module.
    args, kwargs
        Its arguments.
    options
        Options of ``torch.utils.checkpoint.checkpoint``.
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    if "context_fn" in options:
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    former = tracing.keeps_scales
    tracing.keeps_scales = True
    try:
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=_contexts_in_graph,
            **options,
            **kwargs,
        )
    finally:
        tracing.keeps_scales = former


def _is_old_call(args: tuple[Any, ...]) -> bool:
    """Whether arguments come in the order of early Transformer Engine."""
    if len(args) < 4 or not isinstance(args[0], bool) or not callable(args[1]):
        return False
    group = getattr(torch.distributed, "ProcessGroup", type(None))
    return args[2] is None or isinstance(args[2], group)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Run a function and keep only its inputs for backward, which runs the function again.

    It works like ``torch.utils.checkpoint``. In addition, the second run has the autocast region and the delayed
    scaling's scales of the first, so that gradients are those of a run without recomputation.

    Parameters
    ----------
    function : Callable
        Function or module.
    *args
        Its arguments.
    distribute_saved_activations : bool, default = False
        Keep only this rank's share of the first argument, which must be a tensor that is the same on all ranks of
        `tp_group`; backward gathers the shares. Only with ``use_reentrant=True``.
    get_rng_state_tracker : Callable, optional
        Returns a tracker with ``get_states`` and ``set_states``; the second run has the states of
        the first.
    tp_group : torch.distributed.ProcessGroup, optional
        Ranks that `distribute_saved_activations` distributes over; all by default.
    use_reentrant : bool, default = True
        Which of torch's two implementations to use.
    **kwargs
        ``preserve_rng_state`` goes to torch, and so do ``context_fn``, ``determinism_check`` and
        ``debug``, which it takes with ``use_reentrant=False``; all others to the function.

    Raises
    ------
    DtypeError
        If the argument that is to be distributed is no tensor, `function` or `get_rng_state_tracker` cannot be called,
        or `tp_group` is no process group.
    ShapeError
        If its elements cannot be shared out among the ranks.
    RanksError
        If an argument is to be distributed without a process group, or a rank is gone in backward.

    See Also
    --------
    te_fast.pytorch.distributed.get_activation_recompute_contexts : For torch.utils.checkpoint.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> layer = te.LayerNormMLP(32, 64, device="cpu")
    >>> x = torch.ones(16, 32, requires_grad=True)
    >>> with te.autocast():
    ...     y = te.checkpoint(layer, x)
    >>> y.sum().backward()
    >>> tuple(x.grad.shape)
    (16, 32)
    """
    if _is_old_call(args):
        message = (
            "checkpoint: pass distribute_saved_activations, get_rng_state_tracker and tp_group by "
            "keyword; their positions are deprecated"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        (distribute_saved_activations, get_rng_state_tracker, tp_group), args = args[:3], args[3:]
    if distribute_saved_activations and not use_reentrant:
        message = "checkpoint: distribute_saved_activations has no effect with use_reentrant=False"
        warnings.warn(message, UserWarning, stacklevel=2)
        distribute_saved_activations = False
    # Imported only by calls: before torch 2.8 it imports sympy, which takes a third of a second.
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    options: dict[str, Any] = {
        name: kwargs.pop(name)
        for name in ("preserve_rng_state", "context_fn", "determinism_check", "debug")
        if name in kwargs
    }
    if is_in_graph():
        return checkpoint_in_graph(function, args, options, kwargs)
    if not callable(function):
        message = f"checkpoint: function must be callable, got {type(function).__name__}"
        raise DtypeError(message)
    check_functions("checkpoint", get_rng_state_tracker=get_rng_state_tracker)
    # torch's reentrant node has a backward only then, and runs the function without gradients before.
    has_node = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    updates = use_reentrant and has_node and torch.is_grad_enabled()
    run = _Checkpointed(function, kwargs, get_rng_state_tracker, updates=updates)
    if distribute_saved_activations:
        with _distributed(args[0] if args else None, tp_group):
            return torch_checkpoint(run, *args, use_reentrant=True, **options)
    return torch_checkpoint(run, *args, use_reentrant=use_reentrant, **options)
