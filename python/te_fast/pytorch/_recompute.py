"""Layers that keep their input alone and run their forward again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from te_fast.errors import StateError
from te_fast.pytorch import _delayed, _ops
from te_fast.pytorch._global_state import FP8GlobalStateManager

if TYPE_CHECKING:
    from te_fast.pytorch._compound import CompoundModule

__all__ = ["recomputed"]


class _Forward:
    """What a forward ran under: the autocast region, and the scales of delayed scaling."""

    def __init__(self, layer: CompoundModule) -> None:
        self.region = FP8GlobalStateManager.get_autocast_state()
        enabled, _, recipe, *_ = self.region
        self.is_delayed = enabled and recipe.delayed()
        if self.is_delayed:
            # The layer's first forward makes its scales; these are the ones that it will use.
            layer.init_fp8_metadata(layer.fp8_meta["num_gemms"])
            self.scale = layer.fp8_meta["scaling_fwd"].scale.clone()
        # Its backward is the last one of the region's, and updates the gradients' scales.
        self.updates = bool(self.is_delayed and _ops.autocast_take_first())

    @contextmanager
    def again(self, layer: CompoundModule) -> Iterator[None]:
        """Put region and scales back for a while; what is recorded meanwhile is forgotten."""
        region, depth = FP8GlobalStateManager.get_autocast_state(), _ops.autocast_region()[4]
        *parts, _, graph = self.region
        FP8GlobalStateManager.set_autocast_state((*parts, False, graph))
        # Inside of a region: or a program asked in high precision would repeat its last FP8 one.
        _ops.autocast_set_depth(depth + 1)
        try:
            if self.is_delayed:
                with _scale_of_then(layer.fp8_meta["scaling_fwd"], self.scale):
                    yield
            else:
                yield
        finally:
            _ops.autocast_set_depth(depth)
            FP8GlobalStateManager.set_autocast_state(region)


@contextmanager
def _scale_of_then(state: Any, scale: torch.Tensor) -> Iterator[None]:
    """Exchange scales; put them, the live maxima and whether the layer ran back afterwards."""
    live, ran = state.amax_history[0], state.slots.ran
    former_scale, former_live = state.scale.clone(), live.clone()
    state.scale.copy_(scale)
    _ops.note_scale_change()
    try:
        yield
    finally:
        state.scale.copy_(former_scale)
        live.copy_(former_live)
        _ops.note_scale_change()
        if not ran:
            state.slots.clear_ran()


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: CompoundModule,
        is_first_microbatch: bool | None,
        names: tuple[str, ...],
        x: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> Any:
        ctx.layer, ctx.is_first_microbatch, ctx.names = layer, is_first_microbatch, names
        ctx.parameters = parameters
        ctx.versions = [_version(parameter) for parameter in parameters]
        ctx.forward_state = _Forward(layer)
        ctx.save_for_backward(x)
        needs_x = x.requires_grad

        def run(program: _ops.Program) -> Any:
            # As if for backward: the weights are quantised for the second run, too, and the results
            # are bit for bit those of a layer that keeps what it computes.
            y, others, _, _ = _ops.program_run_forward(
                program, layer, x, (), is_first_microbatch, needs_x, (), True
            )
            return (y, *others) if others else y

        return layer._run(dict(zip(names, parameters, strict=True)), run)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *others: torch.Tensor) -> tuple[Any, ...]:
        layer, (x,) = ctx.layer, ctx.saved_tensors
        for name, parameter, version in zip(ctx.names, ctx.parameters, ctx.versions, strict=True):
            if _version(parameter) != version:
                message = (
                    f"{layer.name}: {name} has been modified by an inplace operation since the "
                    "forward that backward runs again"
                )
                raise StateError(message)
        needs_x = ctx.needs_input_grad[3]

        def run(program: _ops.Program) -> Any:
            _, _, kept, saved = _ops.program_run_forward(
                program, layer, x, (), ctx.is_first_microbatch, needs_x, (), True
            )
            assert kept is not None  # since gradients are wanted
            return _ops.program_run_backward(kept, saved, dy, others)

        with ctx.forward_state.again(layer):
            parameters = dict(zip(ctx.names, ctx.parameters, strict=True))
            dx, gradients, _ = layer._run(parameters, run)
        if ctx.forward_state.updates:
            _delayed.update_scales(forward=False)
        return (None, None, None, dx, *gradients)


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


def recomputed(
    layer: CompoundModule,
    parameters: dict[str, torch.Tensor],
    x: torch.Tensor,
    is_first_microbatch: bool | None,
) -> Any:
    """Apply the layer's program, keeping `x` alone for backward.

    Under delayed scaling, the second run quantises with the first one's scales and records nothing.
    """
    names = tuple(parameters)
    return _Recomputed.apply(layer, is_first_microbatch, names, x, *parameters.values())
