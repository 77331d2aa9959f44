"""``y = x + b``."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.errors import ShapeError
from te_fast.ops.common import parameter_options, size_of_ranks, sizes_of, to_real
from te_fast.ops.op import BasicOperation, OperationContext
from te_fast.parallel.checkpoint import Share
from te_fast.parallel.ranks import divided


class Bias(BasicOperation):
    """Add a bias, zero at first.

    Parameters
    ----------
    size : int
        Size of the last dimension.
    device, dtype : optional
        As of :class:`BasicLinear`.
    tensor_parallel : bool, default = False
        Ranks share the bias.
    tensor_parallel_group : torch.distributed.ProcessGroup, optional
        These ranks; all by default.

    See Also
    --------
    Linear : A product and a bias.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import ops
    >>> ops.Bias(2, device="cpu")(torch.ones(1, 2))
    tensor([[1., 1.]], grad_fn=<ProgramBackward>)
    """

    bias: torch.Tensor
    _needed_names = ("bias",)
    _hands_gradient_on = True
    #: Whether ranks add whole biases, before their results are summed.
    _is_summed = False

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if sizes_of((size,), name, "size")[0] < 0:
            message = f"{name}: size must not be negative, got {size}"
            raise ShapeError(message)
        ranks = 1
        if tensor_parallel:
            ranks = size_of_ranks(tensor_parallel_group, name, "tensor_parallel_group")
        self.tensor_parallel = ranks > 1
        self.tensor_parallel_group = tensor_parallel_group if ranks > 1 else None
        self.tensor_parallel_size = ranks
        self.local_size = divided(name, "size", size, ranks)
        bias = torch.empty(self.local_size, **parameter_options(device, dtype, name))
        self.register_parameter("bias", torch.nn.Parameter(bias))
        if not bias.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zero; a bias on the meta device gets memory first."""
        torch.nn.init.zeros_(to_real(self, "bias"))

    def _shares_of_parameters(self) -> dict[str, Share]:
        """Return which parameters ranks share."""
        if not self.tensor_parallel:
            return {}
        group = self.tensor_parallel_group
        group = torch.distributed.group.WORLD if group is None else group
        return {"bias": Share(0, group, is_summed=self._is_summed)}

    def pre_first_fuser_forward(self) -> None:
        """Give a bias on the meta device memory."""
        if self.bias.is_meta:
            self.reset_parameters()

    def _result_type(
        self,
        dtype: torch.dtype,
        extras: tuple[torch.dtype, ...],
        autocast: torch.dtype | None,
    ) -> torch.dtype:
        # The result of a linear operation in autocast's type keeps this type, as with torch.nn.Linear.
        return dtype if autocast else torch.promote_types(dtype, self.bias.dtype)

    def _append_to(self, program: Any, label: str) -> None:
        program.bias(label, self._parameters, "bias", self.local_size)

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Add the bias; save nothing for backward."""
        if input_.dim() == 0 or input_.shape[-1] != self.local_size:
            message = (
                f"{type(self).__name__}: the input's last dimension must be {self.local_size}, got a "
                f"tensor of shape {list(input_.shape)}"
            )
            raise ShapeError(message)
        if not torch.is_autocast_enabled(input_.device.type):
            return input_ + self.bias
        return input_ + self.bias.to(input_.dtype)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        """Sum the rows."""
        db = grad_output.reshape(-1, self.local_size).float().sum(0)
        return grad_output, (db.to(self.bias.dtype),)

    def extra_repr(self) -> str:
        """Size."""
        return f"size={self.local_size}"
