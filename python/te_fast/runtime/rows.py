"""Calls with row counts that GEMMs do not take: zero rows, and rows that must be padded with zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from te_fast.runtime import main_grad, native
from te_fast.runtime.second_order import differentiable_once, name_of_program

Tensors = tuple[torch.Tensor, ...]


class Padding(NamedTuple):
    """Leading dimensions of a call's tensors, their product, and the rows that are appended."""

    leading: torch.Size
    rows: int
    missing: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Padding:
        """Return the number of rows that the region's GEMMs need after the rows of ``(..., features)``."""
        rows = x.shape[:-1].numel()
        return cls(x.shape[:-1], rows, native.rows_to_pad(rows))

    def pad(self, tensor: Any) -> Any:
        """Append the rows to ``(*leading, ...)``, which becomes ``(rows + missing, ...)``.

        None stays None. The call itself raises for a tensor of other dimensions.
        """
        count = len(self.leading)
        if tensor is None or tensor.shape[:count] != self.leading:
            return tensor
        flat = tensor.reshape(self.rows, *tensor.shape[count:])
        return functional.pad(flat, (0, 0) * (flat.dim() - 1) + (0, self.missing))

    def cut(self, tensor: Any) -> Any:
        """Remove the appended rows."""
        if tensor is None:
            return None
        return tensor[: self.rows].view(*self.leading, *tensor.shape[1:])


def apply_padded(
    program: native.Program, owner: Any, x: torch.Tensor, extras: Tensors, *arguments: Any
) -> Any:
    """Apply a program to inputs whose rows must be padded for its GEMMs."""
    padding = Padding.of(x)
    more = tuple(map(padding.pad, extras))
    if getattr(owner, "finds_parameters", False):
        arguments = arguments[:1]  # whole parameters, and their version, say nothing of their parts
    out = native.program_apply(program, owner, padding.pad(x), more, *arguments)
    return tuple(map(padding.cut, out)) if isinstance(out, tuple) else padding.cut(out)


class _PaddedRun(NamedTuple):
    """Data for the backward of padded rows."""

    run: native.ProgramSaved
    padding: Padding
    updates_backward_scales: bool


def run_padded(
    program: native.Program, owner: Any, x: torch.Tensor, extras: Tensors, *arguments: Any
) -> Any:
    """Run a program, without a node, on inputs whose rows must be padded for its GEMMs."""
    padding = Padding.of(x)
    more = tuple(map(padding.pad, extras))
    y, others, run, saved = native.program_run_forward(
        program, owner, padding.pad(x), more, *arguments
    )
    kept = None if run is None else _PaddedRun(run, padding, run.updates_backward_scales)
    return padding.cut(y), tuple(map(padding.cut, others)), kept, saved


class _Nothing(NamedTuple):
    """A program's call on zero rows, which launches no kernel."""

    program: native.Program
    #: Size, type and device of input and extra inputs.
    inputs: list[tuple[torch.Size, torch.dtype, torch.device]]
    parameters: Tensors
    overwrite_main_grad: bool

    @classmethod
    def of(
        cls, program: native.Program, inputs: Tensors, parameters: Tensors, overwrite: bool
    ) -> _Nothing:
        edges = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return cls(program, edges, parameters, overwrite)

    def outputs(self, x: torch.Tensor) -> Tensors:
        widths = self.program.widths(x.shape[-1])
        return tuple([x.new_zeros(*x.shape[:-1], cols) for cols in widths])

    def gradients(self, wanted: Sequence[bool]) -> tuple[list[Any], Sequence[Any]]:
        """Return the gradients of the inputs, and zeros for the parameters that need a gradient."""
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self.inputs
        ]
        overwrite = self.overwrite_main_grad
        return zeros, native.program_grads_of_nothing(
            self.program, self.parameters, wanted, overwrite
        )


class _OnNothing(torch.autograd.Function):
    """Arguments: program, number of inputs, whether `main_grad` is overwritten, inputs, parameters."""

    @staticmethod
    def forward(
        ctx: Any, program: native.Program, inputs: int, overwrite: bool, *tensors: torch.Tensor
    ) -> Any:
        nothing = ctx.call = _Nothing.of(program, tensors[:inputs], tensors[inputs:], overwrite)
        outputs = nothing.outputs(tensors[0])
        return outputs[0] if len(outputs) == 1 else outputs

    @staticmethod
    @differentiable_once(lambda ctx: name_of_program(ctx.call.program))
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        inputs = len(ctx.call.inputs)
        needed = ctx.needs_input_grad[3:]
        zeros, grads = ctx.call.gradients(needed[inputs:])
        given = [
            zero if is_wanted else None for zero, is_wanted in zip(zeros, needed, strict=False)
        ]
        return (None, None, None, *given, *grads)


