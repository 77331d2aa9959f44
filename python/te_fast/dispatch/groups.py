"""Quantisation of rows that belong to groups, for direct use: part of :mod:`te_fast.dispatch`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from te_fast.dispatch.activations import ActivationFunction
from te_fast.dispatch.checks import expect
from te_fast.errors import DtypeError, ShapeError
from te_fast.recipe import Recipe
from te_fast.runtime import native
from te_fast.runtime.delayed import native_recipe

Role = Literal["input", "weight", "grad"]


class QuantizedGroups(NamedTuple):
    """Groups of rows in FP8. :func:`grouped_gemm` takes the bytes as FP8 numbers (``data.view(torch.float8_e4m3fn)``).

    Attributes
    ----------
    rowwise_data : torch.Tensor or None
        Bytes (uint8) in row layout, of the shape of the tensor.
    rowwise_scale_inv : torch.Tensor or None
        Inverse scales: one for each group, or those of blocks.
    columnwise_data : torch.Tensor or None
        Bytes ``(cols, rows)`` with each group at a multiple of 128 and zeros behind it; of weights
        ``(groups, cols, rows)``.
    columnwise_scale_inv : torch.Tensor or None
        Its inverse scales.

    See Also
    --------
    quantize_groups : Makes them.
    grouped_gemm : Takes them.

    Examples
    --------
    >>> from te_fast import dispatch
    >>> dispatch.QuantizedGroups._fields[0]
    'rowwise_data'
    """

    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None


def quantize_groups(
    x: torch.Tensor,
    splits: torch.Tensor | None,
    recipe: Recipe,
    *,
    role: Role = "input",
    rowwise: bool = True,
    columnwise: bool = False,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> QuantizedGroups:
    """Quantise the rows of every group to FP8, under scales of its own, in one pass.

    The host does not read `splits`. If they count more rows than `x` has, the missing rows are left out. Rows of no
    group are not written.

    Parameters
    ----------
    x : torch.Tensor
        float32, float16 or bfloat16 ``(rows, cols)``; without `splits` a stack of weights ``(groups, rows, cols)``.
    splits : torch.Tensor, optional
        int64 ``(groups,)``, the rows of each group, on the device of `x`.
    recipe : Recipe
        Delayed, current or block scaling.
    role : {'input', 'weight', 'grad'}
        Which of the recipe's quantisations applies.
    rowwise, columnwise : bool
        Layouts to write.
    scale : torch.Tensor, optional
        FP32 ``(groups,)``; delayed scaling needs it, and no other recipe takes one.
    amax : torch.Tensor, optional
        FP32 ``(groups,)`` that are raised to the groups' largest magnitudes (delayed scaling).

    Returns
    -------
    QuantizedGroups
        The bytes and inverse scales.

    Raises
    ------
    ShapeError, DtypeError, UnsupportedError
        If the tensor or the recipe does not fit.

    See Also
    --------
    grouped_gemm : Takes the groups.
    quantize : One tensor.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> from te_fast.common.recipe import Float8CurrentScaling
    >>> x = torch.tensor([[1.0], [2.0], [448.0]])
    >>> dispatch.quantize_groups(x, torch.tensor([2, 1]), Float8CurrentScaling()).rowwise_data.shape
    torch.Size([3, 1])
    """
    check_recipe("quantize_groups", recipe, scale, amax)
    form = native_recipe(recipe)
    return QuantizedGroups(
        *native.quantize_groups(x, splits, form, role, rowwise, columnwise, scale, amax)
    )


def check_recipe(
    op: str, recipe: Any, scale: torch.Tensor | None, amax: torch.Tensor | None
) -> None:
    """Refuse what is no recipe, and scales that a recipe would not use.

    Raises
    ------
    DtypeError
        If `recipe` is no recipe.
    ShapeError
        If it makes its own scales, and some are given.
    """
    if not isinstance(recipe, Recipe):
        message = (
            f"{op}: recipe must be an object of a class of te_fast.common.recipe, got {recipe!r}"
        )
        raise DtypeError(message)
    if not recipe.delayed() and (scale is not None or amax is not None):
        message = f"{op}: {type(recipe).__name__} makes its own scales; leave scale and amax out"
        raise ShapeError(message)


def activation_groups(
    x: torch.Tensor,
    function: ActivationFunction,
    splits: torch.Tensor,
    recipe: Recipe,
    *,
    row_scale: torch.Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> QuantizedGroups:
    """Apply a gated activation to the rows of every group and quantise the result to FP8, in one pass.

    The bits are those of :func:`activation` into bfloat16, and of :func:`quantize_groups` of its result. Under current
    scaling call these two, since the maxima must be known first.

    Parameters
    ----------
    x : torch.Tensor
        bfloat16 ``(rows, 2 * cols)``, contiguous, `cols` a multiple of 8.
    function : ActivationFunction
        A gated function; its interleave is a multiple of 8.
    splits : torch.Tensor
        int64 ``(groups,)``, the rows of each group, on the device of `x`. Rows of no group are not written.
    recipe : Recipe
        Delayed or block scaling.
    row_scale : torch.Tensor, optional
        Factors ``(rows,)``, of any floating type, by which the result's rows are multiplied.
    rowwise, columnwise, scale, amax
        As in :func:`quantize_groups`.

    Returns
    -------
    QuantizedGroups
        The bytes and inverse scales of the result ``(rows, cols)``.

    Raises
    ------
    ShapeError, DtypeError, UnsupportedError
        If the tensors, the function or the recipe do not fit.

    See Also
    --------
    activation_groups_backward : Its gradient.
    grouped_gemm : Takes the groups.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> from te_fast.common.recipe import Float8BlockScaling
    >>> x, splits = torch.ones(3, 32, dtype=torch.bfloat16), torch.tensor([2, 1])
    >>> function = dispatch.ActivationFunction("swiglu")
    >>> dispatch.activation_groups(x, function, splits, Float8BlockScaling()).rowwise_data.shape
    torch.Size([3, 16])
    """
    expect("activation_groups", ActivationFunction, function=function)
    check_recipe("activation_groups", recipe, scale, amax)
    form, layouts = native_recipe(recipe), (rowwise, columnwise)
    *parts, _ = native.activation_groups(
        x, None, function, splits, form, layouts, (scale, amax), row_scale
    )
    return QuantizedGroups(*parts)


def activation_groups_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    function: ActivationFunction,
    splits: torch.Tensor,
    recipe: Recipe,
    *,
    row_scale: torch.Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[QuantizedGroups, torch.Tensor | None]:
    """Differentiate a gated activation of the rows of every group and quantise the gradient to FP8, in one pass.

    The bits are those of :func:`activation_backward` into bfloat16, and of :func:`quantize_groups` of its result.

    Parameters
    ----------
    dy : torch.Tensor
        bfloat16 ``(rows, cols)``, gradient of the activation's result, contiguous; `cols` is a multiple of 128.
    x, function, splits, recipe, row_scale, rowwise, columnwise, scale, amax
        As in :func:`activation_groups`. An interleave divides 128, or is a multiple of it.

    Returns
    -------
    QuantizedGroups
        The bytes and inverse scales of the gradient ``(rows, 2 * cols)``.
    torch.Tensor or None
        The gradient of `row_scale`, in its type; rows of no group are not written.

    Raises
    ------
    ShapeError, DtypeError, UnsupportedError
        If the tensors, the function or the recipe do not fit.

    See Also
    --------
    activation_groups : The function.

    Examples
    --------
    >>> import torch
    >>> from te_fast import dispatch
    >>> from te_fast.common.recipe import Float8BlockScaling
    >>> x, splits = torch.ones(3, 256, dtype=torch.bfloat16), torch.tensor([2, 1])
    >>> dy, function = torch.ones(3, 128, dtype=torch.bfloat16), dispatch.ActivationFunction("swiglu")
    >>> grad, _ = dispatch.activation_groups_backward(dy, x, function, splits, Float8BlockScaling())
    >>> grad.rowwise_data.shape
    torch.Size([3, 256])
    """
    expect("activation_groups_backward", ActivationFunction, function=function)
    check_recipe("activation_groups_backward", recipe, scale, amax)
    form, layouts = native_recipe(recipe), (rowwise, columnwise)
    *parts, row_scale_grad = native.activation_groups(
        x, dy, function, splits, form, layouts, (scale, amax), row_scale
    )
    return QuantizedGroups(*parts), row_scale_grad
