"""Rounding to FP8 in the middle of a chain."""

from __future__ import annotations

from typing import Any, Literal

import torch

from te_fast.ops.op import ALONE, BasicOperation, Beside, OperationContext
from te_fast.recipe import Recipe
from te_fast.runtime import scale_tape
from te_fast.runtime.global_state import FP8GlobalStateManager


class Quantize(BasicOperation):
    """Round to the values that the region's recipe gives FP8; the identity outside of a region.

    The result has the input's type: te_fast has no quantised tensors outside of its programs. What
    goes straight to a linear operation, or in backward straight back to one, maybe by way of its
    bias, is rounded there and once only, by that operation's scale; with nothing else to round the
    operation is no work at all. As in Transformer Engine, a recipe's ``backward_override`` leaves
    the gradient as it is.

    Parameters
    ----------
    forward : bool, default = True
        Round in forward.
    backward : bool, default = False
        Round the gradient in backward.

    See Also
    --------
    te_fast.pytorch.autocast : Says how.

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
        self._quantize_forward = forward
        self._quantize_backward = backward
        self._device: torch.device | None = None

    def num_quantizers(self, mode: str) -> int:
        """One in each direction that is rounded."""
        wanted = {"forward": self._quantize_forward, "backward": self._quantize_backward}
        return int(wanted.get(mode, False))

    def _state_device(self) -> torch.device | None:
        return self._device

    def _wanted(self, beside: Beside) -> tuple[bool, bool]:
        """Whether this operation itself rounds in forward and in backward."""
        forward = self._quantize_forward and not beside.output
        return forward, self._quantize_backward and not beside.gradient

    def _is_native(self, beside: Beside = ALONE) -> bool:
        return not any(self._wanted(beside)) and super()._is_native(beside)

    def _append_to(self, program: Any, label: str) -> None:
        program.identity(label)

    def _init_scales(self, recipe: Recipe, epoch: int) -> None:
        """Leave the state to a forward of its own, which there is where it rounds."""

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Round, if asked to in forward."""
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
        return self._rounded(input_, recipe, "forward") if forward else input_

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Round, if asked to in backward."""
        recipe: Recipe | None = ctx.recipe  # type: ignore[attr-defined]
        if recipe is None:
            return grad_output, ()
        return self._rounded(grad_output, recipe, "backward"), ()

    def _rounded(
        self, x: torch.Tensor, recipe: Recipe, mode: Literal["forward", "backward"]
    ) -> torch.Tensor:
        from te_fast import dispatch

        if x.numel() == 0:
            return x
        options: dict[str, Any] = {}
        state = self._delayed_state(mode)
        if state is not None:
            former = None
            if mode == "forward" and scale_tape.is_in_phase():
                former = scale_tape.scales(self, state.slots.id, 0, grads=True)
            if former is None:
                options = {"scale": state.scale, "amax": state.amax_history[0]}
                state.slots.mark_ran()
            else:  # a recomputation, whose maximum is recorded
                options = {"scale": former[0]}
        flat = x.reshape(-1, x.shape[-1] if x.dim() else 1).contiguous()
        role: Literal["input", "grad"] = "input" if mode == "forward" else "grad"
        quantized = dispatch.quantize(flat, recipe, role=role, **options)
        return dispatch.dequantize(quantized, x.dtype).view(x.shape)

    def extra_repr(self) -> str:
        """Directions."""
        return f"forward={self._quantize_forward}, backward={self._quantize_backward}"
