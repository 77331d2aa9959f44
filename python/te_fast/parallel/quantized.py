"""Gathers of bytes: each rank quantises its rows by a scale that all ranks have, and the bytes travel."""

from __future__ import annotations

from typing import Any, Literal

from te_fast.parallel.collectives import Ranks
from te_fast.recipe import Recipe
from te_fast.runtime import scale_tape
from te_fast.runtime.collectives import Handle, spans
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.tensor.float8 import Float8CurrentScalingQuantizer, Float8Tensor
from te_fast.tensor.of_recipe import quantizer_of

Role = Literal["input", "grad"]


def quantizer_of_rows(
    recipe: Recipe, role: Role, state: DelayedScalingRecipeState | None, slot: int, group: Any
) -> Any:
    """Return what quantises a rank's rows of an operand that is gathered; None where its values are.

    Scales per tensor are those that one rank would have: under current scaling the maximum is reduced over `group`,
    under delayed scaling the end of the region has done so. Blocks travel as values: their scales are laid out by the
    rows of all ranks.

    Parameters
    ----------
    recipe : Recipe
        Recipe of the region.
    role : {'input', 'grad'}
        The operand.
    state : DelayedScalingRecipeState, optional
        Scales of delayed scaling.
    slot : int
        The operand's place among them.
    group : torch.distributed.ProcessGroup
        Ranks that have parts of the rows.
    """
    if not recipe.float8_per_tensor_scaling():
        return None
    if recipe.delayed():
        reduces = getattr(recipe, "reduce_amax", False)
        if (
            not reduces
            or state is None
            or scale_tape.is_in_phase()
            or not spans(state.group, group)
        ):
            return None
    quantizer = quantizer_of(recipe, role, state, slot, rowwise=True, columnwise=False)
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, group
    return quantizer


def gather_rows(
    value: Float8Tensor, ranks: Ranks, *, later: bool = False
) -> tuple[Float8Tensor, Handle]:
    """Concatenate the rows of all ranks, which have one scale."""
    assert value._data is not None
    data, handle = ranks.gather(value._data, later=later)
    scale, kind = value._scale_inv, value._fp8_dtype
    whole: Float8Tensor = Float8Tensor(data.shape, value.dtype, data, scale, kind)
    return whole, handle
