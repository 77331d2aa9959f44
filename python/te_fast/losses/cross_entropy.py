"""Cross entropy, also of logits whose vocabulary is split between ranks."""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any

import torch
from torch import distributed
from torch.autograd.graph import increment_version
from torch.nn import functional

from te_fast.errors import (
    ArgumentError,
    ArgumentIndexError,
    DtypeError,
    RanksError,
    ShapeError,
    StateError,
)
from te_fast.runtime import native
from te_fast.runtime.arguments import check_numbers
from te_fast.runtime.collectives import check_is_group
from te_fast.runtime.compiling import is_unseen
from te_fast.runtime.second_order import differentiable_once, no_forward_mode

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: An ignored target that no tensor of targets has: other numbers than targets are ignored elsewhere.
_NO_TARGET = -(2**63)


class _Losses(torch.autograd.Function):
    """Loss of each row of whole logits ``(rows, vocabulary)``; keeps the logits and two numbers per row."""

    jvp = no_forward_mode("parallel_cross_entropy")

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        smoothing: float,
        ignored: int,
        overwrites: bool,
    ) -> torch.Tensor:
        losses, statistics = native.cross_entropy_forward(logits, target, ignored, smoothing, True)
        ctx.save_for_backward(logits, target, statistics)
        ctx.smoothing, ctx.ignored = smoothing, ignored
        ctx.overwrites, ctx.is_overwritten = overwrites, False
        return losses

    @staticmethod
    @differentiable_once("parallel_cross_entropy")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_overwritten(ctx)
        logits, target, statistics = ctx.saved_tensors
        result = _native_gradient(ctx, logits, target, statistics, grad, None, ctx.ignored)
        return result, None, None, None, None


class _PartLosses(torch.autograd.Function):
    """Loss of each row of which every rank of a group has a part ``(rows, columns)``.

    Sums of a part are relative to its own largest logit, until ranks know the largest of all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        smoothing: float,
        group: Any,
        overwrites: bool,
    ) -> torch.Tensor:
        width = logits.shape[1]
        most, exponentials, total = _part(logits, smoothing)
        largest, first, vocabulary = _reduced_maxima(most, width, group)
        column = target - first
        is_here = (column >= 0) & (column < width)
        column = torch.where(is_here, column, -1)
        less = most - largest
        exponentials = exponentials * less.exp()
        # Logits that are all minus infinity are relative to 0.
        total = torch.where(less == -torch.inf, total, total + width * less)
        predicted = torch.zeros_like(most)
        if width:
            logit = logits.gather(1, column.clamp(min=0)[:, None])[:, 0].float()
            predicted = torch.where(is_here, logit - largest, predicted)
        sums = torch.stack([exponentials, predicted, total, is_here.float()])
        if _place(group)[1] > 1:
            _reduce(sums, distributed.ReduceOp.SUM, group)
        log_sum, predicted, total = sums[0].log(), sums[1], sums[2]
        # As in Transformer Engine: no rank has the target.
        predicted = predicted.masked_fill(sums[3] == 0, -torch.inf)
        # Summing first would round away the differences of large logits.
        ctx.save_for_backward(logits, column, torch.stack([largest, log_sum]), vocabulary)
        ctx.smoothing, ctx.overwrites, ctx.is_overwritten = smoothing, overwrites, False
        losses = log_sum - (1.0 - smoothing) * predicted
        return losses - smoothing / vocabulary * total if smoothing else losses

    @staticmethod
    @differentiable_once("parallel_cross_entropy")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _refuse_overwritten(ctx)
        logits, column, statistics, vocabulary = ctx.saved_tensors
        if has_kernels(logits):
            result = _native_gradient(ctx, logits, column, statistics, grad, vocabulary, _NO_TARGET)
        else:
            result = _torchs_gradient(ctx, logits, column, statistics, grad, vocabulary)
        return result, None, None, None, None


def has_kernels(logits: torch.Tensor) -> bool:
    """Tell whether te_fast's kernels take logits; compilers fuse torch's operations instead."""
    is_known = logits.device.type in ("cpu", "cuda") and logits.dtype in _DTYPES
    return is_known and is_unseen(logits)


def _refuse_overwritten(ctx: Any) -> None:
    if ctx.is_overwritten:
        message = (
            "parallel_cross_entropy: with overwrite_input=True backward runs once, for it leaves the gradient "
            "where the logits were; leave overwrite_input at its default to run it again"
        )
        raise StateError(message)


def _native_gradient(
    ctx: Any,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    grad: torch.Tensor,
    vocabulary: torch.Tensor | None,
    ignored: int,
) -> torch.Tensor:
    # Transposed logits would lend the gradient their strides, and kernels write rows.
    rows = torch.contiguous_format
    result = logits.detach() if ctx.overwrites else torch.empty_like(logits, memory_format=rows)
    native.cross_entropy_backward(
        logits, target, statistics, grad, vocabulary, result, ignored, ctx.smoothing
    )
    if ctx.overwrites:
        increment_version(logits)
        ctx.is_overwritten = True
    return result


def _part(logits: torch.Tensor, smoothing: float) -> Any:
    """Return the largest logit of each row, and the sums of exponentials and of logits relative to it.

    Without smoothing the last is 0, since logits of minus infinity have no mean.
    """
    if has_kernels(logits):
        return native.cross_entropy_part(logits, smoothing)
    zeros = logits.new_zeros(logits.shape[0], dtype=torch.float32)
    if not logits.shape[1]:
        return zeros - torch.inf, zeros, zeros
    most = logits.amax(1).float()
    values = logits.float() - most.masked_fill(most == -torch.inf, 0.0)[:, None]
    total = values.sum(1) if smoothing else zeros
    return most, values.exp_().sum(1), total


def _torchs_gradient(
    ctx: Any,
    logits: torch.Tensor,
    column: torch.Tensor,
    statistics: torch.Tensor,
    grad: torch.Tensor,
    vocabulary: torch.Tensor,
) -> torch.Tensor:
    if not logits.shape[1]:
        return torch.empty_like(logits)
    largest, log_sum = statistics
    share = (logits.float() - largest[:, None]).sub_(log_sum[:, None]).exp_()
    if ctx.smoothing:
        share.sub_(ctx.smoothing / vocabulary)
    wanted = torch.where(column < 0, 0.0, ctx.smoothing - 1.0).to(share.dtype)
    share.scatter_add_(1, column.clamp(min=0)[:, None], wanted[:, None])
    share.mul_(grad[:, None])
    ctx.is_overwritten = ctx.overwrites
    return logits.detach().copy_(share) if ctx.overwrites else share.to(logits.dtype)


def _reduced_maxima(
    largest: torch.Tensor, width: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest logit of each row over ranks, the number of this rank's first column, and of all columns.

    Ranks tell each other their widths by the reduction of the maxima, so that nothing waits for the GPU.
    """
    rank, ranks = _place(group)
    widths = largest.new_zeros(ranks)
    widths[rank] = width
    if ranks > 1:
        both = torch.cat([largest, widths])
        _reduce(both, distributed.ReduceOp.MAX, group)
        largest, widths = both[:-ranks], both[-ranks:]
    return largest, widths[:rank].sum().long(), widths.sum()


