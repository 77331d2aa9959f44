"""Gathers of bytes: each rank quantises its rows as one rank would quantise all rows, and the bytes travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from te_fast.parallel.collectives import Ranks
from te_fast.parallel.overlap import Arriving
from te_fast.recipe import Recipe
from te_fast.runtime import native, scale_tape
from te_fast.runtime.collectives import Handle, spans
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.runtime.layouts import BLOCK
from te_fast.tensor.blockwise import Float8BlockQuantizer, Float8BlockwiseQTensor
from te_fast.tensor.float8 import Float8CurrentScalingQuantizer, Float8Tensor
from te_fast.tensor.of_recipe import quantizer_of

Role = Literal["input", "grad"]
_ROLES: tuple[Role, ...] = ("input", "grad")
#: A program's tensor with the rows of all ranks, this rank's part of it, and whether it is a column layout.
Part = tuple[torch.Tensor, torch.Tensor, bool]
#: Returns the quantizer for a rank's rows of the input, or of the result's gradient; None if values are gathered.
QuantizerOf = Callable[[Recipe, Role, Any], Any]


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


class OfRecipe:
    """A region's recipe, and the quantizers of rows that depend only on it.

    Parameters
    ----------
    recipe : Recipe
        Recipe of the region. If it changes between forward and backward, both still round by its former content.
    epoch : int
        The region's epoch, which changes with the recipe's content.
    group : torch.distributed.ProcessGroup
        Ranks that have parts of the rows.
    """

    __slots__ = ("_are_read", "_group", "_is_delayed", "_made", "epoch", "recipe")

    def __init__(self, recipe: Recipe, epoch: int, group: Any) -> None:
        self.recipe, self.epoch, self._group = recipe, epoch, group
        self._is_delayed = recipe.delayed()  # its scales belong to a layer, and may move
        # With an override, backward reads values in high precision, and values are gathered.
        self._are_read = recipe.backward_override is None
        self._made: dict[Role, Any] = {}
        if self._are_read and not self._is_delayed:
            for role in _ROLES:
                self._made[role] = quantizer_of_rows(recipe, role, None, 0, group)

    def quantizer(self, role: Role, of_owner: QuantizerOf | None, *, wanted: bool = True) -> Any:
        """Return the quantizer for a rank's rows; None if values are gathered.

        Parameters
        ----------
        role : {'input', 'grad'}
            The operand.
        of_owner : Callable, optional
            Finds the owner's scales of delayed scaling; None if values are gathered.
        wanted : bool, default = True
            Whether a backward follows, which reads column layouts.
        """
        if of_owner is None or not self._are_read:
            return None
        if self._is_delayed:
            return of_owner(self.recipe, role, self._group)
        made = self._made.get(role)
        if made is not None and made.columnwise_usage and not wanted:
            made = made.copy()
            made.set_usage(columnwise=False)
        return made


def gather_rows(
    value: native.QuantizedValue, dtype: torch.dtype, ranks: Ranks, *, later: bool
) -> tuple[Float8Tensor, Arriving | None]:
    """Concatenate the rows of all ranks, which have one scale; perhaps beside a product."""
    assert value.row is not None
    coming = Arriving(ranks, value.row) if later else None
    data = ranks.gather(value.row)[0] if coming is None else coming.whole
    gathered = native.QuantizedValue(0, value.fp8, data, value.row_scale, None, None)
    whole = Float8Tensor._of_value(gathered, data.shape, dtype, None, device=data.device)
    return whole, coming


def gather_input(
    value: native.QuantizedValue, dtype: torch.dtype, ranks: Ranks, *, later: bool
) -> tuple[Any, list[Part], Arriving | None]:
    """Gather the layout of a rank's rows that forward reads; rows with one scale perhaps beside a product.

    Parameters
    ----------
    value : QuantizedValue
        This rank's rows.
    dtype : torch.dtype
        Nominal type.
    ranks : Ranks
        The ranks.
    later : bool
        Whether a product runs while the other ranks' rows come.

    Returns
    -------
    Float8Tensor or Float8BlockwiseQTensor
        With the rows of all ranks. A layout that only backward reads has no memory of its own yet.
    list of Part
        The parts that backward must gather.
    Arriving or None
        The gather, if it goes on.
    """
    own = value.row
    assert own is not None
    if value.block == 0:
        whole, coming = gather_rows(value, dtype, ranks, later=later)
        data = whole._data
        assert data is not None
        return whole, [(data, own, False)], coming
    data, _ = ranks.gather(own)
    scales, column, column_scales = value.row_scale, value.col, value.col_scale
    assert scales is not None
    of_rows = Gather(ranks, scales, is_column=True)
    of_rows.start()
    of_rows.wait()
    parts: list[Part] = []
    if column is not None:
        assert column_scales is not None
        # Forward does not read the column layout: until backward gathers it, it needs no memory of its own.
        sizes = column_scales.shape[0] * ranks.size, column_scales.shape[1]
        parts.append((data.view(column.shape[0], -1), column, True))
        parts.append((column_scales.new_empty(sizes), column_scales, False))
    whole_column, whole_scales = [part[0] for part in parts] or (None, None)
    layouts = data, of_rows.whole, whole_column, whole_scales
    gathered = native.QuantizedValue(value.block, value.fp8, *layouts)
    of_all = Float8BlockwiseQTensor._of_value(gathered, data.shape, dtype, None, device=data.device)
    return of_all, parts, None


class Gather:
    """A gather whose result has memory before the gather starts.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    part : torch.Tensor
        This rank's rows; or its column layout, a matrix.
    is_column : bool
        Whether the matrices of all ranks are concatenated along the second dimension.

    Attributes
    ----------
    whole : torch.Tensor
        The result, when the wait is over.
    """

    def __init__(self, ranks: Ranks, part: torch.Tensor, *, is_column: bool) -> None:
        self._ranks, self._part, self._is_column = ranks, part, is_column
        self._handle: Handle = None
        rows, *columns = part.shape
        flat = part.numel() // max(rows, 1)
        self.whole = part.new_empty(
            (rows, flat * ranks.size) if is_column else (rows * ranks.size, *columns)
        )
        #: The matrices of all ranks, one behind the other.
        self._stacked = part.new_empty(ranks.size * rows, flat) if is_column else self.whole

    def start(self) -> None:
        """Start it, behind all work of this stream so far."""
        part = self._part.reshape(self._part.shape[0], -1) if self._is_column else self._part
        self._handle = self._ranks.gather_into(self._stacked, part)

    def wait(self) -> None:
        """Let later work on this stream see the result, if the gather has started."""
        if self._handle is None:
            return
        self._ranks.wait(self._handle)
        if self._is_column:
            rows, size = self.whole.shape[0], self._ranks.size
            parts = self._stacked.view(size, rows, -1)
            self.whole.view(rows, size, -1).copy_(parts.transpose(0, 1))
