"""Calls of modules into the native module, and the Python functions that it calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_fast.runtime import (
    capturing,
    delayed,
    global_state,
    main_grad,
    native,
    rows,
    scale_tape,
)
from te_fast.runtime.second_order import differentiable_once, name_of_program, no_forward_mode


def _layer_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return native.layer_call(self, *args, **kwargs)


# Old versions of dynamo fail on methods that are not Python functions: torch 2.6 in each call, 2.11 if the compiled
# function is the layer itself, 2.15 never.
_DYNAMO_TAKES_BUILTINS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)

#: ``nn.Module.__call__`` of a layer, as a method without a Python frame.
layer_call_method: Callable[..., Any] = (
    native.instance_method(native.layer_call) if _DYNAMO_TAKES_BUILTINS else _layer_call
)


def _grouped_layer_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return native.grouped_layer_call(self, *args, **kwargs)


#: The same of a layer of experts.
grouped_layer_call_method: Callable[..., Any] = (
    native.instance_method(native.grouped_layer_call)
    if _DYNAMO_TAKES_BUILTINS
    else _grouped_layer_call
)


def _program_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return native.program_module_call(self, *args, **kwargs)


#: ``nn.Module.__call__`` of a module whose result is its program's, which ``_direct_program`` of its
#: dict names; None there sends calls through ``forward``.
program_call_method: Callable[..., Any] = (
    native.instance_method(native.program_module_call) if _DYNAMO_TAKES_BUILTINS else _program_call
)


def call_through_forward(cls: type[torch.nn.Module]) -> None:
    """Let a class with its own ``forward``, or a mixin's, be called as any module.

    A class with a native call notes the ``forward`` that this call replaces as ``_called_forward``. The native call
    compares it, to notice a ``forward`` that was set later.
    """
    caller = next(base for base in cls.__mro__ if "__call__" in base.__dict__)
    if (
        "_called_forward" in caller.__dict__
        and cls.forward is not caller.__dict__["_called_forward"]
    ):
        cls.__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]


#: The parameters of each optimizer that has stepped.
_writes: WeakKeyDictionary[torch.optim.Optimizer, native.OptimizerWrites] = WeakKeyDictionary()


def _note_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    writes = _writes.get(optimizer)
    if writes is None or not writes.is_of(parameters):
        writes = _writes[optimizer] = native.OptimizerWrites(parameters)
    writes.note_step()
    # A frozen weight keeps its FP8 form over steps, but an optimizer writes every parameter that has a gradient.
    stepped = [one for one in parameters if not one.requires_grad and one.grad is not None]
    if stepped:
        increment_version(stepped)


# Optimizers that write through raw pointers (apex, Transformer Engine), and torch's fused ones, do not move torch's
# version counters, by which a layer knows whether its weight has changed. torch calls this hook after each step.
register_optimizer_step_post_hook(_note_optimizer_step)


class _ProgramFunction(torch.autograd.Function):
    """Arguments: input, parameters or parts, extra inputs, program, owner, is_first_microbatch, joined parts."""

    forward = staticmethod(native.program_autograd_forward)
    backward = staticmethod(native.program_backward)
    jvp = no_forward_mode(lambda ctx: name_of_program(ctx.te_saved))


class ProgramBackward(_ProgramFunction._backward_cls):  # type: ignore[name-defined, misc]
    """The node of a chain of ops."""

    __slots__ = ("te_saved",)
    apply = native.instance_method(native.program_backward)


_ProgramFunction._backward_cls = ProgramBackward


@differentiable_once(lambda ctx: name_of_program(ctx.te_saved))
def program_backward_once(ctx: Any, *grads: torch.Tensor) -> Any:
    """Backward under ``create_graph=True``: differentiating again raises."""
    return native.program_backward(ctx, *grads)


class _CutFunction(torch.autograd.Function):
    """Arguments: input, parameters or parts of both programs, the call."""

    forward = staticmethod(native.cut_autograd_forward)
    backward = staticmethod(native.cut_backward)
    jvp = no_forward_mode(lambda ctx: name_of_program(ctx.te_saved))


class CutBackward(_CutFunction._backward_cls):  # type: ignore[name-defined, misc]
    """The node of two programs and the function between them."""

    __slots__ = ("te_saved",)
    apply = native.instance_method(native.cut_backward)


_CutFunction._backward_cls = CutBackward


@differentiable_once(lambda ctx: name_of_program(ctx.te_saved))
def cut_backward_once(ctx: Any, grad: torch.Tensor) -> Any:
    """Backward under ``create_graph=True``: differentiating again raises."""
    return native.cut_backward(ctx, grad)


# Python's `Function.apply` costs 2 us more than the C++ method that it wraps. The wrapper serves functorch, whose
# transforms do not reach the native path, since their tensors have no memory to read.
native.install_hooks(
    apply=super(torch.autograd.Function, _ProgramFunction).apply,
    backward_once=program_backward_once,
    apply_cut=super(torch.autograd.Function, _CutFunction).apply,
    cut_backward_once=cut_backward_once,
    padded=rows.apply_padded,
    padded_run=rows.run_padded,
    on_nothing=rows.apply_on_nothing,
    update_backward_scales=capturing.update_scales_behind_backward,
    skip_weight_flag=global_state.FP8GlobalStateManager.get_skip_fp8_weight_update_tensor,
    recompute=scale_tape.scales,
    dummy_wgrad=main_grad.dummy_wgrad_for,
    forget_maximum=delayed.forget_maximum,
)

# torch.compile breaks the graph at a native layer, as at Transformer Engine's layers, and would ask the user to report
# that.
for _message in (
    r"Graph break due to unsupported builtin ",
    r"Dynamo does not know how to trace the builtin `",
):
    _ours = (
        r"(te_fast\._native\.|(None|<unknown module>)\."
        r"(AmaxSlots|AutocastRegion|Program|Recipe|WeightHandle)\.__new__)"
    )
    warnings.filterwarnings("ignore", message=_message + _ours)
