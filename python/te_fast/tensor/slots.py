"""Indices of a layer's quantizers and scales."""

from __future__ import annotations

from enum import IntEnum


class FP8FwdTensorIdx(IntEnum):
    """Indices in forward lists, such as ``layer.quantizers["scaling_fwd"]``: the operands of each GEMM, and its result.

    See Also
    --------
    FP8BwdTensorIdx : The same of backward.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch.constants import FP8FwdTensorIdx
    >>> layer = te.Linear(32, 32, device="cpu")
    >>> with te.autocast():
    ...     y = layer(torch.ones(16, 32))
    >>> layer.fp8_meta["scaling_fwd"].amax_history[-1, FP8FwdTensorIdx.GEMM1_INPUT]
    tensor(1.)
    """

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensorIdx(IntEnum):
    """Indices in backward lists: the gradients of each GEMM's result and input.

    See Also
    --------
    FP8FwdTensorIdx : The same of forward.

    Examples
    --------
    >>> from te_fast.pytorch.constants import FP8BwdTensorIdx
    >>> FP8BwdTensorIdx.GRAD_OUTPUT2 + 0
    2
    """

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5
