"""SGD on torch's fused kernel, under Transformer Engine's name."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from te_fast.errors import ArgumentError, UnsupportedError
from te_fast.optimizers.layouts import has_gaps, laid_out_as
from te_fast.optimizers.options import check_not_negative
from te_fast.optimizers.zeroing import forgets, warn_of_set_grad_none


class FusedSGD(torch.optim.SGD):
    """Stochastic gradient descent in one launch: ``torch.optim.SGD(fused=True)``.

    A parameter may get its first gradient after the others. Its momentum begins with zeros then, so that `dampening`
    affects its first gradient.

    Parameters
    ----------
    params : iterable
        Parameters or groups of them.
    lr : float
        Learning rate.
    momentum : float, default = 0.0
        Momentum.
    dampening : float, default = 0.0
        Dampening of the momentum.
    weight_decay : float, default = 0.0
        Weight decay.
    nesterov : bool, default = False
        Nesterov's momentum.
    wd_after_momentum : bool, default = False
        Not supported yet.
    materialize_master_grads : bool, default = True
        For apex's amp, which te_fast does not support: False raises.
    set_grad_none : bool, optional
        Deprecated: give `set_to_none` to :meth:`zero_grad`.

    Raises
    ------
    UnsupportedError
        For an argument that is not supported; by a step, for a parameter whose memory has gaps.
    ArgumentError
        If `lr` is missing.
    ValueError
        For values that ``torch.optim.SGD`` refuses.

    See Also
    --------
    FusedAdam : Adam and AdamW.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import FusedSGD
    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> weight.grad = torch.ones(4)
    >>> FusedSGD([weight], lr=0.25).step()
    >>> weight.data
    tensor([0.7500, 0.7500, 0.7500, 0.7500])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        if lr is None:
            message = "FusedSGD: lr is missing; give a learning rate"
            raise ArgumentError(message)
        if wd_after_momentum or not materialize_master_grads:
            name = "wd_after_momentum" if wd_after_momentum else "materialize_master_grads"
            message = f"FusedSGD: {name} is not supported; leave it at its default"
            raise UnsupportedError(message)
        check_not_negative("FusedSGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum == 0.0 or dampening != 0.0):
            message = (
                f"FusedSGD: nesterov=True needs a momentum and no dampening, got momentum={momentum} and "
                f"dampening={dampening}"
            )
            raise ArgumentError(message)
        warn_of_set_grad_none("FusedSGD", set_grad_none)
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=True,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of torch's optimizer, and the options that it does not know, for copies and pickles."""
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        momentum_buffer_list: list[torch.Tensor | None],
    ) -> bool:
        """Collect a group's tensors, and give momentum to parameters that have none yet.

        torch's kernel takes a list in which all parameters have momentum, or none. In the latter case it leaves
        uninitialised memory behind if ``found_inf`` skips the step.
        """
        if group is self.param_groups[0]:  # before any group is written
            self._check_parameters()
        has_sparse: bool = super()._init_group(group, params, grads, momentum_buffer_list)
        for at, param in enumerate(params):
            grads[at] = laid_out_as(grads[at], param)
        if group["momentum"] == 0.0:
            return has_sparse
        is_first = all(buffer is None for buffer in momentum_buffer_list)
        if is_first and group["dampening"] != 0.0:  # torch does not dampen first gradients
            return has_sparse
        for at, (grad, buffer) in enumerate(zip(grads, momentum_buffer_list, strict=True)):
            momentum_buffer_list[at] = (
                torch.zeros_like(grad) if buffer is None else laid_out_as(buffer, grad)
            )
        return has_sparse

    def _check_parameters(self) -> None:
        """Refuse parameters and gradients that the step cannot take."""
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                message = f"FusedSGD: sparse gradients are not supported, got {param.grad.layout}"
                raise UnsupportedError(message)
            if has_gaps(param):
                message = (
                    "FusedSGD: a parameter's memory must have no gaps, got shape "
                    f"{list(param.shape)} and strides {param.stride()}; make it contiguous"
                )
                raise UnsupportedError(message)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros.

        Parameters
        ----------
        set_to_none : bool, optional
            Whether to drop them; True by default.

        Raises
        ------
        ArgumentError
            If the constructor was given another `set_grad_none`.
        """
        super().zero_grad(set_to_none=forgets("FusedSGD", set_to_none, self.set_grad_none))
