"""Dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fast.errors import ArgumentError
from te_fast.ops.common import refuse_type
from te_fast.ops.op import ALONE, BasicOperation, Beside, OperationContext
from te_fast.runtime.arguments import check_numbers


class Dropout(BasicOperation):
    """Set entries to zero with probability `p` in training, and multiply the others by ``1/(1-p)``.

    Parameters
    ----------
    p : float
        Probability, at least 0 and less than 1.

    See Also
    --------
    torch.nn.Dropout : torch's.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.Dropout(0.5).eval()(torch.ones(1, 2))
    tensor([[1., 1.]])
    """

    _mode_names = frozenset({"training", "dropout_probability"})
    # Evaluation must have the bits of training, where the next operation reads a tensor from memory.
    _ends_program = True

    def __init__(self, p: float) -> None:
        super().__init__()
        check_numbers("Dropout", p=p)
        if not 0.0 <= p < 1.0:
            message = f"Dropout: p must be at least 0 and less than 1, got {p!r}"
            raise ArgumentError(message)
        self.dropout_probability = p

    def _is_native(self, beside: Beside = ALONE) -> bool:
        return not (self.training and self.dropout_probability) and super()._is_native(beside)

    def _append_to(self, program: Any, label: str) -> None:
        program.identity(label)

    def _torch_function(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        return self._drop if type(self) is Dropout else None

    def _drops(self, x: torch.Tensor) -> bool:
        # torch.native_dropout returns an empty input itself, and torch refuses a leaf as a result.
        return self.training and self.dropout_probability != 0.0 and x.numel() != 0

    def _drop(self, input_: torch.Tensor) -> torch.Tensor:
        if not self._drops(input_):
            return input_
        self._check_type(input_)
        return torch.native_dropout(input_, self.dropout_probability, True)[0]

    def _check_type(self, x: torch.Tensor) -> None:
        if not (x.is_floating_point() or x.is_complex()):
            refuse_type(type(self).__name__, x, "floating or complex")

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Draw the mask, one byte per entry, and keep it."""
        if not self._drops(input_):
            return input_
        self._check_type(input_)
        y, mask = torch.native_dropout(input_, self.dropout_probability, True)
        if ctx.requires_grad:
            ctx.save_for_backward(mask)
            ctx.factor = 1.0 / (1.0 - self.dropout_probability)  # type: ignore[attr-defined]
        return y

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Apply the same mask."""
        if not ctx.saved_tensors:
            return grad_output, ()
        (mask,) = ctx.saved_tensors
        assert mask is not None
        factor: float = ctx.factor  # type: ignore[attr-defined]
        return torch.ops.aten.native_dropout_backward(grad_output, mask, factor), ()

    def extra_repr(self) -> str:
        """Probability."""
        return f"p={self.dropout_probability}"
