"""The number types of a recipe, and lists of tensors that one buffer is copied to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_fast.errors import ArgumentError
from te_fast.recipe import Format, Recipe
from te_fast.runtime.delayed import get_fp8_torch_dtype
from te_fast.tensor.dtypes import DType, TE_DType


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """Return the type of a recipe's forward or backward tensors."""
    return TE_DType[get_fp8_torch_dtype(fp8_recipe, fprop_tensor)]


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """Return the type of the tensors of a recipe in 4 bits.

    Raises
    ------
    ArgumentError
        If the recipe has no such type.
    """
    number_format = getattr(fp4_recipe, "fp4_format", None)
    if number_format is not Format.E2M1:
        message = f"get_fp4_te_dtype: expected a recipe whose fp4_format is Format.E2M1, got {number_format!r}"
        raise ArgumentError(message)
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """Return the largest number of a recipe's forward or backward tensors."""
    return float(torch.finfo(get_fp8_torch_dtype(fp8_recipe, fprop_tensor)).max)


def split_and_copy(
    buffer: torch.Tensor, outputs: Sequence[torch.Tensor], chunk_sizes: Sequence[int]
) -> None:
    """Copy consecutive parts of a buffer to tensors.

    Parameters
    ----------
    buffer : torch.Tensor
        ``(sum(chunk_sizes), ...)``.
    outputs : list of torch.Tensor
        Tensors of the parts' shapes.
    chunk_sizes : list of int
        Rows of each part.
    """
    torch._foreach_copy_(list(outputs), buffer.split(list(chunk_sizes)))
