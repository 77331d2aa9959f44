"""L2 normalisation."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.ops.common import refuse_type
from te_fast.ops.op import BasicOperation, OperationContext
from te_fast.runtime.arguments import check_numbers


class L2Normalization(BasicOperation):
    """``x / sqrt(sum(x²) + eps)`` over the last dimension.

    Parameters
    ----------
    eps : float, default = 1e-6
        Added to the sum of squares.
    seq_length, micro_batch_size : int, optional
        Sizes for the warm-up of Transformer Engine's just-in-time kernels; they have no effect in te_fast.

    See Also
    --------
    RMSNorm : Of the mean, with a weight.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.L2Normalization()(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        check_numbers(type(self).__name__, eps=eps)
        self.eps = eps

    def _formula(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Normalise in FP32 and round once; keep the input."""
        if not input_.is_floating_point():
            refuse_type(type(self).__name__, input_, "floating")
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
        return self._formula(input_.float()).to(input_.dtype)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[()]]:
        """Return ``r g - x r³ (x · g)`` for ``y = r x`` at the kept input, where ``r² = 1 / (x · x + eps)``."""
        (x,) = ctx.saved_tensors or ()
        assert x is not None
        wide, grad = x.float(), grad_output.float()
        r = torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)
        along = (wide * grad).sum(-1, keepdim=True)
        return (r * grad - wide * (r.pow(3) * along)).to(x.dtype), ()

    def extra_repr(self) -> str:
        """Epsilon."""
        return f"eps={self.eps}"
