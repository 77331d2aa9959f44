"""Quantisation as an operation of a chain."""

from __future__ import annotations

from typing import Any, Literal

import torch

from te_fast.errors import UnsupportedError
from te_fast.ops.op import ALONE, BasicOperation, Beside, OperationContext
from te_fast.recipe import Recipe
from te_fast.runtime import scale_tape
from te_fast.runtime.arguments import check_flags
from te_fast.runtime.compiling import is_in_graph
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.tensor.answers import LinearRoles, linear_roles
from te_fast.tensor.of_recipe import quantizer_of
from te_fast.tensor.primary import is_quantized


class Quantize(BasicOperation):
    """Quantise as the region's recipe does; outside of a region, and for quantised inputs, it is the identity.

    The result is a quantised tensor with both layouts. Next to a linear operation (in backward also behind its bias),
    ``Quantize`` does nothing, because the linear operation quantises its operands once, with its own scales. Operations
    that do not read FP8 dequantise. As in Transformer Engine, a recipe's ``backward_override`` leaves the gradient as
    it is.

    Parameters
    ----------
    forward : bool, default = True
        Quantise in forward.
    backward : bool, default = False
        Quantise the gradient in backward.

    See Also
    --------
    te_fast.pytorch.autocast : The region with the recipe.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch import ops
    >>> from te_fast.common import recipe
    >>> with te.autocast(recipe=recipe.Float8CurrentScaling()):
    ...     y = ops.Quantize()(torch.linspace(0, 1, 256).view(16, 16))
    >>> y.unique().numel() < 256
    True
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        check_flags(type(self).__name__, forward=forward, backward=backward)
        self._quantize_forward = forward
        self._quantize_backward = backward
        self._device: torch.device | None = None

    def _linear_roles(self) -> list[LinearRoles]:
        return [linear_roles("", "")]

    def num_quantizers(self, mode: str) -> int:
        """Return one for each direction that quantises."""
        wanted = {"forward": self._quantize_forward, "backward": self._quantize_backward}
        return int(wanted.get(mode, False))

    def _state_device(self) -> torch.device | None:
        return self._device

    def _wanted(self, beside: Beside) -> tuple[bool, bool]:
        """Whether this operation itself quantises in forward and in backward."""
        forward = self._quantize_forward and not beside.output
        return forward, self._quantize_backward and not beside.gradient

    def _is_native(self, beside: Beside = ALONE) -> bool:
        return not any(self._wanted(beside)) and super()._is_native(beside)

    def _append_to(self, program: Any, label: str) -> None:
        program.identity(label)

    def _init_scales(self, recipe: Recipe, epoch: int) -> None:
        """Make no state here; the operation's own forward makes it if it quantises."""

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Quantise if `forward` is set."""
        if is_in_graph():
            return self._traced(ctx, input_)
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        recipe = FP8GlobalStateManager.get_fp8_recipe() if enabled else None
        forward, backward = self._wanted(ctx.beside)
        backward = backward and recipe is not None and recipe.backward_override is None
        ctx.recipe = recipe if backward else None  # type: ignore[attr-defined]
        if recipe is None:
            return input_
        self._device = input_.device
        self.reset_recipe_state(recipe=recipe)
        self._take_part()
        former = self._noted(recipe, (forward, backward), grads=ctx.requires_grad)
        return self._quantized(input_, recipe, "forward", former) if forward else input_

    def _noted(self, recipe: Recipe, wanted: tuple[bool, bool], *, grads: bool) -> Any:
        """Note the scale in activation recomputation; return that of the first run in the second one."""
        if not recipe.delayed() or not any(wanted) or not scale_tape.is_in_phase():
            return None
        state = self._delayed_state("forward" if wanted[0] else "backward")
        return None if state is None else scale_tape.scales(self, state.slots.id, 0, grads)

    def _traced(self, ctx: OperationContext, x: torch.Tensor) -> torch.Tensor:
        """Return the input of a call that quantises nothing.

        Raises
        ------
        UnsupportedError
            If the call would quantise.
        """
        from te_fast.graphs.region import key_of_region

        ctx.recipe = None  # type: ignore[attr-defined]
        if key_of_region()[0] and any(self._wanted(ctx.beside)):
            message = (
                "Quantize: a graph passes quantised tensors only from operation to operation of one chain; put "
                "Quantize beside a linear operation, or quantise outside of compiled functions"
            )
            raise UnsupportedError(message)
        return x

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Quantise the gradient if `backward` is set."""
        recipe: Recipe | None = ctx.recipe  # type: ignore[attr-defined]
        if recipe is None:
            return grad_output, ()
        return self._quantized(grad_output, recipe, "backward"), ()

    def _quantized(
        self,
        x: torch.Tensor,
        recipe: Recipe,
        mode: Literal["forward", "backward"],
        former: tuple[torch.Tensor, int] | None = None,
    ) -> Any:
        if x.numel() == 0 or is_quantized(x):
            return x
        state, is_forward = self._delayed_state(mode), mode == "forward"
        layouts: dict[str, Any] = {"rowwise": True, "columnwise": True}
        quantizer = quantizer_of(recipe, "input" if is_forward else "grad", state, 0, **layouts)
        if state is not None:
            if former is None:
                state.slots.mark_ran()
            else:  # a recomputation, whose maximum is recorded
                scales: Any = quantizer
                scales.scale, scales.amax = former[0][:1], torch.zeros_like(former[0][:1])
        with torch.no_grad():
            return quantizer.quantize(x.detach())

    def extra_repr(self) -> str:
        """Directions."""
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"
