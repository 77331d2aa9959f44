"""What quantises the operands of a GEMM under a recipe."""

from __future__ import annotations

from typing import Any, Literal

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


def slot_of(state: DelayedScalingRecipeState, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the live maximum of one tensor under delayed scaling."""
    return state.scale[slot : slot + 1], state.amax_history[0, slot : slot + 1]


def quantizer_of(
    recipe: Recipe,
    role: str,
    state: DelayedScalingRecipeState | None,
    slot: int,
    *,
    rowwise: bool,
    columnwise: bool,
) -> Float8QuantizerBase:
    """Return what quantises an operand under a recipe.

    Parameters
    ----------
    recipe : Recipe
        Delayed, current or block scaling.
    role : {'input', 'weight', 'grad'}
        The operand.
    state : DelayedScalingRecipeState, optional
        Scales of delayed scaling.
    slot : int
        The operand's place among them.
    rowwise, columnwise : bool
        Layouts to make.

    Raises
    ------
    StateError
        If delayed scaling has no scales.
    """
    dtype = TE_DType[get_fp8_torch_dtype(recipe, role != "grad")]
    usage: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
    if recipe.delayed():
        if state is None:
            message = "delayed scaling needs scales, which a layer or operation makes in its first forward"
            raise StateError(message)
        return Float8Quantizer(*slot_of(state, slot), dtype, **usage)
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
