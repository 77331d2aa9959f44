"""Cross entropy, also of logits whose vocabulary is split between ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from te_fast.errors import ArgumentError, DtypeError, RanksError, ShapeError, StateError
from te_fast.runtime.second_order import differentiable_once


class _RowLosses(torch.autograd.Function):
    """Loss of each row of logits ``(rows, vocabulary / ranks)``; backward computes the softmax again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        smoothing: float,
        group: Any,
        overwrites: bool,
    ) -> torch.Tensor:
        columns, (rank, ranks) = logits.shape[1], _place(group)
        column = target - columns * rank
        is_here = (column >= 0) & (column < columns)
        column = torch.where(is_here, column, 0)
        values = logits.float()
        largest = values.amax(1)
        if ranks > 1:
            _reduce(largest, distributed.ReduceOp.MAX, group)
        values = values - largest[:, None]
        zero = values.new_zeros(())
        predicted = torch.where(is_here, values.gather(1, column[:, None])[:, 0], zero)
        # Only with smoothing: logits of minus infinity have no mean.
        total = values.sum(1) if smoothing else torch.zeros_like(predicted)
        sums = torch.stack([values.exp_().sum(1), predicted, total, is_here.float()])
        if ranks > 1:
            _reduce(sums, distributed.ReduceOp.SUM, group)
        log_sum, predicted, total = sums[0].log(), sums[1], sums[2]
        # As in Transformer Engine: no rank has the target.
        predicted = predicted.masked_fill(sums[3] == 0, -torch.inf)
        uniform = smoothing / (columns * ranks)
        # Summing first would round away the differences of large logits.
        ctx.save_for_backward(logits, largest, log_sum, column, is_here)
        ctx.smoothing, ctx.uniform, ctx.overwrites = smoothing, uniform, overwrites
        ctx.is_overwritten = False
        return log_sum - (1.0 - smoothing) * predicted - uniform * total

    @staticmethod
    @differentiable_once("parallel_cross_entropy")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.is_overwritten:
            message = (
                "parallel_cross_entropy: with overwrite_input=True backward runs once, for it leaves the gradient "
                "where the logits were; leave overwrite_input at its default to run it again"
            )
            raise StateError(message)
        logits, largest, log_sum, column, is_here = ctx.saved_tensors
        share = (logits.float() - largest[:, None]).sub_(log_sum[:, None]).exp_()
        share.sub_(ctx.uniform)
        wanted = torch.where(is_here, -(1.0 - ctx.smoothing), 0.0).to(share.dtype)
        share.scatter_add_(1, column[:, None], wanted[:, None])
        share.mul_(grad[:, None])
        ctx.is_overwritten = ctx.overwrites
        result = logits.detach().copy_(share) if ctx.overwrites else share.to(logits.dtype)
        return result, None, None, None, None


def _place(group: Any) -> tuple[int, int]:
    """Return this rank's number and the number of ranks."""
    if group is None:
        return 0, 1
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        message = "parallel_cross_entropy: this rank is not in dist_process_group; give the group that has it"
        raise RanksError(message)
    return rank, ranks


