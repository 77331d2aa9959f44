"""The only importer of the native module, and the autograd function on top of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_fast import _native
from te_fast._native import (
    AmaxSlots,
    AutocastRegion,
    HeldRegion,
    Program,
    ProgramSaved,
    Recipe,
    WeightHandle,
    amax_mark_all_ran,
    amax_participants,
    autocast_callbacks,
    autocast_enter_phase,
    autocast_held,
    autocast_leave_phase,
    autocast_objects,
    autocast_phase_thread,
    autocast_recipe,
    autocast_region,
    autocast_reset,
    autocast_set,
    autocast_set_depth,
    autocast_set_first,
    autocast_take_first,
    delayed_callbacks,
    instance_method,
    layer_call,
    layer_forward,
    note_scale_change,
    program_apply,
    program_backward_dw,
    program_grads_of_nothing,
    program_run_forward,
    rows_to_pad,
    update_scales,
    version_of_copy,
    weight_gradient,
)
from te_fast._native import program_run_backward as _run_backward
from te_fast.pytorch._padding import Padding

__all__ = [
    "AmaxSlots",
    "AutocastRegion",
    "HeldRegion",
    "Program",
    "ProgramSaved",
    "Recipe",
    "WeightHandle",
    "amax_mark_all_ran",
    "amax_participants",
    "autocast_callbacks",
    "autocast_enter_phase",
    "autocast_held",
    "autocast_leave_phase",
    "autocast_objects",
    "autocast_phase_thread",
    "autocast_recipe",
    "autocast_region",
    "autocast_reset",
    "autocast_set",
    "autocast_set_depth",
    "autocast_set_first",
    "autocast_take_first",
    "call_through_forward",
    "delayed_callbacks",
    "hooks",
    "layer_call_method",
    "layer_forward",
    "native",
    "note_scale_change",
    "padding_of",
    "program_apply",
    "program_backward_dw",
    "program_call_method",
    "program_grads_of_nothing",
    "program_padded",
    "program_run_backward",
    "program_run_forward",
    "program_run_padded",
    "update_scales",
    "version_of_copy",
    "weight_gradient",
]

#: The native module itself, for ``te_fast.dispatch``.
native = _native


def _layer_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return layer_call(self, *args, **kwargs)


# Old dynamos take every method for a Python function, and fail on another (2.6 does, 2.11 does not).
_DYNAMO_TAKES_BUILTINS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)

#: ``nn.Module.__call__`` of a layer, as a method without a Python frame.
layer_call_method = instance_method(layer_call) if _DYNAMO_TAKES_BUILTINS else _layer_call


def _program_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _native.program_module_call(self, *args, **kwargs)


#: ``nn.Module.__call__`` of a module whose result is its program's, which ``_direct_program`` of its
#: dict names; None there sends calls through ``forward``.
program_call_method = (
    instance_method(_native.program_module_call) if _DYNAMO_TAKES_BUILTINS else _program_call
)


def call_through_forward(cls: type[torch.nn.Module]) -> None:
    """Let a class with a ``forward`` of its own, or of a mixin, be called as any module.

    A class that has a native call notes the ``forward`` that this stands for as ``_called_forward``. The native
    call looks at it, too, for a ``forward`` that was put in its place later.
    """
    caller = next(base for base in cls.__mro__ if "__call__" in base.__dict__)
    if (
        "_called_forward" in caller.__dict__
        and cls.forward is not caller.__dict__["_called_forward"]
    ):
        cls.__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]


def _note_optimizer_step(*_: Any) -> None:
    _native.note_optimizer_step()


# Optimizers that write through raw pointers (apex, Transformer Engine) do not move torch's version
# counters, by which a layer knows whether its weight has changed. This hook is torch's own.
register_optimizer_step_post_hook(_note_optimizer_step)


class Hooks:
    """What native layers call of modules that import this one: each puts its function here.

    Attributes
    ----------
    update_backward_scales : Callable
        Updates the gradients' scales of delayed scaling.
    skip_weight_flag : Callable
        Returns the tensor of ``set_skip_fp8_weight_update_tensor``, or None.
    recompute : Callable
        ``recompute(handle, slots, generation, grads)`` notes the scales that a layer uses in the first
        phase of activation recomputation, and returns them with their generation in the second.
    dummy_wgrad : Callable
        Returns what autograd is given for the gradient of a weight that went into ``main_grad``.
    """

    update_backward_scales: Callable[[], None]
    skip_weight_flag: Callable[[], torch.Tensor | None]
    recompute: Callable[[Any, int, int, bool], Any]
    dummy_wgrad: Callable[[torch.Tensor], torch.Tensor]


hooks = Hooks()


class _ProgramFunction(torch.autograd.Function):
    """Arguments: input, parameters or their parts, extra inputs, program, owner, bits, how parts are joined."""

    forward = staticmethod(_native.program_autograd_forward)
    backward = staticmethod(_native.program_backward)


class ProgramBackward(_ProgramFunction._backward_cls):  # type: ignore[name-defined, misc]
    """The node of a chain of ops."""

    __slots__ = ("te_saved",)
    apply = instance_method(_native.program_backward)


_ProgramFunction._backward_cls = ProgramBackward


@once_differentiable
def program_backward_once(ctx: Any, *grads: torch.Tensor) -> Any:
    """Backward under ``create_graph=True``: differentiating again raises."""
    return _native.program_backward(ctx, *grads)


class _Nothing(torch.autograd.Function):
    """A chain on zero rows. Arguments: call, input, extra inputs, parameters."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        program, inputs, overwrite = call
        ctx.call = (program, tensors[inputs:], overwrite)
        ctx.inputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[:inputs]]
        x = tensors[0]
        outputs = tuple(x.new_zeros(*x.shape[:-1], cols) for cols in program.widths(x.shape[-1]))
        return outputs[0] if len(outputs) == 1 else outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        program, parameters, overwrite = ctx.call
        needed = ctx.needs_input_grad[1:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for (shape, dtype, device), wanted in zip(ctx.inputs, needed, strict=False)
        ]
        wanted = needed[len(zeros) :]
        return (None, *zeros, *program_grads_of_nothing(program, parameters, wanted, overwrite))


