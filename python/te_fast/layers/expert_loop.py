"""Experts one by one: where no kernel has the products of all, each expert is a dense program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from te_fast import _config
from te_fast.errors import StateError
from te_fast.runtime import main_grad, native
from te_fast.runtime.global_state import autocast_state
from te_fast.tensor.primary import is_quantized

if TYPE_CHECKING:
    from te_fast.layers.grouped_linear import GroupedLinear

#: The GPUs that products of all experts in one launch are compiled for.
_ONE_LAUNCH = (9, 0)
#: Dense products in FP8 take rows in multiples of this; zeros make them up.
_ROWS = 8


def is_needed(device: torch.device) -> bool:
    """Tell whether experts run one by one on a device."""
    if _config.EXPERT_LOOP:
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) != _ONE_LAUNCH


class _Unstack(torch.autograd.Function):
    """The experts' weights of one stack; gradients become a stack again, or are in ``main_grad`` already."""

    @staticmethod
    def forward(
        ctx: Any, layer: GroupedLinear, name: str, stack: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.layer, ctx.name = layer, name
        ctx.set_materialize_grads(False)
        return experts_of(stack)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        stack = getattr(ctx.layer, ctx.name)
        if ctx.name == "weight" and ctx.layer.fuse_wgrad_accumulation:
            return None, None, main_grad.after_main_grad(stack)
        found = next((grad for grad in grads if grad is not None), None)
        if found is None:
            return None, None, None
        zero = torch.zeros_like(found)
        return None, None, torch.stack([zero if grad is None else grad for grad in grads])


def experts_of(stack: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the weights of a stack, in its memory; those of an FP8 one are FP8."""
    if not is_quantized(stack):
        return stack.detach().unbind(0)
    whole: Any = stack
    value = whole._value

    def part(name: str, number: int) -> torch.Tensor | None:
        inner = getattr(value, name)
        if inner is None or (name == "col" and not value.col_is_valid):
            return None
        return inner[number : number + 1] if inner.dim() == 1 else inner[number]

    names = ("row", "row_scale", "col", "col_scale") if value.block else ("row", "row_scale", "col")
    made = []
    for number in range(stack.shape[0]):
        inner = [part(name, number) for name in names] + [None] * (4 - len(names))
        own = native.QuantizedValue(value.block, value.fp8, inner[0], inner[1], inner[2], inner[3])
        made.append(whole._of_value(own, stack.shape[1:], stack.dtype, None))
    return tuple(made)


class ExpertLoop:
    """The products of a layer's experts, one after the other."""

    def __init__(self, layer: GroupedLinear) -> None:
        self.handles: list[native.WeightHandle] = []
        self._programs: list[native.Program] = []
        for number in range(layer.num_gemms):
            name = f"{layer.name}, expert {number}"
            handle = native.WeightHandle(name)
            handle.fuse_wgrad_accumulation = layer.fuse_wgrad_accumulation
            handle.delay_wgrad_compute = layer.delay_wgrad_compute
            handle.save_original_input = layer.save_original_input
            program = native.Program(name)
            # Calls bring the parameters.
            program.linear("linear", handle, {}, "weight", layer.in_features, layer.out_features)
            if layer.apply_bias:
                program.bias("bias", {}, "bias", layer.out_features)
            self.handles.append(handle)
            self._programs.append(program)

    def apply(
        self, layer: GroupedLinear, x: torch.Tensor, counts: list[int], is_first: bool | None
    ) -> torch.Tensor:
        """Return the results of the rows of ``(rows, in_features)``; those of no expert are zero."""
        weights = _parts(layer, "weight", layer.weight_names)
        biases = _parts(layer, "bias", layer.bias_names) if layer.apply_bias else None
        *chunks, rest = x.split([*counts, x.shape[0] - sum(counts)])
        results = []
        in_fp8 = autocast_state.fp8_enabled
        for number, (program, chunk) in enumerate(zip(self._programs, chunks, strict=True)):
            parameters = (weights[number], *(() if biases is None else (biases[number],)))
            lacks = -chunk.shape[0] % _ROWS if in_fp8 else 0
            given = functional.pad(chunk, (0, 0, 0, lacks)) if lacks else chunk
            y = native.program_apply(program, layer, given, (), is_first, parameters, None)
            results.append(y[: chunk.shape[0]] if lacks else y)
        if rest.shape[0]:
            results.append(rest.new_zeros(rest.shape[0], layer.out_features))
        return torch.cat(results)

    def compute_deferred(self, layer: GroupedLinear) -> None:
        """Compute the oldest weight gradients that wait, and give them to the weights.

        Raises
        ------
        StateError
            If none does.
        """
        if not self.handles[0].deferred_count():
            message = f"{layer.name}: backward_dw() was called without a backward before it"
            raise StateError(message)
        fuse = layer.fuse_wgrad_accumulation
        weights = _parts(layer, "weight", layer.weight_names)
        found = [
            native.program_backward_dw(handle, weight, fuse)
            for handle, weight in zip(self.handles, weights, strict=True)
        ]
        if layer.single_grouped_weight:
            if not fuse:
                grads = [grad for grad in found if grad is not None]
                stack: Any = layer.weight
                main_grad.give(stack, torch.stack(grads), fuse=False, overwrite=False)
            return
        for weight, grad in zip(weights, found, strict=True):
            if grad is not None and weight.requires_grad:
                main_grad.give(weight, grad, fuse=fuse, overwrite=False)


def _parts(layer: GroupedLinear, kind: str, names: list[str]) -> list[Any]:
    """Return the weights, or the biases, of the experts, each with its ``main_grad``."""
    if names != [kind]:
        return [getattr(layer, name) for name in names]
    whole: Any = getattr(layer, kind)
    parts: list[Any] = list(_Unstack.apply(layer, kind, whole))
    if kind == "weight" and layer.fuse_wgrad_accumulation:
        grads: Any = main_grad.main_grad_of(whole) if whole.requires_grad else ()
        for part, grad in zip(parts, grads, strict=False):
            part.main_grad = grad
            part.overwrite_main_grad = getattr(whole, "overwrite_main_grad", False)
    return parts