def _reduce(values: torch.Tensor, op: Any, group: Any) -> None:
    if torch.compiler.is_compiling():
        distributed.all_reduce(values, op, group)
        return
    try:
        distributed.all_reduce(values, op, group)
    except RuntimeError as error:
        message = (
            "parallel_cross_entropy: a reduction over dist_process_group failed; another rank has stopped, is late, or "
            f"does something else: {error}"
        )
        raise RanksError(message) from error


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross entropy of logits, computed in FP32.

    On one rank it is torch's own. If ranks share the vocabulary, it takes two small reductions, and backward computes
    the softmax again instead of keeping it.

    Parameters
    ----------
    inp : torch.Tensor
        Logits ``(..., vocabulary)``; with several ranks, each has an equal share of the columns, in the order of ranks.
    target : torch.Tensor
        Integers ``(...)``, numbers in the whole vocabulary. With several ranks the loss of another number is infinite.
    label_smoothing : float, default = 0.0
        Probability that is spread over the whole vocabulary.
    reduce_loss : bool, default = False
        Return the mean over targets that are not ignored; 0 if all are ignored.
    dist_process_group : torch.distributed.ProcessGroup, optional
        Ranks that the vocabulary is split between.
    ignore_idx : int, default = -100
        Target without loss and gradient.
    is_cg_capturable : bool, default = False
        Has no effect: the function never waits for the GPU, so graphs can always capture it.
    overwrite_input : bool, default = False
        Backward writes the gradient to the memory of `inp`, which must be contiguous and must not be used afterwards.
        Backward then runs only once. Compiled graphs allocate the gradient.
    _input : torch.Tensor, optional
        Deprecated name of `inp`.

    Returns
    -------
    torch.Tensor
        FP32, of the target's shape, or of one element.

    Raises
    ------
    ShapeError
        If the target's shape is not that of the rows, or logits to be overwritten are not contiguous.
    DtypeError
        If logits are not floating-point numbers, or targets are not integers.
    ArgumentError
        If `label_smoothing` is not from 0 to 1.
    RanksError
        If this rank is not in the group, or another rank is gone. Ranks do not compare their shapes, since the function
        would have to wait for the GPU.

    See Also
    --------
    torch.nn.functional.cross_entropy : Cross entropy of one rank.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch import parallel_cross_entropy
    >>> logits = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    >>> parallel_cross_entropy(logits, torch.tensor([[0, 1, -100], [2, 3, 4]])).shape
    torch.Size([2, 3])
    """
    if _input is not None:
        message = "parallel_cross_entropy: _input is deprecated; give inp"
        warnings.warn(message, FutureWarning, stacklevel=2)
        inp = _input
    _check(inp, target, label_smoothing)
    rows, columns = inp.reshape(-1, inp.shape[-1]), target.reshape(-1).long()
    overwrites = overwrite_input and not torch.compiler.is_compiling()
    if overwrite_input and not inp.is_contiguous():
        message = (
            "parallel_cross_entropy: overwrite_input=True needs contiguous logits, got strides "
            f"{inp.stride()} of shape {list(inp.shape)}"
        )
        raise ShapeError(message)
    if _place(dist_process_group)[1] == 1 and not overwrites:
        losses = functional.cross_entropy(
            rows.float(),
            columns,
            ignore_index=ignore_idx,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    else:
        losses = _RowLosses.apply(
            rows, columns, float(label_smoothing), dist_process_group, overwrites
        )
        losses = torch.where(columns == ignore_idx, 0.0, losses)
    if reduce_loss:
        return losses.sum() / (columns != ignore_idx).sum().clamp(min=1)
    return losses.reshape(target.shape)


def _check(inp: Any, target: Any, smoothing: float) -> None:
    if not (isinstance(inp, torch.Tensor) and isinstance(target, torch.Tensor)):
        message = (
            "parallel_cross_entropy: expected tensors of logits and of integers, got "
            f"{type(inp).__name__} and {type(target).__name__}"
        )
        raise DtypeError(message)
    if not 0.0 <= smoothing <= 1.0:
        message = f"parallel_cross_entropy: label_smoothing must be from 0 to 1, got {smoothing}"
        raise ArgumentError(message)
    if not inp.is_floating_point() or target.is_floating_point() or target.dtype is torch.bool:
        message = f"parallel_cross_entropy: expected logits and integers, got {inp.dtype} and {target.dtype}"
        raise DtypeError(message)
    if inp.dim() == 0 or inp.shape[:-1].numel() != target.numel():
        message = (
            f"parallel_cross_entropy: the target must have one integer for each row of logits {list(inp.shape)}, got "
            f"shape {list(target.shape)}"
        )
        raise ShapeError(message)
