"""A layer that ranks share: a norm, and linear ops between collectives, in one autograd node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_fast.graphs.traced import Traced
from te_fast.parallel import in_graphs
from te_fast.parallel.segment import Run, Segment
from te_fast.runtime import native, rows
from te_fast.runtime.parts import joined
from te_fast.runtime.second_order import differentiable_once, no_forward_mode

if TYPE_CHECKING:
    from te_fast.layers.program import ProgramLayer
    from te_fast.parallel.ranks import Exchange
    from te_fast.runtime.rows import Tensors


class Segments:
    """How a layer runs on several ranks.

    Parameters
    ----------
    layer : ProgramLayer
        The layer.
    exchange : Exchange
        Its collectives.
    head : Program, optional
        The norm, if a collective stands between it and the first linear op in either direction.
    body : Program
        The linear ops and the ops between them.
    """

    # No reference to the layer: a cycle would leave the layer and its memory to the garbage collector.
    __slots__ = ("_in_graphs", "body", "head", "norms")

    def __init__(
        self,
        layer: ProgramLayer,
        exchange: Exchange,
        head: native.Program | None,
        body: native.Program,
    ) -> None:
        self.head = head
        #: Parameters of the head.
        self.norms = len(layer._norm_names()) if head is not None else 0
        self._in_graphs: SegmentsInGraphs | None = None
        first = layer._handles[layer._LINEARS[0]]
        columns = layer._input_size()
        settings = [(name, getattr(layer, name, None)) for name in sorted(layer._CONSTANTS)]
        kind = f"{type(layer).__name__} {columns} {body.widths(columns)} {settings}"
        self.body = Segment(layer.name, body, exchange, layer.tp_group, first, kind)

    def apply(
        self,
        layer: ProgramLayer,
        x: torch.Tensor,
        parameters: Tensors,
        version: int | None,
        is_first_microbatch: bool | None,
    ) -> Any:
        """Run the layer on this rank's input; return its result, and the norm's result if the layer returns it.

        Raises
        ------
        RanksError
            If ranks do not call it alike, or one is gone.
        ShapeError
            If rows cannot be shared out among the ranks.
        """
        needs = [parameter.requires_grad for parameter in parameters]
        wanted = torch.is_grad_enabled() and (x.requires_grad or any(needs))
        self.body.check(x, wanted=wanted, needs_x=x.requires_grad, needs=needs if wanted else ())
        call = _Call(self, layer, version, is_first_microbatch)
        if wanted:
            return _apply_function(call, x, *parameters)
        with torch.no_grad():
            outputs = call.forward(x, parameters, needs_x=False, wanted=False)
        return outputs if len(outputs) > 1 else outputs[0]

    def in_graphs(self, layer: ProgramLayer) -> SegmentsInGraphs:
        """Return the form of the layer for tracers."""
        if self._in_graphs is None:
            self._in_graphs = SegmentsInGraphs(self, layer)
        return self._in_graphs


class SegmentsInGraphs:
    """A shared layer in graphs: its programs as operators, the collectives as those of torch between them.

    The collectives carry values, not bytes, and the compiler arranges them. The results have the bits of eager calls,
    since gathered rows are quantised with the same scales.

    Parameters
    ----------
    segments : Segments
        The layer on its ranks.
    layer : ProgramLayer
        The layer.
    """

    def __init__(self, segments: Segments, layer: ProgramLayer) -> None:
        body = segments.body
        head = segments.head
        self.head = None if head is None else Traced(head, layer, layer.name)
        self.body = Traced(body.program, layer, layer.name)
        self.exchange = body.exchange
        self.ranks = in_graphs.ranks_of(layer.name, body.ranks.group)
        self.norms = segments.norms

    def run(
        self,
        layer: ProgramLayer,
        x: torch.Tensor,
        parameters: list[tuple[torch.Tensor, ...]],
        is_first_microbatch: bool | None,
    ) -> Any:
        """Run the layer under a tracer; return its result, and the norm's result if the layer returns it."""
        from te_fast.graphs import operators

        exchange, ranks = self.exchange, self.ranks
        head, body = parameters[: self.norms], parameters[self.norms :]
        tail = None
        if exchange.behind is not None and layer.apply_bias:
            body, tail = body[:-1], body[-1]
        normed = x
        if self.head is not None:
            normed = operators.apply(self.head, layer, x, (), tuple(head), is_first_microbatch)
        whole = ranks.before(exchange, normed)
        y = operators.apply(self.body, layer, whole, (), tuple(body), is_first_microbatch)
        y = ranks.behind(exchange, y)
        if tail is not None:
            y = y + joined(list(tail)).to(y.dtype)
        if not layer.return_layernorm_output:
            return y
        return y, whole if layer.return_layernorm_output_gathered else normed


