"""Layers that keep only their input and run their forward again in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import StateError
from te_fast.runtime import delayed, native, rows, scale_tape
from te_fast.runtime.parts import version_of
from te_fast.runtime.second_order import differentiable_once, no_forward_mode

if TYPE_CHECKING:
    from te_fast.layers.program import ProgramLayer


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: ProgramLayer,
        is_first_microbatch: bool | None,
        names: tuple[str, ...],
        x: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> Any:
        ctx.layer, ctx.is_first_microbatch, ctx.names = layer, is_first_microbatch, names
        ctx.parameters = parameters
        ctx.versions = [version_of(parameter) for parameter in parameters]
        ctx.first = scale_tape.Recording()
        ctx.save_for_backward(x)
        needs_x = x.requires_grad

        with scale_tape.phase(ctx.first.tape, reads=False):
            # As if for backward: the weights are quantised for the second run, too, and the results have the bits of a
            # layer that keeps its intermediate results.
            y, others, kept, _ = native.program_run_forward(
                layer._program, layer, x, (), is_first_microbatch, needs_x, (), True, parameters
            )
        assert kept is not None  # since gradients are wanted
        # Its backward is the last one of the region's, and updates the gradients' scales.
        ctx.updates = kept.updates_backward_scales
        return (y, *others) if others else y

    jvp = no_forward_mode(lambda ctx: ctx.layer.name)

    @staticmethod
    @differentiable_once(lambda ctx: ctx.layer.name)
    def backward(ctx: Any, dy: torch.Tensor, *others: torch.Tensor) -> tuple[Any, ...]:
        layer, (x,) = ctx.layer, ctx.saved_tensors
        for name, parameter, version in zip(ctx.names, ctx.parameters, ctx.versions, strict=True):
            if version_of(parameter) != version:
                message = (
                    f"{layer.name}: {name} has been modified by an inplace operation since the "
                    "forward that backward runs again"
                )
                raise StateError(message)
        needs_x = ctx.needs_input_grad[3]

        first, given = ctx.is_first_microbatch, ctx.parameters
        with ctx.first.region(), scale_tape.phase(ctx.first.tape.copy(), reads=True):
            _, _, kept, saved = native.program_run_forward(
                layer._program, layer, x, (), first, needs_x, (), True, given
            )
            assert kept is not None  # since gradients are wanted
            dx, gradients, _ = rows.run_backward(kept, saved, dy, others)
        if ctx.updates:
            delayed.update_scales(forward=False)
        return (None, None, None, dx, *gradients)


def recomputed(
    layer: ProgramLayer,
    parameters: dict[str, torch.Tensor],
    x: torch.Tensor,
    is_first_microbatch: bool | None,
) -> Any:
    """Apply the layer's program, keeping only `x` for backward.

    Under delayed scaling, the second run quantises with the first one's scales and records nothing.
    """
    names = tuple(parameters)
    return _Recomputed.apply(layer, is_first_microbatch, names, x, *parameters.values())
