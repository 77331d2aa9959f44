"""Steps of optimizers over lists of tensors, with the arguments of Transformer Engine's extension.

They run on torch's fused kernels, which compute in FP32. Norms and copies of lists are in `te_fast.optimizers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fast.errors import UnsupportedError
from te_fast.optimizers.fused_adam import NO_CORRECTION
from te_fast.optimizers.layouts import laid_out_as, without_gaps
from te_fast.optimizers.multi_tensor import (
    are_lists,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)
from te_fast.tensor.masters import scales_of
from te_fast.tex.errors import ExtensionError, check_tensors

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

Lists = Sequence[list[torch.Tensor]]


def _check_lists(op: str, tensor_lists: Lists, *counts: int) -> None:
    if not are_lists(tensor_lists):
        message = f"{op}: tensor_lists must be a list of lists of tensors"
        raise ExtensionError(message)
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(lengths) not in counts or len(set(lengths)) != 1:
        expected = " or ".join(map(str, counts))
        message = f"{op}: expected {expected} lists of one length, got lengths {lengths}"
        raise ExtensionError(message)
    # torch's kernels would read beyond the memory of a tensor that is smaller than the first of its row.
    for row in zip(*tensor_lists, strict=True):
        if len({tensor.numel() for tensor in row}) != 1:
            message = (
                f"{op}: tensors at one place of all lists must have as many elements, got shapes "
                f"{[list(tensor.shape) for tensor in row]}"
            )
            raise ExtensionError(message)


class _Working:
    """Lists in the form for torch's fused kernels, which take tensors of one type and layout: the parameters'.

    The kernels work on copies of other tensors, which `keep` rounds.
    """

    def __init__(self, written: Lists, grads: list[torch.Tensor]) -> None:
        self._written = written
        mains = [without_gaps(tensor.float()) for tensor in written[0]]
        others = ([tensor.float() for tensor in tensors] for tensors in (*written[1:], grads))
        of_one_layout = [list(map(laid_out_as, each, mains)) for each in others]
        self.lists, self.grads = [mains, *of_one_layout[:-1]], of_one_layout[-1]

    def keep(self) -> None:
        """Write the results into tensors of other types and layouts."""
        pairs = [
            (target, result.reshape(target.shape))
            for each in zip(self._written, self.lists, strict=True)
            for target, result in zip(*each, strict=True)
            if target is not result
        ]
        if pairs:
            targets, results = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(targets, results)


def _adam(
    tensor_lists: Lists,
    rates: tuple[Any, float, float, float, float],
    step: torch.Tensor,
    mode: int,
    skip: torch.Tensor | None = None,
    scaled: torch.Tensor | None = None,
) -> None:
    grads, params, *moments = tensor_lists
    mains = moments.pop() if len(moments) == 3 else params
    if not params:
        return
    lr, beta1, beta2, eps, weight_decay = rates
    work = _Working([mains, *moments], grads)
    if scaled is not None:
        work.grads = [grad * scaled for grad in work.grads]
    function = torch._fused_adam_ if mode == 0 else torch._fused_adamw_
    function(
        work.lists[0],
        work.grads,
        work.lists[1],
        work.lists[2],
        [],
        [step] * len(params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )
    work.keep()
    if mains is not params:
        rounded = [main.reshape(p.shape) for main, p in zip(work.lists[0], params, strict=True)]
        if skip is None:
            torch._foreach_copy_(params, rounded)
        else:
            for param, main in zip(params, rounded, strict=True):
                param.copy_(torch.where(skip == 1, param, main.to(param.dtype)))


def _check_mode(op: str, mode: int) -> None:
    if mode not in (0, 1):
        message = f"{op}: mode must be 0 (Adam) or 1 (AdamW), got {mode}"
        raise ExtensionError(message)


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Make a step of Adam, in place.

    Parameters
    ----------
    chunk_size, noop_flag
        Not used, as in Transformer Engine, whose kernel propagates values that are not finite.
    tensor_lists : list of list of torch.Tensor
        Gradients, parameters, averages of gradients, averages of their squares; optionally master weights, which are
        updated and rounded into the parameters.
    lr, beta1, beta2, epsilon, weight_decay : float
        Adam's constants.
    step : int
        Number of this step; the first is 1.
    mode : int
        0: the decay is part of the gradient (Adam), 1: it is not (AdamW).
    bias_correction : int
        Whether to correct the averages of the first steps.

    Raises
    ------
    ExtensionError
        If lists or mode do not fit.

    See Also
    --------
    FusedAdam : The optimizer.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_adam
    >>> param, state = torch.ones(2), [[torch.zeros(2)], [torch.zeros(2)]]
    >>> flag = torch.zeros(1, dtype=torch.int)
    >>> multi_tensor_adam(0, flag, [[torch.ones(2)], [param], *state], 0.5, 0.9, 0.99, 0.0, 1, 1, 1, 0.0)
    >>> param
    tensor([0.5000, 0.5000])
    """
    _check_lists("multi_tensor_adam", tensor_lists, 4, 5)
    _check_mode("multi_tensor_adam", mode)
    if not tensor_lists[0]:
        return
    count = float(step) if bias_correction else NO_CORRECTION
    taken = torch.full((), count, dtype=torch.float32, device=tensor_lists[0][0].device)
    _adam(tensor_lists, (lr, beta1, beta2, epsilon, weight_decay), taken, mode)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Make a step of Adam whose numbers are on the device, so that a captured graph can repeat it.

    Parameters
    ----------
    noop_flag : torch.Tensor
        One number; 1 leaves everything as it is.
    tensor_lists : list of list of torch.Tensor
        Gradients, parameters, averages of gradients, averages of their squares.
    lr, step : torch.Tensor
        One float32 and one int32.
    inv_scale : torch.Tensor
        One float32, a factor of the gradients.
    chunk_size, beta1, beta2, epsilon, mode, bias_correction, weight_decay
        As of :func:`multi_tensor_adam`.

    Raises
    ------
    ExtensionError
        If lists or mode do not fit.

    See Also
    --------
    multi_tensor_adam : With numbers of Python.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_adam_capturable
    >>> param, state = torch.ones(2), [[torch.zeros(2)], [torch.zeros(2)]]
    >>> flag, step = torch.zeros(1, dtype=torch.int), torch.ones(1, dtype=torch.int)
    >>> lists, rate, one = [[torch.ones(2)], [param], *state], torch.tensor([0.5]), torch.ones(1)
    >>> multi_tensor_adam_capturable(0, flag, lists, rate, 0.9, 0.99, 0.0, step, 1, 1, 0.0, one)
    >>> param
    tensor([0.5000, 0.5000])
    """
    op = "multi_tensor_adam_capturable"
    _check_lists(op, tensor_lists, 4)
    _check_mode(op, mode)
    check_tensors(op, noop_flag=noop_flag, lr=lr, step=step, inv_scale=inv_scale)
    rates = lr.reshape(()), beta1, beta2, epsilon, weight_decay
    _capturable(noop_flag, tensor_lists, rates, step, mode, bias_correction, inv_scale)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """Do the same with a fifth list, of float32 master weights, which are rounded into the parameters.

    Parameters
    ----------
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale
        As of :func:`multi_tensor_adam_capturable`.

    Raises
    ------
    ExtensionError
        If lists or mode do not fit.

    See Also
    --------
    multi_tensor_adam_capturable : Without master weights.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_adam_capturable_master
    >>> param, master = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    >>> lists = [[torch.ones(2)], [param], [torch.zeros(2)], [torch.zeros(2)], [master]]
    >>> flag, step = torch.zeros(1, dtype=torch.int), torch.ones(1, dtype=torch.int)
    >>> rate, one = torch.tensor([0.5]), torch.ones(1)
    >>> multi_tensor_adam_capturable_master(0, flag, lists, rate, 0.9, 0.99, 0.0, step, 1, 1, 0.0, one)
    >>> param
    tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    op = "multi_tensor_adam_capturable_master"
    _check_lists(op, tensor_lists, 5)
    _check_mode(op, mode)
    check_tensors(op, noop_flag=noop_flag, lr=lr, step=step, inv_scale=inv_scale)
    rates = lr.reshape(()), beta1, beta2, epsilon, weight_decay
    _capturable(noop_flag, tensor_lists, rates, step, mode, bias_correction, inv_scale)


