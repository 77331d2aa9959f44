"""Comparison of two tensors, and its output."""

from __future__ import annotations

from typing import Any

import torch


def all_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether tensors are nearly equal by ``torch.allclose``, on the CPU, where there is memory for it.

    Parameters
    ----------
    a, b : torch.Tensor
        Tensors of one shape and type.

    See Also
    --------
    compare_tensors : Prints the difference.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import all_close
    >>> all_close(torch.ones(2), torch.ones(2) + 1e-7)
    True
    """
    return torch.allclose(a.cpu(), b.cpu())


def print_rank_0(*args: Any) -> None:
    """Print on the process whose current GPU has number 0; without a GPU, on rank 0 of the default group.

    Parameters
    ----------
    *args : Any
        What to print.

    See Also
    --------
    compare_tensors : Prints by it.

    Examples
    --------
    >>> from te_fast.pytorch.utils import print_rank_0
    >>> print_rank_0("step", 3)
    step 3
    """
    if torch.cuda.is_available():
        is_first = torch.cuda.current_device() == 0
    else:
        is_alone = not getattr(torch.distributed, "is_initialized", lambda: False)()
        is_first = is_alone or torch.distributed.get_rank() == 0
    if is_first:
        print(*args)


def compare_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Print two tensors, their largest difference and their largest values.

    Parameters
    ----------
    a, b : torch.Tensor
        Tensors that are not empty. If their shapes differ, nothing else is printed.

    See Also
    --------
    print_rank_0 : Decides which rank prints.

    Examples
    --------
    >>> import torch
    >>> from te_fast.pytorch.utils import compare_tensors
    >>> compare_tensors(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.])
    tensor([2.])
    max err=1.0, max a=1.0, max b=2.0
    """
    if a.shape != b.shape:
        print_rank_0("Tensors have different shape")
        return
    print_rank_0(a)
    print_rank_0(b)
    error = (a - b).abs().max()
    print_rank_0(f"max err={error}, max a={a.max()}, max b={b.max()}")
