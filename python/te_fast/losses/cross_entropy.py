"""Cross entropy, also of logits whose vocabulary is split between ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import distributed
from torch.autograd.function import once_differentiable
from torch.nn import functional

from te_fast.errors import DtypeError, ShapeError


class _SplitVocabulary(torch.autograd.Function):
    """Loss of each row, of logits ``(rows, vocabulary / ranks)``."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, smoothing: float, group: Any
    ) -> torch.Tensor:
        columns, ranks = logits.shape[1], distributed.get_world_size(group)
        column = target - columns * distributed.get_rank(group)
        is_here = (column >= 0) & (column < columns)
        column = torch.where(is_here, column, 0)
        values = logits.float()
        largest = values.amax(1)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        values = values - largest[:, None]
        zero = values.new_zeros(())
        predicted = torch.where(is_here, values.gather(1, column[:, None])[:, 0], zero)
        # Only with smoothing: logits of minus infinity have no mean.
        total = values.sum(1) if smoothing else torch.zeros_like(predicted)
        sums = torch.stack([values.exp_().sum(1), predicted, total])
        distributed.all_reduce(sums, distributed.ReduceOp.SUM, group)
        log_sum, predicted, total = sums[0].log(), sums[1], sums[2]
        uniform = smoothing / (columns * ranks)
        # Their sum would round what large logits differ by.
        ctx.save_for_backward(logits, largest, log_sum, column, is_here)
        ctx.smoothing, ctx.uniform = smoothing, uniform
        return log_sum - (1.0 - smoothing) * predicted - uniform * total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, largest, log_sum, column, is_here = ctx.saved_tensors
        share = (logits.float() - largest[:, None]).sub_(log_sum[:, None]).exp_()
        share.sub_(ctx.uniform)
        wanted = torch.where(is_here, -(1.0 - ctx.smoothing), 0.0).to(share.dtype)
        share.scatter_add_(1, column[:, None], wanted[:, None])
        return share.mul_(grad[:, None]).to(logits.dtype), None, None, None


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross entropy of logits, computed in FP32.

    On one rank it is torch's own; of a split vocabulary two small reductions go between the ranks, and backward
    computes the softmax again rather than keeping it.

    Parameters
    ----------
    inp : torch.Tensor
        Logits ``(..., vocabulary)``; on each of several ranks an equal share of the columns, in the order of ranks.
    target : torch.Tensor
        Integers ``(...)`` of the whole vocabulary.
    label_smoothing : float, default = 0.0
        Share of the target's probability that all of the vocabulary has.
    reduce_loss : bool, default = False
        Return the mean over targets that are not ignored, 0 where all are.
    dist_process_group : torch.distributed.ProcessGroup, optional
        Ranks that the vocabulary is split between.
    ignore_idx : int, default = -100
        Target without loss and gradient.
    is_cg_capturable : bool, default = False
        Nothing here waits for the GPU: captured graphs can hold it either way.
    _input : torch.Tensor, optional
        Deprecated name of `inp`.

    Returns
    -------
    torch.Tensor
        FP32, of the target's shape, or of one element.

    Raises
    ------
    ShapeError
        If the target's shape is not that of the rows.
    DtypeError
        If logits are no floating-point numbers, or targets no integers.

    See Also
    --------
    torch.nn.functional.cross_entropy : Of a vocabulary that one rank has.

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
    _check(inp, target)
    rows, columns = inp.reshape(-1, inp.shape[-1]), target.reshape(-1).long()
    if dist_process_group is None or distributed.get_world_size(dist_process_group) == 1:
        losses = functional.cross_entropy(
            rows.float(),
            columns,
            ignore_index=ignore_idx,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    else:
        losses = _SplitVocabulary.apply(rows, columns, float(label_smoothing), dist_process_group)
        losses = torch.where(columns == ignore_idx, 0.0, losses)
    if reduce_loss:
        return losses.sum() / (columns != ignore_idx).sum().clamp(min=1)
    return losses.reshape(target.shape)


def _check(inp: torch.Tensor, target: torch.Tensor) -> None:
    if not inp.is_floating_point() or target.is_floating_point() or target.dtype is torch.bool:
        message = f"parallel_cross_entropy: expected logits and integers, got {inp.dtype} and {target.dtype}"
        raise DtypeError(message)
    if inp.dim() == 0 or inp.shape[:-1].numel() != target.numel():
        message = (
            f"parallel_cross_entropy: the target must have one integer for each row of logits {list(inp.shape)}, got "
            f"shape {list(target.shape)}"
        )
        raise ShapeError(message)