class _JoinedOnNothing(torch.autograd.Function):
    """Parts as one tensor. Arguments: name, whether ``main_grad`` takes gradients, whether it is overwritten, parts."""

    @staticmethod
    def forward(
        ctx: Any, name: str, fuse: bool, overwrite: bool, *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.name, ctx.fuse, ctx.overwrite, ctx.parts = name, fuse, overwrite, parts
        ctx.set_materialize_grads(False)
        first, length = parts[0], sum(part.shape[0] for part in parts)
        return torch.empty(length, *first.shape[1:], dtype=first.dtype, device=first.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = [None] * len(ctx.parts)
        if ctx.fuse:
            trained = zip(ctx.parts, ctx.needs_input_grad[3:], strict=True)
            found = [
                _nothing_into_main_grad(ctx, part, is_delayed=grad is None) if is_wanted else None
                for part, is_wanted in trained
            ]
        elif grad is not None:
            found = list(grad.split([part.shape[0] for part in ctx.parts]))
        return (None, None, None, *found)


def _nothing_into_main_grad(
    ctx: Any, part: torch.Tensor, *, is_delayed: bool
) -> torch.Tensor | None:
    buffer = main_grad.main_grad_of(part, ctx.name)
    # `backward_dw` overwrites by the attribute itself.
    if ctx.overwrite or (not is_delayed and getattr(part, "overwrite_main_grad", False)):
        buffer.zero_()
    return main_grad.after_main_grad(part)


def joined_on_nothing(
    parts: Sequence[torch.Tensor], name: str, *, fuse: bool, overwrite: bool
) -> torch.Tensor:
    """Return a parameter in parts as one tensor for a program on zero rows, which reads no values.

    Parameters
    ----------
    parts : sequence of torch.Tensor
        The parts; a parameter that is not in parts is its only one.
    name : str
        Name of the layer or operation, for messages.
    fuse : bool
        Whether the gradients of parts go into their ``main_grad``.
    overwrite : bool
        Whether they overwrite it.
    """
    if len(parts) == 1 and not fuse:  # the program itself knows where its gradient goes
        return parts[0]
    whole: torch.Tensor = _JoinedOnNothing.apply(name, fuse, overwrite, *parts)
    return whole


def apply_on_nothing(
    program: native.Program,
    x: torch.Tensor,
    extras: Tensors,
    parameters: Tensors,
    overwrite_main_grad: bool,
) -> Any:
    """Apply a program to zero rows."""
    inputs = 1 + len(extras)
    return _OnNothing.apply(program, inputs, overwrite_main_grad, x, *extras, *parameters)


def run_on_nothing(
    program: native.Program,
    x: torch.Tensor,
    extras: Tensors,
    parameters: Tensors,
    overwrite_main_grad: bool,
) -> Any:
    """Run a program, without a node, on zero rows; the result is as of ``program_run_forward``."""
    nothing = _Nothing.of(program, (x, *extras), parameters, overwrite_main_grad)
    y, *others = nothing.outputs(x)
    return y, tuple(others), nothing, ()


def run_backward(
    kept: native.ProgramSaved | _PaddedRun | _Nothing,
    saved: tuple[torch.Tensor | None, ...],
    dy: torch.Tensor,
    extra_grads: Tensors,
    transfers: tuple[Sequence[Any], bool] | None = None,
) -> Any:
    """Return the gradients of input, parameters and extra inputs, from the data of a program's run.

    Rows of `dy` may arrive by `transfers` (``te_fast.parallel.overlap``), if the run needed no padding.
    """
    if isinstance(kept, _Nothing):
        zeros, grads = kept.gradients([parameter.requires_grad for parameter in kept.parameters])
        return zeros[0], grads, zeros[1:]
    if not isinstance(kept, _PaddedRun):
        return native.program_run_backward(kept, saved, dy, extra_grads, transfers)
    run, padding, _ = kept
    more = tuple(map(padding.pad, extra_grads))
    dx, gradients, extras = native.program_run_backward(run, saved, padding.pad(dy), more)
    return padding.cut(dx), gradients, tuple(map(padding.cut, extras))
