"""The quantizers of a GEMM's operands under a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from te_fast.errors import StateError
from te_fast.recipe import Recipe
from te_fast.runtime.delayed import DelayedScalingRecipeState, get_fp8_torch_dtype
from te_fast.tensor.blockwise import Float8BlockQuantizer
from te_fast.tensor.dtypes import TE_DType
from te_fast.tensor.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from te_fast.tensor.quantizer import Float8QuantizerBase

Role = Literal["input", "weight", "grad"]
_PARAMS = {
    "input": "fp8_quant_fwd_inp",
    "weight": "fp8_quant_fwd_weight",
    "grad": "fp8_quant_bwd_grad",
}
_BLOCKS = {
    "input": "x_block_scaling_dim",
    "weight": "w_block_scaling_dim",
    "grad": "grad_block_scaling_dim",
}


class Stack(NamedTuple):
    """The values of a tensor with scales for each value, such as the weights of experts."""

    #: Number of values.
    groups: int
    #: Distance between the slots of adjacent values under delayed scaling.
    stride: int


#: A tensor of one value.
ONE = Stack(1, 1)


def slot_of(
    state: DelayedScalingRecipeState, slot: int, stack: Stack = ONE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the live maximum of a tensor under delayed scaling, for a `stack` of each value."""
    slots = slice(slot, slot + (stack.groups - 1) * stack.stride + 1, stack.stride)
    return state.scale[slots], state.amax_history[0, slots]


def quantizer_of(
    recipe: Recipe,
    role: str,
    state: DelayedScalingRecipeState | None,
    slot: int,
    *,
    rowwise: bool,
    columnwise: bool,
    stack: Stack = ONE,
) -> Float8QuantizerBase:
    """Return the quantizer of an operand under a recipe.

    Parameters
    ----------
    recipe : Recipe
        Delayed, current or block scaling.
    role : {'input', 'weight', 'grad'}
        The operand.
    state : DelayedScalingRecipeState, optional
        Scales of delayed scaling.
    slot : int
        The operand's index among them.
    rowwise, columnwise : bool
        Layouts to make.
    stack : Stack
        Description of the operand's values; one value by default.

    Raises
    ------
    StateError
        If delayed scaling has no scales.
    """
    made = _quantizer_of(recipe, role, state, slot, stack, rowwise=rowwise, columnwise=columnwise)
    made._groups = stack.groups
    return made


def quantizers_of(
    recipe: Recipe, roles: Sequence[str], state: DelayedScalingRecipeState | None
) -> list[Float8QuantizerBase]:
    """Return the quantizers of the operands with slots 0, 1, ...; an empty list before delayed scaling has scales.

    Parameters
    ----------
    recipe : Recipe
        Delayed, current or block scaling.
    roles : sequence of {'input', 'weight', 'grad'}
        The operands.
    state : DelayedScalingRecipeState, optional
        Scales of delayed scaling.
    """
    if recipe.delayed() and state is None:
        return []
    layouts: dict[str, Any] = {"rowwise": True, "columnwise": True}
    return [quantizer_of(recipe, role, state, slot, **layouts) for slot, role in enumerate(roles)]


def _quantizer_of(
    recipe: Recipe,
    role: str,
    state: DelayedScalingRecipeState | None,
    slot: int,
    stack: Stack,
    **usage: Any,
) -> Float8QuantizerBase:
    dtype = TE_DType[get_fp8_torch_dtype(recipe, role != "grad")]
    if recipe.delayed():
        if state is None:
            message = "delayed scaling needs scales, which a layer or operation makes in its first forward"
            raise StateError(message)
        return Float8Quantizer(*slot_of(state, slot, stack), dtype, **usage)
    about: Any = recipe
    params = getattr(about, _PARAMS[role])
    options: dict[str, Any] = {
        "force_pow_2_scales": params.power_2_scale,
        "amax_epsilon": params.amax_epsilon,
    }
    if recipe.float8_current_scaling():
        return Float8CurrentScalingQuantizer(dtype, **usage, **options)
    return Float8BlockQuantizer(
        dtype, block_scaling_dim=getattr(about, _BLOCKS[role]), **usage, **options
    )
