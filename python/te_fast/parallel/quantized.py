"""Gathers of bytes: each rank quantises its rows as one rank would quantise all rows, and the bytes travel."""

from __future__ import annotations

from typing import Any, Literal

import torch

from te_fast.parallel.chunks import Chunks
from te_fast.parallel.collectives import Ranks
from te_fast.recipe import Recipe
from te_fast.runtime import scale_tape
from te_fast.runtime.collectives import Handle, spans
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.runtime.layouts import BLOCK
from te_fast.tensor.blockwise import Float8BlockQuantizer, Float8BlockwiseQTensor
from te_fast.tensor.float8 import Float8CurrentScalingQuantizer, Float8Tensor
from te_fast.tensor.of_recipe import quantizer_of

Role = Literal["input", "grad"]
#: A program's tensor with the rows of all ranks, this rank's part of it, and whether it is a column layout.
Part = tuple[torch.Tensor, torch.Tensor, bool]


def quantizer_of_rows(
    recipe: Recipe, role: Role, state: DelayedScalingRecipeState | None, slot: int, group: Any
) -> Any:
    """Return the quantizer for a rank's rows of a gathered operand; None if values are gathered.

    Scales per tensor are those of one rank with all rows: under current scaling the maximum is reduced over `group`,
    and under delayed scaling the end of the region has reduced it. Blocks of 1x128 have their own scales. Gradients in
    blocks are gathered as values, since both layouts together are as long as BF16.

    Parameters
    ----------
    recipe : Recipe
        Recipe of the region.
    role : {'input', 'grad'}
        The operand.
    state : DelayedScalingRecipeState, optional
        Scales of delayed scaling.
    slot : int
        The operand's index among them.
    group : torch.distributed.ProcessGroup
        Ranks that have parts of the rows.
    """
    if recipe.float8_block_scaling():
        if role == "grad" or getattr(recipe, "x_block_scaling_dim", 1) != 1:
            return None
        return quantizer_of(recipe, role, state, slot, rowwise=True, columnwise=True)
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


def cuts_no_blocks(quantizer: Any, x: torch.Tensor) -> bool:
    """Tell whether the blocks of a rank's rows are blocks of the whole tensor."""
    if not isinstance(quantizer, Float8BlockQuantizer):
        return True
    columns = x.shape[-1]
    return columns % BLOCK == 0 and (x.numel() // columns) % BLOCK == 0


def gather_rows(value: Float8Tensor, ranks: Ranks, chunks: Chunks | None = None) -> Float8Tensor:
    """Concatenate the rows of all ranks, which have one scale; in chunks, events mark their arrival."""
    assert value._data is not None
    data = ranks.gather(value._data)[0] if chunks is None else chunks.gather(value._data)
    scale, kind = value._scale_inv, value._fp8_dtype
    whole: Float8Tensor = Float8Tensor(data.shape, value.dtype, data, scale, kind)
    return whole


def gather_input(
    quantizer: Any, x: torch.Tensor, ranks: Ranks, chunks: Chunks | None = None
) -> tuple[Any, list[Part]]:
    """Quantise a rank's rows, and gather the layout that forward reads; only rows with one scale go in chunks.

    Returns
    -------
    Float8Tensor or Float8BlockwiseQTensor
        With the rows of all ranks. A layout that only backward reads has no memory of its own yet.
    list of Part
        The parts that backward must gather.
    """
    value = quantizer(x)
    if isinstance(value, Float8Tensor):
        whole = gather_rows(value, ranks, chunks)
        assert whole._data is not None
        assert value._data is not None
        return whole, [(whole._data, value._data, False)]
    data, _ = ranks.gather(value._rowwise_data)
    scales = value._rowwise_scale_inv
    row_scales = _joined(ranks, scales, later=False)[0]
    column, column_scales = value._columnwise_data, value._columnwise_scale_inv
    parts: list[Part] = []
    if column is not None:
        # Forward does not read the column layout: until backward gathers it, it needs no memory of its own.
        sizes = column_scales.shape[0] * ranks.size, column_scales.shape[1]
        parts.append((data.view(column.shape[0], -1), column, True))
        parts.append((column_scales.new_empty(sizes), column_scales, False))
    whole_column, whole_scales = [part[0] for part in parts] or (None, None)
    layouts: Any = (data, row_scales, whole_column, whole_scales)
    of_all: Any = Float8BlockwiseQTensor
    return of_all(data.shape, value.dtype, *layouts, value._fp8_dtype, None, False), parts


class _Later:
    """A gather under way whose result has to be laid out anew."""

    def __init__(
        self, handle: Handle, ranks: Ranks, gathered: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._handle, self._ranks = handle, ranks
        self._gathered, self._out = gathered, out

    def wait(self) -> None:
        """Let later work on this stream see the result."""
        self._ranks.wait(self._handle)
        size = self._ranks.size
        parts = self._gathered.view(size, self._out.shape[0], -1)
        self._out.view(self._out.shape[0], size, -1).copy_(parts.transpose(0, 1))


def _joined(ranks: Ranks, part: torch.Tensor, *, later: bool) -> tuple[torch.Tensor, Handle]:
    """Concatenate the matrices of all ranks along the second dimension."""
    flat = part.reshape(part.shape[0], -1)
    gathered, handle = ranks.gather(flat, later=later)
    out = flat.new_empty(flat.shape[0], flat.shape[1] * ranks.size)
    laid_out = _Later(handle, ranks, gathered, out)
    if later:
        return out, laid_out
    laid_out.wait()
    return out, None


def gather_again(
    ranks: Ranks, part: torch.Tensor, *, is_column: bool
) -> tuple[torch.Tensor, Handle]:
    """Start to gather, in backward, the rows that each rank has kept."""
    return _joined(ranks, part, later=True) if is_column else ranks.gather(part, later=True)
