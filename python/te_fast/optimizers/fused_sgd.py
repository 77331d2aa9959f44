"""SGD on torch's fused kernel, under Transformer Engine's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.optim.sgd import sgd

from te_fast.errors import ArgumentError, UnsupportedError
from te_fast.optimizers.layouts import has_gaps, laid_out_as
from te_fast.optimizers.options import check_not_negative
from te_fast.optimizers.zeroing import forgets, warn_of_set_grad_none
from te_fast.tensor.dtensors import local_part, sharded_like, shared_as


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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Parameters
        ----------
        closure : Callable, optional
            Computes the loss and the gradients again.

        Returns
        -------
        object
            The closure's result.

        Raises
        ------
        UnsupportedError
            For sparse gradients, and for a parameter whose memory has gaps. No parameter has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        """Update a group's parameters that have gradients; of a ``DTensor``, this rank's part."""
        given: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        kept: list[torch.Tensor | None] = []
        self._init_group(group, given, grads, kept)
        locals_ = [local_part(param) for param in given]
        grads = [
            laid_out_as(local_part(shared_as(grad, param)), local)
            for param, grad, local in zip(given, grads, locals_, strict=True)
        ]
        buffers = self._momentum(group, grads, kept)
        options = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "fused")
        sgd(
            locals_,
            grads,
            buffers,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            **{name: group[name] for name in options},
        )
        # Without momentum there are no buffers.
        for param, buffer in zip(given, buffers, strict=False):
            self.state[param]["momentum_buffer"] = sharded_like(param, buffer)

    def _momentum(
        self, group: dict[str, Any], grads: list[torch.Tensor], kept: list[torch.Tensor | None]
    ) -> list[Any]:
        """Return the momenta of gradients, which begin with zeros for parameters that have none yet.

        torch's kernel takes a list in which all parameters have momentum, or none. In the latter case it leaves
        uninitialised memory behind if ``found_inf`` skips the step.
        """
        is_first = all(buffer is None for buffer in kept)
        if is_first and group["dampening"] != 0.0:  # torch does not dampen first gradients
            return kept
        # Without momentum none is kept.
        return [
            torch.zeros_like(grad) if buffer is None else laid_out_as(local_part(buffer), grad)
            for grad, buffer in zip(grads, kept, strict=False)
        ]

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