def _place(group: Any) -> tuple[int, int]:
    """Return this rank's number and the number of ranks."""
    if group is None:
        return 0, 1
    if not torch.compiler.is_compiling():
        check_is_group("parallel_cross_entropy", "dist_process_group", group)
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

    One kernel reads the logits for the losses, and another one for the gradient, in the logits' own type: nothing of
    the logits' size is kept but the logits themselves, which must not change before backward. If ranks share the
    vocabulary, the loss takes two small reductions.

    Parameters
    ----------
    inp : torch.Tensor
        Logits ``(..., vocabulary)``; with several ranks, each has a share of the columns, in the order of ranks. Shares
        may be of different width.
    target : torch.Tensor
        Integers ``(...)``, numbers in the whole vocabulary. With several ranks, and on a GPU, the loss of another
        number is infinite, and NaN with a smoothing of 1.
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
        Backward then runs only once. Compiled graphs and transforms of ``torch.func`` allocate the gradient.
    _input : torch.Tensor, optional
        Deprecated name of `inp`.

    Returns
    -------
    torch.Tensor
        FP32, ``(...)`` as the logits without their last dimension; with `reduce_loss` ``(1,)``.

    Raises
    ------
    ShapeError
        If the target's shape is not that of the rows, or logits to be overwritten are not contiguous.
    DtypeError
        If logits are not floating-point numbers, targets or `ignore_idx` are not integers, or `label_smoothing` is no
        number.
    ArgumentError
        If `label_smoothing` is not from 0 to 1, `ignore_idx` has more than 64 bits, or, on one rank and a CPU, a target
        is not in the vocabulary.
    RanksError
        If this rank is not in the group, or another rank is gone. Ranks do not compare how many rows they have, since
        the function would have to wait for the GPU.
    UnsupportedError
        If a gradient is to be differentiated again, or logits have tangents of forward mode.

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
    ignore_idx = _index_of(ignore_idx)
    columns = target.reshape(-1).long()
    rows = inp.reshape(columns.shape[0], inp.shape[-1])
    # Transforms of torch.func take no autograd function of this form.
    overwrites = overwrite_input and not (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    )
    if overwrite_input and not inp.is_contiguous():
        message = (
            "parallel_cross_entropy: overwrite_input=True needs contiguous logits, got strides "
            f"{inp.stride()} of shape {list(inp.shape)}"
        )
        raise ShapeError(message)
    smoothing = float(label_smoothing)
    is_alone = _place(dist_process_group)[1] == 1
    if is_alone and (has_kernels(rows) or not overwrites):
        losses = _losses(rows, columns, smoothing, ignore_idx, overwrites)
    else:
        losses = _PartLosses.apply(rows, columns, smoothing, dist_process_group, overwrites)
        losses = torch.where(columns == ignore_idx, 0.0, losses)
    if reduce_loss:
        return losses.sum() / (columns != ignore_idx).sum().clamp(min=1).reshape(1)
    return losses.reshape(inp.shape[:-1])