def program_on_nothing(
    program: Any,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    params: tuple[torch.Tensor, ...],
    overwrite_main_grad: bool,
) -> Any:
    """Run a chain on zero rows, which no kernel has to see."""
    call = (program, 1 + len(extras), overwrite_main_grad)
    return _Nothing.apply(call, x, *extras, *params)


def padding_of(x: torch.Tensor) -> Padding | None:
    """Return what makes the rows of `x` as many as the current region's GEMMs take, None where they are."""
    if x.numel() == 0 or x.dim() == 0:
        return None
    missing = rows_to_pad(x.numel() // x.size(-1))
    return Padding.behind(x, missing) if missing else None


def program_padded(
    program: Any, owner: Any, x: torch.Tensor, extras: tuple[torch.Tensor, ...], *arguments: Any
) -> Any:
    """Apply a program to inputs whose rows are too few for its GEMMs."""
    padding = padding_of(x)
    assert padding is not None  # the caller has looked
    more = tuple(map(padding.pad, extras))
    out = program_apply(program, owner, padding.pad(x), more, *arguments)
    return tuple(map(padding.cut, out)) if isinstance(out, tuple) else padding.cut(out)


class _PaddedRun(NamedTuple):
    """What a backward of padded rows needs."""

    run: ProgramSaved
    padding: Padding
    updates_backward_scales: bool


def program_run_padded(
    program: Program,
    owner: Any,
    x: torch.Tensor,
    extras: tuple[torch.Tensor, ...],
    *arguments: Any,
) -> Any:
    """Run a program, without a node, on inputs whose rows are too few for its GEMMs."""
    padding = padding_of(x)
    assert padding is not None  # the caller has looked
    more = tuple(map(padding.pad, extras))
    y, others, run, saved = program_run_forward(program, owner, padding.pad(x), more, *arguments)
    kept = None if run is None else _PaddedRun(run, padding, run.updates_backward_scales)
    return padding.cut(y), tuple(map(padding.cut, others)), kept, saved


def program_run_backward(
    kept: ProgramSaved | _PaddedRun,
    saved: tuple[torch.Tensor | None, ...],
    dy: torch.Tensor,
    extra_grads: tuple[torch.Tensor, ...],
) -> Any:
    """As the native function, for what :func:`program_run_forward` returned."""
    if not isinstance(kept, _PaddedRun):
        return _run_backward(kept, saved, dy, extra_grads)
    run, padding, _ = kept
    more = tuple(map(padding.pad, extra_grads))
    dx, gradients, extras = _run_backward(run, saved, padding.pad(dy), more)
    return padding.cut(dx), gradients, tuple(map(padding.cut, extras))


# `Function.apply` of Python costs 2 us more than the C++ method that it wraps, for functorch: its
# transforms do not reach the native path, since their tensors have no memory to read.
_native.install_hooks(
    apply=super(torch.autograd.Function, _ProgramFunction).apply,
    backward_once=program_backward_once,
    padded=program_padded,
    padded_run=program_run_padded,
    on_nothing=program_on_nothing,
    update_backward_scales=lambda: hooks.update_backward_scales(),
    skip_weight_flag=lambda: hooks.skip_weight_flag(),
    recompute=lambda *arguments: hooks.recompute(*arguments),
    dummy_wgrad=lambda weight: hooks.dummy_wgrad(weight),
)
