"""Native operations that run from Python, because a neighbour is a fusion or a method of the user."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from te_fast.errors import StateError
from te_fast.ops.common import autocast_dtype
from te_fast.ops.op import BasicOperation, OperationContext
from te_fast.runtime import native, rows
from te_fast.runtime.rows import Tensors


def _narrow(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a type that programs take; FP64 becomes FP32."""
    return x.float() if x.dtype == torch.float64 else x


class NativeOperation(BasicOperation):
    """An operation whose Python methods run a native program of this single operation.

    Forward keeps input, extra inputs and parameters, and backward runs the program again from them. A user's fusion of
    one direction reads these tensors, or keeps them itself.
    """

    def _result_type(
        self,
        dtype: torch.dtype,
        extras: tuple[torch.dtype, ...],
        autocast: torch.dtype | None,
    ) -> torch.dtype:
        """Return autocast's type, else the weight's type, or the input's type without a weight."""
        weight = self._parameters.get("weight")
        return autocast or (dtype if weight is None else weight.dtype)

    def _program(self) -> native.Program:
        """Return the native program of this single operation."""
        program: native.Program | None = self.__dict__.get("_own_program")
        if program is None:
            name = type(self).__name__
            program = self.__dict__["_own_program"] = native.Program(name)
            self._append_to(program, name)
        return program

    def _matrix(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the input's shape in the program's shape."""
        return x

    def _restored(self, y: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the program's result for an input of this shape."""
        return y

    def _run(self, x: torch.Tensor, extras: Tensors, parameters: Tensors, *, grads: bool) -> Any:
        """Run the program; the result is as of ``program_run_forward``."""
        program, parameters = self._program(), tuple(map(self._matrix, parameters))
        x = self._matrix(_narrow(x))
        if x.numel() == 0:
            return rows.run_on_nothing(program, x, extras, parameters, False)
        needs = (grads, [grads] * len(extras), grads)
        return native.program_run_forward(program, self, x, extras, None, *needs, parameters)

    def _cast(self, ctx: OperationContext, x: torch.Tensor, *extras: torch.Tensor) -> torch.Tensor:
        """Return the input in the type that the operation computes in, which the context notes."""
        dtypes = tuple([extra.dtype for extra in extras])
        dtype = ctx.dtype = self._result_type(x.dtype, dtypes, autocast_dtype(x))  # type: ignore[attr-defined]
        return x.to(dtype)

    def _forward(
        self, ctx: OperationContext, input_: torch.Tensor, *extras: torch.Tensor
    ) -> torch.Tensor:
        """Run the program, in the type that the operation computes in."""
        x, parameters = self._cast(ctx, input_, *extras), tuple(self.parameters())
        if ctx.requires_grad:
            ctx.save_for_backward(x, *extras, *parameters)
        y, *_ = self._run(x, extras, parameters, grads=False)
        return self._restored(y, x.shape).to(x.dtype)

    def _backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Run the program again, and its backward; return the gradients of input, parameters and extra inputs."""
        kept: Any = ctx.saved_tensors
        x, others = kept[0], kept[1:]
        extras, parameters = others[: self.num_extra_inputs], others[self.num_extra_inputs :]
        _, _, run, saved = self._run(x, extras, parameters, grads=True)
        dy = self._matrix(_narrow(grad_output))
        dx, grads, extra_grads = rows.run_backward(run, saved, dy, ())
        shaped = [grad.view_as(old) for grad, old in zip(grads, parameters, strict=True)]
        return self._restored(dx, x.shape).to(x.dtype), tuple(shaped), extra_grads

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Run the native program."""
        return self._forward(ctx, input_)

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Iterable[torch.Tensor | None]]:
        """Run the native program again, and its backward."""
        dx, grads, _ = self._backward(ctx, grad_output)
        return dx, grads


class ExtraTensorOperation(BasicOperation):
    """An operation with extra inputs or outputs: it has no ``op_forward``."""

    def op_forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: such an operation has ``fuser_forward``."""
        self._no_op_method("fuser_forward")

    def op_backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: such an operation has ``fuser_backward``."""
        self._no_op_method("fuser_backward")

    def _no_op_method(self, method: str) -> NoReturn:
        message = f"{type(self).__name__} has extra inputs or outputs: use {method}"
        raise StateError(message)
