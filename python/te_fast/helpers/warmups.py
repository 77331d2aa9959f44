"""First calls of fused functions, which compile them before training begins. No random numbers are used up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from te_fast.helpers import fused_functions as fused

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CALLS = 5

Make = Callable[..., torch.Tensor]


@contextmanager
def _random(dtype: torch.dtype) -> Iterator[Make]:
    """Give a function that makes random tensors on the current GPU, or on the CPU of a machine without one."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")

    def make(*size: int, requires_grad: bool) -> torch.Tensor:
        return torch.rand(size, dtype=dtype, device=device, requires_grad=requires_grad)

    with torch.random.fork_rng(devices=[device] if has_gpu else []):
        yield make
    if has_gpu:
        torch.cuda.empty_cache()


def warmup_jit_bias_dropout_add(
    hidden_size: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Compile :func:`bias_dropout_add_fused_train` for inputs ``(seq_length, micro_batch_size, hidden_size)``."""
    with _random(dtype) as make:
        for needs_grad in (False, True):
            x = make(seq_length, micro_batch_size, hidden_size, requires_grad=needs_grad)
            residual = make(seq_length, micro_batch_size, hidden_size, requires_grad=needs_grad)
            bias = make(hidden_size, requires_grad=True)
            for _ in range(_CALLS):
                fused.bias_dropout_add_fused_train(x, bias, residual, 0.1)


def warmup_jit_bias_dropout_add_all_dtypes(
    hidden_size: int, seq_length: int, micro_batch_size: int
) -> None:
    """Compile :func:`bias_dropout_add_fused_train` for all types of training."""
    for dtype in _DTYPES:
        warmup_jit_bias_dropout_add(hidden_size, dtype, seq_length, micro_batch_size)


def warmup_jit_bias_gelu(
    ffn_hidden_size_per_partition: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Compile GELU with and without a bias, for ``seq_length * micro_batch_size`` rows."""
    columns = ffn_hidden_size_per_partition
    with _random(dtype) as make:
        for needs_grad in (False, True):
            x = make(seq_length * micro_batch_size, columns, requires_grad=needs_grad)
            bias = make(columns, requires_grad=True)
            for _ in range(_CALLS):
                fused.bias_gelu_fused_(x, bias)
                fused.gelu_fused_(x)


def warmup_jit_bias_gelu_all_dtypes(
    ffn_hidden_size: int, seq_length: int, micro_batch_size: int
) -> None:
    """Compile GELU for all types of training."""
    for dtype in _DTYPES:
        warmup_jit_bias_gelu(ffn_hidden_size, dtype, seq_length, micro_batch_size)


def warmup_jit_l2normalization(
    hidden_size: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Compile the L2 norm of inference, and that of training with its backward."""
    eps = 1e-6
    with _random(dtype) as make:
        x = make(seq_length * micro_batch_size, hidden_size, requires_grad=False)
        trained = make(seq_length * micro_batch_size, hidden_size, requires_grad=True)
        for _ in range(_CALLS):
            fused.l2normalization_fused_(x, eps)
            y, scale = fused.l2normalization_fwd_fused_(trained, eps)
            fused.l2normalization_backward_fused_(torch.rand_like(y), trained, scale, eps)


def warmup_jit_l2normalization_all_dtypes(
    hidden_size: int, seq_length: int, micro_batch_size: int
) -> None:
    """Compile the L2 norms for all types of training."""
    for dtype in _DTYPES:
        warmup_jit_l2normalization(hidden_size, dtype, seq_length, micro_batch_size)