def _capturable(
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    rates: tuple[Any, float, float, float, float],
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    inv_scale: torch.Tensor,
) -> None:
    if not tensor_lists[0]:
        return
    count = step.reshape(()).float()
    if not bias_correction:
        count = torch.full_like(count, NO_CORRECTION)
    skip = (noop_flag.reshape(()) == 1).float()
    _adam(tensor_lists, rates, count, mode, skip, inv_scale.reshape(()).float())


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Make a step of gradient descent, in place.

    Parameters
    ----------
    chunk_size
        Not used: torch's functions choose their own chunks.
    noop_flag : torch.Tensor
        One number; if it is not 0, everything stays as it is.
    tensor_lists : list of list of torch.Tensor
        Gradients, parameters, momentum; optionally float16 copies of the parameters, which are written.
    wd, momentum, dampening, lr : float
        Weight decay, and the constants of the method.
    nesterov : bool
        Nesterov's momentum.
    first_run : bool
        Whether momentum begins with this step's gradients.
    wd_after_momentum : bool
        Not supported.
    scale : float
        Factor of the gradients.

    Raises
    ------
    ExtensionError
        If the lists do not fit.
    UnsupportedError
        If `wd_after_momentum` is set.

    See Also
    --------
    FusedSGD : The optimizer.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.optimizers import multi_tensor_sgd
    >>> param, flag = torch.ones(2), torch.zeros(1, dtype=torch.int)
    >>> lists = [[torch.ones(2)], [param], [torch.zeros(2)]]
    >>> multi_tensor_sgd(0, flag, lists, 0.0, 0.0, 0.0, 0.5, False, True, False, 1.0)
    >>> param
    tensor([0.5000, 0.5000])
    """
    _check_lists("multi_tensor_sgd", tensor_lists, 3, 4)
    check_tensors("multi_tensor_sgd", noop_flag=noop_flag)
    if wd_after_momentum and wd:
        message = "multi_tensor_sgd: wd_after_momentum=True is not supported; decay weights before"
        raise UnsupportedError(message)
    grads, params, buffers = tensor_lists[:3]
    if not params:
        return
    written = [params, buffers] if momentum else [params]
    work = _Working(written, grads)
    if scale != 1.0:
        work.grads = list(torch._foreach_mul(work.grads, scale))
    skip = (noop_flag.reshape(()) != 0).float()
    torch._fused_sgd_(
        work.lists[0],
        work.grads,
        work.lists[1] if momentum else [],
        weight_decay=wd,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=False,
        is_first_step=first_run,
        found_inf=skip,
    )
    work.keep()
    if len(tensor_lists) == 4:
        for copied, param in zip(tensor_lists[3], work.lists[0], strict=True):
            rounded = param.reshape(copied.shape).to(copied.dtype)
            copied.copy_(torch.where(skip == 1, copied, rounded))


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Compute scales of current or block scaling, and their inverses, from maxima.

    Parameters
    ----------
    chunk_size, noop_flag
        Not used, as `noop_flag` in Transformer Engine.
    tensor_lists : list of list of torch.Tensor
        float32: maxima, scales and inverse scales; the latter two are written.
    max_fp8 : float
        Largest value of the FP8 type.
    force_pow_2_scales : bool
        Round scales down to powers of two.
    epsilon : float
        Least maximum.

    Raises
    ------
    ExtensionError
        If the lists do not fit.
    """
    _check_lists("multi_tensor_compute_scale_and_scale_inv", tensor_lists, 3)
    for maxima, scales, inverse in zip(*tensor_lists, strict=True):
        scales.copy_(scales_of(maxima, max_fp8, epsilon, force_pow_2_scales))
        torch.reciprocal(scales, out=inverse)
