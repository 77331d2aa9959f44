"""A native program between the collectives of tensor parallelism, inside of an autograd node.

A collective starts when its operand is computed, and is awaited where its result is read. In backward, the gather of
the input, which starts behind that of the result's gradient, runs beside the product of the input's gradient, and the
reduction of that gradient runs beside the product of the first weight's gradient. The others run beside parts of the
product that reads their result, or computes their operand (`overlap.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from te_fast.parallel.agreement import Agreement
from te_fast.parallel.collectives import Ranks
from te_fast.parallel.overlap import (
    Arriving,
    Leaving,
    ends_of_blocks,
    joined,
    may_cut,
    native_of,
    own_rows_first,
)
from te_fast.parallel.quantized import (
    Gather,
    OfRecipe,
    cuts_no_blocks,
    gather_input,
    gather_rows,
)
from te_fast.runtime import native, rows
from te_fast.runtime.collectives import check_rows, named
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.tensor.quantizer import plain_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_fast.parallel.quantized import Part, QuantizerOf
    from te_fast.parallel.ranks import Exchange
    from te_fast.runtime.rows import Tensors


@dataclass(slots=True, eq=False)
class Run:
    """Data that a backward needs from a segment's forward, beside the saved tensors.

    Attributes
    ----------
    kept : object or None
        The tensors that the program's run kept; None if no tensor needs a gradient.
    saved : list of torch.Tensor or None
        The tensors that autograd must keep.
    local : list of tuple
        Indices in `saved` where this rank's part stands for the gathered tensor, and whether it is a column layout.
    of_recipe : OfRecipe or None
        Recipe of the region and its quantizers; None in high precision.
    """

    kept: Any
    saved: list[torch.Tensor | None] = field(default_factory=list)
    local: list[tuple[int, bool]] = field(default_factory=list)
    of_recipe: OfRecipe | None = None


#: The collective in a quantizer of rows that have one scale on all ranks, for messages.
_MAXIMA = "the reduction of maxima of current scaling"


class Segment:
    """A program, and the collectives before and after it.

    Parameters
    ----------
    name : str
        Name of the layer, for messages.
    program : Program
        Its first op is linear if there is a collective before it.
    exchange : Exchange
        The collectives.
    group : torch.distributed.ProcessGroup
        The ranks.
    first : WeightHandle, optional
        Number of the first linear op, whose weight gradient waits for a collective.
    kind : str
        Properties that must be equal on all ranks.
    """

    __slots__ = (
        "_agreement",
        "_epoch",
        "_maxima",
        "_of_recipe",
        "exchange",
        "first",
        "program",
        "ranks",
    )

    def __init__(
        self,
        name: str,
        program: native.Program,
        exchange: Exchange,
        group: Any,
        first: native.WeightHandle | None,
        kind: str,
    ) -> None:
        self.program, self.exchange = program, exchange
        self.ranks = Ranks(name, group)
        self.first = first if exchange.before is not None else None
        self._agreement = Agreement(name, group, f"{exchange} {kind}")
        self._maxima = named(name, _MAXIMA)
        #: Epoch of the last call under delayed scaling, and the last call's recipe.
        self._epoch: int | None = None
        self._of_recipe: OfRecipe | None = None

    def check(
        self, x: torch.Tensor, *, wanted: bool, needs_x: bool, needs: Sequence[bool] = ()
    ) -> None:
        """Raise unless all ranks call the segment in the same way, and can divide its rows.

        `needs` says which parameters need gradients, if any tensor does.

        Raises
        ------
        RanksError
            If ranks do not call it alike, or one is gone.
        ShapeError
            If rows cannot be shared out among the ranks.
        """
        if self.exchange.behind == "scatter" and self.exchange.before != "gather":
            rows_of = x.shape[0] if x.dim() > 1 else 1
            check_rows(rows_of, self.ranks.size, f"{self.ranks.name}: sequence_parallel")
        self._agreement.check(x, wanted=wanted, needs_input=needs_x, needs=needs)

    def forward(
        self,
        owner: Any,
        x: torch.Tensor,
        extras: Tensors,
        is_first_microbatch: bool | None,
        needs: tuple[bool, Sequence[bool], bool],
        parameters: Tensors | None,
        version: int | None = None,
        quantizer: QuantizerOf | None = None,
    ) -> tuple[torch.Tensor, Tensors, Run, torch.Tensor]:
        """Return the result, the extra outputs, data for backward, and the input with the rows of all ranks.

        Parameters
        ----------
        owner : object
            The object that registers the scales of delayed scaling.
        x : torch.Tensor
            Input.
        extras : tuple of torch.Tensor
            Extra inputs of the program.
        is_first_microbatch : bool, optional
            As of :class:`te_fast.pytorch.Linear`.
        needs : tuple
            Whether the input needs a gradient, which extra inputs do, and whether to look at the parameters.
        parameters : tuple of torch.Tensor, optional
            Parameters of the program; by default those of its modules.
        version : int, optional
            Version of a weight that is a concatenation.
        quantizer : Callable, optional
            Quantizer for a gather of the input in FP8; without it, values are gathered.
        """
        exchange, ranks = self.exchange, self.ranks
        run, wanted = Run(None), needs[0] or needs[2]
        of_recipe = run.of_recipe = self._recipe_now(owner)
        if self.first is not None:
            self.first.delay_wgrad_compute = True
            # Rows that were gathered in high precision are kept so, except under delayed scaling, whose scale will have
            # changed.
            again = of_recipe is not None and not of_recipe.recipe.delayed()
            self.first.save_original_input = again and exchange.before == "gather"
        whole, parts, coming = self._gathered(x, of_recipe, quantizer, wanted=wanted)
        leaving = self._to_leave(whole, extras)
        transfers = native_of(coming, leaving)
        if whole.numel() == 0:
            given = parameters if parameters is not None else tuple(owner.parameters())
            y, outputs, kept, saved = rows.run_on_nothing(
                self.program, whole, extras, given, is_first_microbatch is True
            )
        else:
            with joined(coming, leaving):
                y, outputs, kept, saved = native.program_run_forward(
                    self.program,
                    owner,
                    whole,
                    extras,
                    is_first_microbatch,
                    *needs,
                    parameters,
                    version,
                    transfers,
                )
        if wanted:
            run.kept, run.saved = kept, list(saved)
            for place, tensor in enumerate(saved):
                for read, local, is_column in parts:
                    if tensor is read:
                        run.saved[place] = local
                        run.local.append((place, is_column))
        if leaving is not None:
            y = leaving.result(y)
        elif exchange.behind == "scatter":
            y = ranks.scatter(y)[0]
        elif exchange.behind == "sum":
            y = ranks.sum(y)[0]
        return y, outputs, run, whole

    def _recipe_now(self, owner: Any) -> OfRecipe | None:
        """Return the recipe of the region; None in high precision."""
        enabled, *_, epoch = native.autocast_region()
        if not enabled:
            return None
        recipe, last = FP8GlobalStateManager.get_fp8_recipe(), self._of_recipe
        if recipe.delayed() and epoch != self._epoch:
            # Also if this rank has no rows: others may have rows, and reduce their maxima with this rank.
            owner._init_delayed_scaling()
            self._epoch = epoch
        if last is None or last.recipe is not recipe or last.epoch != epoch:
            last = self._of_recipe = OfRecipe(recipe, epoch, self.ranks.group)
        return last

    def _gathered(
        self,
        x: torch.Tensor,
        of_recipe: OfRecipe | None,
        quantizer: QuantizerOf | None,
        *,
        wanted: bool,
    ) -> tuple[torch.Tensor, list[Part], Arriving | None]:
        """Return the rows of all ranks, this rank's parts that backward gathers again, and a gather that goes on."""
        if self.exchange.before != "gather":
            return x, [], None
        made = None
        if of_recipe is not None and x.numel() != 0:
            made = of_recipe.quantizer("input", quantizer, wanted=wanted)
        if made is not None and cuts_no_blocks(made, x):
            with self._maxima:
                value = made._value_of(plain_values(x).contiguous())
            later = value.block == 0 and self._is_cut(x, 1)
            return gather_input(value, x.dtype, self.ranks, later=later)
        if of_recipe is None and self._is_cut(x, x.element_size()):
            coming = Arriving(self.ranks, x)
            return coming.whole, [(coming.whole, x, False)], coming
        whole = self.ranks.gather(x)[0]  # in a recipe, the cast reads all rows
        return whole, [(whole, x, False)], None

    def _is_cut(self, own: torch.Tensor, element_size: int) -> bool:
        """Tell whether the product of this rank's rows runs while the other ranks' rows are gathered."""
        if not may_cut():
            return False
        columns = own.shape[-1]
        rows_of = own.numel() // max(columns, 1)
        return own_rows_first(rows_of, columns * element_size, self.ranks.size, own.device)

    def _to_leave(self, x: torch.Tensor, extras: Tensors) -> Leaving | None:
        """Return the transfer of the result in blocks; None if it leaves at once."""
        if self.exchange.behind != "scatter" or extras or not may_cut() or x.numel() == 0:
            return None
        size, columns = self.ranks.size, x.shape[-1]
        rows_of, width = x.numel() // columns // size, self.program.widths(columns)[0]
        ends = ends_of_blocks(rows_of, width, x.element_size(), size, x.device)
        if not ends:
            return None
        return Leaving(self.ranks, ends)

    def backward(
        self,
        run: Run,
        saved: Sequence[torch.Tensor | None],
        dy: torch.Tensor,
        extra_grads: Tensors,
        weight: Callable[[], torch.Tensor] | None,
        dwhole: torch.Tensor | None = None,
        quantizer: QuantizerOf | None = None,
    ) -> tuple[torch.Tensor | None, list[Any], Tensors]:
        """Return the gradients of input, parameters and extra inputs.

        Parameters
        ----------
        run, saved
            Run and saved tensors of the forward.
        dy : torch.Tensor
            Gradient of the result.
        extra_grads : tuple of torch.Tensor
            Gradients of the extra outputs.
        weight : Callable, optional
            Returns the weight of the first linear op, whose gradient is computed here; without it, the gradient waits
            for ``backward_dw``.
        dwhole : torch.Tensor, optional
            Another gradient of the gathered input.
        quantizer : Callable, optional
            Quantizer for a gather of the result's gradient in FP8.
        """
        exchange, ranks, first = self.exchange, self.ranks, self.first
        coming = None
        if exchange.behind == "scatter":
            dy, coming = self._gathered_gradient(dy, run.of_recipe, quantizer)
        tensors, regathers = list(saved), []
        for place, is_column in run.local:
            local = tensors[place]
            assert local is not None
            regathers.append(Gather(ranks, local, is_column=is_column))
            tensors[place] = regathers[-1].whole
        starts = [regather.start for regather in regathers]
        if coming is not None:
            coming.before(starts)
        else:
            for start in starts:
                start()
        count = 0 if first is None else first.deferred_count()
        try:
            with joined(coming):
                dx, found, extras = rows.run_backward(
                    run.kept,
                    tuple(tensors),
                    dy,
                    extra_grads,
                    native_of(coming),
                )
            gradients, reduction = list(found), None
            if dx is not None and dwhole is not None:
                dx = dx + dwhole
            if dx is not None and exchange.before == "gather":
                dx, reduction = ranks.scatter(dx, later=True)
            elif dx is not None and exchange.before == "copy":
                dx, reduction = ranks.sum(dx, later=True)
            for regather in regathers:
                regather.wait()
            if first is not None and weight is not None and first.deferred_count() > count:
                fuses = first.fuse_wgrad_accumulation
                given = native.program_backward_dw(first, weight(), fuses)
                if not fuses:  # otherwise autograd's stand-in exists already
                    gradients[0] = given
            ranks.wait(reduction)
        except BaseException:
            for regather in regathers:
                regather.wait()
            if first is not None:
                first.forget_deferred(count)
            raise
        return dx, gradients, extras

    def _gathered_gradient(
        self, dy: torch.Tensor, of_recipe: OfRecipe | None, quantizer: QuantizerOf | None
    ) -> tuple[torch.Tensor, Arriving | None]:
        """Return the gradient with the rows of all ranks, and a gather that goes on."""
        made = None
        if of_recipe is not None and dy.numel() != 0:
            made = of_recipe.quantizer("grad", quantizer)
        if made is not None:
            with self._maxima:
                value = made._value_of(plain_values(dy).contiguous())
            return gather_rows(value, dy.dtype, self.ranks, later=self._is_cut(dy, 1))
        if of_recipe is None and self._is_cut(dy, dy.element_size()):
            coming = Arriving(self.ranks, dy)
            return coming.whole, coming
        return self.ranks.gather(dy)[0], None
