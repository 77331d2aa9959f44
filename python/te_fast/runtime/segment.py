"""A native program between the collectives of tensor parallelism, inside of an autograd node.

A collective is started as soon as its operand is there, and waited for where its result is read: the gradient of the
input is reduced behind the first weight's gradient, whose input is gathered again behind the gradient of the input.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from te_fast.errors import RanksError, TeFastError
from te_fast.runtime import native, rows
from te_fast.runtime.agreement import Agreement
from te_fast.runtime.collectives import (
    Handle,
    allreduce,
    check_rows,
    gather_along_first_dim,
    get_distributed_world_size,
    reduce_scatter_along_first_dim,
)
from te_fast.runtime.global_state import FP8GlobalStateManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from te_fast.runtime.ranks import Exchange
    from te_fast.runtime.rows import Tensors


@contextmanager
def _named(name: str, collective: str) -> Iterator[None]:
    """Name the layer in what ``torch.distributed`` raises when a rank is gone or late."""
    try:
        yield
    except TeFastError:
        raise
    except RuntimeError as error:
        message = (
            f"{name}: {collective} of tensor parallelism failed; another rank has stopped, is late, or does something "
            f"else: {error}"
        )
        raise RanksError(message) from error


class Ranks:
    """The collectives of a layer along the first dimension, with its name in what they raise.

    Parameters
    ----------
    name : str
        Name of the layer.
    group : torch.distributed.ProcessGroup
        The ranks.
    """

    __slots__ = ("group", "name", "size")

    def __init__(self, name: str, group: Any) -> None:
        self.name, self.group = name, group
        self.size = get_distributed_world_size(group)

    def gather(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Concatenate the rows of all ranks."""
        with _named(self.name, "an all-gather"):
            return gather_along_first_dim(x, self.group, async_op=later)

    def scatter(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Sum over all ranks, and keep this one's rows."""
        with _named(self.name, "a reduce-scatter"):
            return reduce_scatter_along_first_dim(x, self.group, async_op=later)

    def sum(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Sum over all ranks."""
        with _named(self.name, "an all-reduce"):
            return allreduce(x.contiguous(), self.group, async_op=later)

    def wait(self, handle: Handle) -> None:
        """Let what follows on this stream see a collective's result."""
        if handle is not None:
            with _named(self.name, "a collective"):
                handle.wait()


@dataclass(slots=True, eq=False)
class Run:
    """What a backward needs of a segment's forward, beside the saved tensors.

    Attributes
    ----------
    kept : object or None
        What the program's run kept; None where nothing wants a gradient.
    local : int or None
        Where among the saved tensors this rank's rows stand for the gathered ones.
    """

    kept: Any
    local: int | None = None
    saved: list[torch.Tensor | None] = field(default_factory=list)


class Segment:
    """A program, and the collectives before and behind it.

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
        Of the first linear op, whose weight's gradient waits for a collective.
    kind : str
        What must be the same on all ranks.
    """

    __slots__ = ("_agreement", "exchange", "first", "program", "ranks")

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

    def check(self, x: torch.Tensor, *, wanted: bool, needs_x: bool) -> None:
        """Raise unless all ranks call the segment alike, and can share out its rows.

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
        self._agreement.check(x, wanted=wanted, needs_input=needs_x)

    def forward(
        self,
        owner: Any,
        x: torch.Tensor,
        extras: Tensors,
        is_first_microbatch: bool | None,
        needs: tuple[bool, Sequence[bool], bool],
        parameters: Tensors | None,
        version: int | None = None,
    ) -> tuple[torch.Tensor, Tensors, Run, torch.Tensor]:
        """Return the result, the extra outputs, what backward needs, and the input with the rows of all ranks.

        Parameters
        ----------
        owner : object
            What registers the scales of delayed scaling.
        x : torch.Tensor
            Input.
        extras : tuple of torch.Tensor
            Extra inputs of the program.
        is_first_microbatch : bool, optional
            As of :class:`te_fast.pytorch.Linear`.
        needs : tuple
            Whether the input wants a gradient, which extra inputs do, and whether parameters are to be asked.
        parameters : tuple of torch.Tensor, optional
            Those of the program; its modules' own by default.
        version : int, optional
            Stands in for that of a weight that is a concatenation.
        """
        exchange, ranks = self.exchange, self.ranks
        if self.first is not None:
            self.first.delay_wgrad_compute = True
            if FP8GlobalStateManager.is_fp8_enabled():
                # Not under delayed scaling, whose scale will have changed: the gathered input is kept in FP8.
                again = not FP8GlobalStateManager.get_fp8_recipe().delayed()
                self.first.save_original_input = again and exchange.before == "gather"
        whole = ranks.gather(x)[0] if exchange.before == "gather" else x
        run, wanted = Run(None), needs[0] or needs[2]
        if whole.numel() == 0:
            if (
                FP8GlobalStateManager.is_fp8_enabled()
                and FP8GlobalStateManager.get_fp8_recipe().delayed()
            ):
                # Other ranks may have rows, and reduce their maxima with this one.
                owner._init_delayed_scaling()
            given = parameters if parameters is not None else tuple(owner.parameters())
            y, outputs, kept, saved = rows.run_on_nothing(
                self.program, whole, extras, given, is_first_microbatch is True
            )
        else:
            y, outputs, kept, saved = native.program_run_forward(
                self.program, owner, whole, extras, is_first_microbatch, *needs, parameters, version
            )
        if wanted:
            run.kept, run.saved = kept, list(saved)
            if whole is not x:
                run.local = next((i for i, one in enumerate(saved) if one is whole), None)
                if run.local is not None:
                    run.saved[run.local] = x
        if exchange.behind == "scatter":
            y = ranks.scatter(y)[0]
        elif exchange.behind == "sum":
            y = ranks.sum(y)[0]
        return y, outputs, run, whole

    def backward(
        self,
        run: Run,
        saved: Sequence[torch.Tensor | None],
        dy: torch.Tensor,
        extra_grads: Tensors,
        weight: Callable[[], torch.Tensor] | None,
        dwhole: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, list[Any], Tensors]:
        """Return the gradients of input, parameters and extra inputs.

        Parameters
        ----------
        run, saved
            Of the forward; autograd has kept the tensors.
        dy : torch.Tensor
            Gradient of the result.
        extra_grads : tuple of torch.Tensor
            Those of the extra outputs.
        weight : Callable, optional
            Returns the weight of the first linear op, whose gradient is computed here; without it, that waits for
            ``backward_dw``.
        dwhole : torch.Tensor, optional
            Another gradient of the gathered input.
        """
        exchange, ranks, first = self.exchange, self.ranks, self.first
        if exchange.behind == "scatter":
            dy = ranks.gather(dy)[0]
        tensors, regather = list(saved), None
        if run.local is not None:
            local = tensors[run.local]
            assert local is not None
            tensors[run.local], regather = ranks.gather(local, later=True)
        count = 0 if first is None else first.deferred_count()
        try:
            dx, found, extras = rows.run_backward(run.kept, tuple(tensors), dy, extra_grads)
            gradients, reduction = list(found), None
            if dx is not None and dwhole is not None:
                dx = dx + dwhole
            if dx is not None and exchange.before == "gather":
                dx, reduction = ranks.scatter(dx, later=True)
            elif dx is not None and exchange.before == "copy":
                dx, reduction = ranks.sum(dx, later=True)
            ranks.wait(regather)
            if first is not None and weight is not None and first.deferred_count() > count:
                fuses = first.fuse_wgrad_accumulation
                given = native.program_backward_dw(first, weight(), fuses)
                if not fuses:  # else what autograd is given is there already
                    gradients[0] = given
            ranks.wait(reduction)
        except BaseException:
            if first is not None:
                first.forget_deferred(count)
            raise
        return dx, gradients, extras