class _Call:
    """One forward of a layer, and the tensors that its backward needs."""

    __slots__ = (
        "_is_first_microbatch",
        "_layer",
        "_segments",
        "_version",
        "body",
        "head",
        "head_saved",
        "needs_x",
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
        #: A bias that is added to the sum of all ranks.
        self.tail: torch.Tensor | None = None
        self.head: Any = None
        self.head_saved: Tensors = ()
        self.body = Run(None)
        self.needs_x = False

    # Forward --------------------------------------------------------------------------------------

    def forward(
        self, x: torch.Tensor, parameters: Tensors, *, needs_x: bool, wanted: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the result, and the norm's result if the layer returns it."""
        segments, layer = self._segments, self._layer
        self.needs_x = needs_x
        head, body = parameters[: segments.norms], parameters[segments.norms :]
        if segments.body.exchange.behind is not None and layer.apply_bias:
            body, self.tail = body[:-1], body[-1]
        normed = x
        if segments.head is not None:
            normed = self._run_head(x, head, needs_x=needs_x, wanted=wanted)
            needs_x = wanted and (needs_x or any([parameter.requires_grad for parameter in head]))
        y, _, self.body, whole = segments.body.forward(
            layer,
            normed,
            (),
            self._is_first_microbatch,
            (needs_x, (), wanted),
            body,
            self._version,
            # Users get gathered rows in high precision.
            None if layer.return_layernorm_output_gathered else layer._quantizer_of_rows,
        )
        if self.tail is not None:
            y.add_(self.tail.detach())
        if not layer.return_layernorm_output:
            return (y,)
        return y, whole if layer.return_layernorm_output_gathered else normed

    def _run_head(
        self, x: torch.Tensor, parameters: Tensors, *, needs_x: bool, wanted: bool
    ) -> torch.Tensor:
        program, first = self._segments.head, self._is_first_microbatch
        assert program is not None
        normed: torch.Tensor
        if x.numel() == 0:
            normed, _, self.head, saved = rows.run_on_nothing(program, x, (), parameters, False)
        else:
            normed, _, self.head, saved = native.program_run_forward(
                program, self._layer, x, (), first, needs_x, (), wanted, parameters
            )
        self.head_saved = tuple(saved)
        return normed

    def take_saved(self) -> Tensors:
        """Return the tensors that autograd must save, and drop them here."""
        saved: Any = (*self.head_saved, *self.body.saved)
        self.head_saved, self.body.saved = (), []
        return saved

    # Backward -------------------------------------------------------------------------------------

    def backward(
        self, saved: Tensors, grads: tuple[torch.Tensor | None, ...], count: int
    ) -> tuple[Any, ...]:
        """Return the gradients of input and parameters; the first `count` tensors of `saved` are the head's."""
        layer, body = self._layer, self._segments.body
        dy, dnormed = grads[0], grads[1] if len(grads) > 1 else None
        assert dy is not None
        last = () if self.tail is None else (self._bias_gradient(self.tail, dy),)
        dwhole = None
        if layer.return_layernorm_output_gathered and body.exchange.before == "gather":
            dwhole, dnormed = dnormed, None
        weight = None if layer.delay_wgrad_compute else layer._whole_weight
        dx, gradients, _ = body.backward(
            self.body, saved[count:], dy, (), weight, dwhole, layer._quantizer_of_rows
        )
        if self._segments.head is None:
            return (dx if self.needs_x else None, *gradients, *last)
        if dnormed is not None:
            dx = dnormed if dx is None else dx + dnormed
        norms: Any = (None,) * self._segments.norms
        if dx is not None and self.head is not None:
            dx, norms, _ = rows.run_backward(self.head, saved[:count], dx, ())
        return (dx if self.needs_x else None, *norms, *gradients, *last)

    @staticmethod
    def _bias_gradient(bias: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
        if not bias.requires_grad:
            return None
        return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(bias.dtype)


class _Function(torch.autograd.Function):
    """Arguments: call, input, parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        outputs = call.forward(x, parameters, needs_x=x.requires_grad, wanted=True)
        ctx.head_count = len(call.head_saved)
        ctx.save_for_backward(*call.take_saved())
        ctx.call = call
        return outputs if len(outputs) > 1 else outputs[0]

    jvp = no_forward_mode(lambda ctx: ctx.call._layer.name)

    @staticmethod
    @differentiable_once(lambda ctx: ctx.call._layer.name)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.call.backward(ctx.saved_tensors, grads, ctx.head_count))


# The C++ method: Python's wrapper serves functorch, whose transforms layers refuse.
_apply_function = super(torch.autograd.Function, _Function).apply
