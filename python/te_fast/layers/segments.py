"""A layer that is shared among ranks, as it runs: native programs and the collectives between them, one autograd node.

A collective is started as soon as its operand is there, and waited for where its result is read: the gradient of the
input is reduced behind the weight's gradient, whose input is gathered again behind the gradient of the input.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from te_fast.errors import RanksError, TeFastError
from te_fast.layers.ranks import Exchange
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
from te_fast.runtime.rows import Tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_fast.layers.program import ProgramLayer


@contextmanager
def _named(layer: str, collective: str) -> Iterator[None]:
    """Name the layer in what ``torch.distributed`` raises when a rank is gone or late."""
    try:
        yield
    except TeFastError:
        raise
    except RuntimeError as error:
        message = (
            f"{layer}: {collective} of tensor parallelism failed; another rank has stopped, is late, or does something "
            f"else: {error}"
        )
        raise RanksError(message) from error


class Segments:
    """How a layer runs on several ranks.

    Parameters
    ----------
    layer : ProgramLayer
        The layer.
    exchange : Exchange
        Its collectives.
    head : Program, optional
        The norm, where something stands between it and the first linear op.
    body : Program
        The linear ops, and what is between them.
    """

    __slots__ = ("_agreement", "_first", "_layer", "body", "exchange", "group", "head", "size")

    def __init__(
        self,
        layer: ProgramLayer,
        exchange: Exchange,
        head: native.Program | None,
        body: native.Program,
    ) -> None:
        self._layer = layer
        self.exchange, self.head, self.body = exchange, head, body
        self.group = layer.tp_group
        self.size = get_distributed_world_size(self.group)
        columns = layer._input_size()
        kind = f"{type(layer).__name__} {exchange} {columns} {body.widths(columns)}"
        self._agreement = Agreement(layer.name, self.group, kind)
        name = layer._LINEARS[0]
        #: The linear op whose weight's gradient the reduction of the input's runs behind.
        self._first = layer._handles[name] if exchange.before is not None else None

    def take_over(self) -> None:
        """Have the linear ops run as this exchange wants it."""
        if self._first is not None:
            self._first.delay_wgrad_compute = True

    def apply(
        self,
        x: torch.Tensor,
        parameters: Tensors,
        version: int | None,
        is_first_microbatch: bool | None,
    ) -> Any:
        """Run the layer on this rank's input; return its result, and the norm's if the layer returns that.

        Raises
        ------
        RanksError
            If ranks do not call it alike, or one is gone.
        ShapeError
            If rows cannot be shared out among the ranks.
        """
        layer = self._layer
        if self.exchange.behind == "scatter" and self.exchange.before != "gather":
            check_rows(
                x.shape[0] if x.dim() > 1 else 1, self.size, f"{layer.name}: sequence_parallel"
            )
        if self._first is not None and FP8GlobalStateManager.is_fp8_enabled():
            # Not under delayed scaling, whose scale has changed by then: the gathered input is kept in FP8.
            again = not FP8GlobalStateManager.get_fp8_recipe().delayed()
            self._first.save_original_input = again and self.exchange.before == "gather"
        call = _Call(self, layer, version, is_first_microbatch)
        wanted = torch.is_grad_enabled() and (
            x.requires_grad or any([parameter.requires_grad for parameter in parameters])
        )
        self._agreement.check(x, wanted=wanted, needs_input=x.requires_grad)
        if wanted:
            return _apply_function(call, x, *parameters)
        with torch.no_grad():
            outputs = call.forward(x, parameters, needs_x=False, wanted=False)
        return outputs if len(outputs) > 1 else outputs[0]

    # Collectives ----------------------------------------------------------------------------------

    def gather(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Concatenate the rows of all ranks."""
        with _named(self._layer.name, "an all-gather"):
            return gather_along_first_dim(x, self.group, async_op=later)

    def scatter(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Sum over all ranks, and keep this one's rows."""
        with _named(self._layer.name, "a reduce-scatter"):
            return reduce_scatter_along_first_dim(x, self.group, async_op=later)

    def sum(self, x: torch.Tensor, *, later: bool = False) -> tuple[torch.Tensor, Handle]:
        """Sum over all ranks."""
        with _named(self._layer.name, "an all-reduce"):
            return allreduce(x.contiguous(), self.group, async_op=later)

    def wait(self, handle: Handle) -> None:
        """Let what follows on this stream see a collective's result."""
        if handle is not None:
            with _named(self._layer.name, "a collective"):
                handle.wait()

    @property
    def first(self) -> Any:
        """What the first linear op keeps, if its weight's gradient waits for a collective; else None."""
        return self._first


class _Call:
    """One forward of a layer, and what its backward needs."""

    __slots__ = (
        "_is_first_microbatch",
        "_layer",
        "_segments",
        "_version",
        "body_kept",
        "body_saved",
        "counts",
        "head_kept",
        "head_saved",
        "local",
        "needs_x",
        "shape",
        "tail",
    )

    def __init__(
        self,
        segments: Segments,
        layer: ProgramLayer,
        version: int | None,
        is_first_microbatch: bool | None,
    ) -> None:
        self._segments, self._layer = segments, layer
        self._version, self._is_first_microbatch = version, is_first_microbatch
        norm = len(layer._norm_names()) if segments.head is not None else 0
        #: Parameters of the head, and of the tail: a bias that is added to the sum of all ranks.
        self.counts = norm
        self.tail: torch.Tensor | None = None
        self.head_kept: Any = None
        self.body_kept: Any = None
        self.head_saved: Tensors = ()
        self.body_saved: list[Any] = []
        #: Where among them this rank's rows stand for the gathered ones.
        self.local: int | None = None
        self.needs_x = False
        self.shape = torch.Size()

    def _run(
        self,
        program: native.Program,
        x: torch.Tensor,
        parameters: Tensors,
        version: int | None,
        *,
        needs_x: bool,
        wanted: bool,
    ) -> Any:
        layer, first = self._layer, self._is_first_microbatch
        if x.numel() == 0:
            if FP8GlobalStateManager.is_fp8_enabled() and layer.fp8_meta["recipe"].delayed():
                # Other ranks may have rows, and reduce their maxima with this one.
                layer._init_delayed_scaling()
            y, _, kept, saved = rows.run_on_nothing(program, x, (), parameters, first is True)
        else:
            y, _, kept, saved = native.program_run_forward(
                program, layer, x, (), first, needs_x, (), wanted, parameters, version
            )
        return y, kept, list(saved)

    # Forward --------------------------------------------------------------------------------------

    def forward(
        self, x: torch.Tensor, parameters: Tensors, *, needs_x: bool, wanted: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the result, and the norm's if the layer returns that."""
        segments, layer = self._segments, self._layer
        exchange = segments.exchange
        self.needs_x = needs_x
        head, body = parameters[: self.counts], parameters[self.counts :]
        if exchange.behind is not None and layer.apply_bias:
            body, self.tail = body[:-1], body[-1]
        normed = x
        if segments.head is not None:
            normed, self.head_kept, self.head_saved = self._run(
                segments.head, x, head, None, needs_x=needs_x, wanted=wanted
            )
            needs_x = wanted and (needs_x or any([parameter.requires_grad for parameter in head]))
        whole = segments.gather(normed)[0] if exchange.before == "gather" else normed
        self.shape = whole.shape
        y, self.body_kept, saved = self._run(
            segments.body, whole, body, self._version, needs_x=needs_x, wanted=wanted
        )
        if whole is not normed and wanted:
            self.local = next((i for i, kept in enumerate(saved) if kept is whole), None)
            if self.local is not None:
                saved[self.local] = normed
        self.body_saved = saved
        if exchange.behind == "scatter":
            y = segments.scatter(y)[0]
        elif exchange.behind == "sum":
            y = segments.sum(y)[0]
        if self.tail is not None:
            y.add_(self.tail.detach())
        if not layer.return_layernorm_output:
            return (y,)
        return y, whole if layer.return_layernorm_output_gathered else normed

    def take_saved(self) -> Tensors:
        """Give the tensors away that autograd is to save."""
        saved = (*self.head_saved, *self.body_saved)
        self.head_saved, self.body_saved = (), []
        return saved

    # Backward -------------------------------------------------------------------------------------

    def backward(
        self, saved: Tensors, grads: tuple[torch.Tensor | None, ...], counts: int
    ) -> tuple[Any, ...]:
        """Return the gradients of input and parameters; `counts` tensors were saved of the head."""
        segments, layer = self._segments, self._layer
        exchange = segments.exchange
        dy, dnormed = grads[0], grads[1] if len(grads) > 1 else None
        assert dy is not None
        tail_grads: tuple[Any, ...] = ()
        if self.tail is not None:
            tail_grads = (self._bias_gradient(dy),)
        if exchange.behind == "scatter":
            dy = segments.gather(dy)[0]
        body_saved, regather = list(saved[counts:]), None
        if self.local is not None:
            body_saved[self.local], regather = segments.gather(body_saved[self.local], later=True)
        first = segments.first
        before = 0 if first is None else first.deferred_count()
        try:
            dx, gradients, _ = rows.run_backward(self.body_kept, tuple(body_saved), dy, ())
            gradients = list(gradients)
            is_whole = layer.return_layernorm_output_gathered and exchange.before == "gather"
            if dx is not None and dnormed is not None and is_whole:
                dx, dnormed = dx + dnormed, None
            reduction = None
            if dx is not None and exchange.before == "gather":
                dx, reduction = segments.scatter(dx, later=True)
            elif dx is not None and exchange.before == "copy":
                dx, reduction = segments.sum(dx, later=True)
            segments.wait(regather)
            if (
                first is not None
                and not layer.delay_wgrad_compute
                and first.deferred_count() > before
            ):
                given = self._weight_gradient(first)
                if given is not None:
                    gradients[0] = given
            segments.wait(reduction)
        except BaseException:
            if first is not None:
                first.forget_deferred(before)
            raise
        if segments.head is None:
            return (dx if self.needs_x else None, *gradients, *tail_grads)
        if dnormed is not None:
            dx = dnormed if dx is None else dx + dnormed
        if self.head_kept is None or dx is None:
            return (None, *(None,) * self.counts, *gradients, *tail_grads)
        dx, head_gradients, _ = rows.run_backward(self.head_kept, saved[:counts], dx, ())
        return (dx if self.needs_x else None, *head_gradients, *gradients, *tail_grads)

    def _weight_gradient(self, first: native.WeightHandle) -> torch.Tensor | None:
        """Compute the gradient that the body left; return what autograd is given, None if that is settled."""
        weight = self._layer._whole_weight()
        return native.program_backward_dw(first, weight, first.fuse_wgrad_accumulation)

    def _bias_gradient(self, dy: torch.Tensor) -> torch.Tensor | None:
        assert self.tail is not None
        if not self.tail.requires_grad:
            return None
        summed = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32)
        return summed.to(self.tail.dtype)


class _Function(torch.autograd.Function):
    """Arguments: call, input, parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        outputs = call.forward(x, parameters, needs_x=x.requires_grad, wanted=True)
        ctx.head_count = len(call.head_saved)
        ctx.save_for_backward(*call.take_saved())
        ctx.call = call
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.call.backward(ctx.saved_tensors, grads, ctx.head_count))


# The C++ method: what Python adds to it is for functorch, whose transforms layers refuse.
_apply_function = super(torch.autograd.Function, _Function).apply