def _losses(
    rows: torch.Tensor, columns: torch.Tensor, smoothing: float, ignored: int, overwrites: bool
) -> torch.Tensor:
    """Return the losses of whole rows."""
    if not has_kernels(rows):
        return _torchs_losses(rows, columns, smoothing, ignored)
    if rows.device.type == "cpu":
        _check_targets(rows, columns, ignored)
    if torch.is_grad_enabled() and rows.requires_grad:
        if columns.is_inference():  # torch saves no such tensor
            columns = columns.clone()
        losses: torch.Tensor = _Losses.apply(rows, columns, smoothing, ignored, overwrites)
        return losses
    return native.cross_entropy_forward(rows, columns, ignored, smoothing, False)[0]


def _check_targets(rows: torch.Tensor, columns: torch.Tensor, ignored: int) -> None:
    """Raise for targets outside of the vocabulary."""
    vocabulary = rows.shape[1]
    outside = ((columns < 0) | (columns >= vocabulary)) & (columns != ignored)
    if outside.any():
        first = int(columns[outside][0])
        message = (
            f"parallel_cross_entropy: targets must be from 0 to below the {vocabulary} columns of logits, or "
            f"ignore_idx = {ignored}, got {first}"
        )
        raise ArgumentIndexError(message)


def _torchs_losses(
    rows: torch.Tensor, columns: torch.Tensor, smoothing: float, ignored: int
) -> torch.Tensor:
    return functional.cross_entropy(
        rows.float(),
        columns,
        ignore_index=ignored,
        reduction="none",
        label_smoothing=smoothing,
    )


def _index_of(ignored: Any) -> int:
    """Return the ignored target as an integer of 64 bits."""
    try:
        index = operator.index(ignored)
    except TypeError as error:
        got = f"{type(ignored).__name__} {ignored!r}"
        message = f"parallel_cross_entropy: ignore_idx must be an integer, got {got}"
        raise DtypeError(message) from error
    if not -(2**63) <= index < 2**63:
        message = f"parallel_cross_entropy: ignore_idx must be an integer of 64 bits, got {index}"
        raise ArgumentError(message)
    return index


def _check(inp: Any, target: Any, smoothing: Any) -> None:
    if not (isinstance(inp, torch.Tensor) and isinstance(target, torch.Tensor)):
        message = (
            "parallel_cross_entropy: expected tensors of logits and of integers, got "
            f"{type(inp).__name__} and {type(target).__name__}"
        )
        raise DtypeError(message)
    check_numbers("parallel_cross_entropy", label_smoothing=smoothing)
    if not 0.0 <= smoothing <= 1.0:
        message = f"parallel_cross_entropy: label_smoothing must be from 0 to 1, got {smoothing}"
        raise ArgumentError(message)
    is_integer = not (target.is_floating_point() or target.is_complex())
    if not inp.is_floating_point() or not is_integer or target.dtype is torch.bool:
        message = f"parallel_cross_entropy: expected logits and integers, got {inp.dtype} and {target.dtype}"
        raise DtypeError(message)
    # torch.Size.numel() would make a dynamic size of a trace a constant.
    if inp.dim() == 0 or math.prod(inp.shape[:-1]) != target.numel():
        message = (
            f"parallel_cross_entropy: the target must have one integer for each row of logits {list(inp.shape)}, got "
            f"shape {list(target.shape)}"
        )
        raise ShapeError(message)
