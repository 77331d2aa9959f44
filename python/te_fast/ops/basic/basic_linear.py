"""``y = x Wᵀ``: the operation that runs in FP8."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from te_fast.dispatch import gemm
from te_fast.errors import ArgumentError, UnsupportedError
from te_fast.ops.basic.weighted import WeightedOperation
from te_fast.ops.common import parameter_options, size_of_ranks, to_real
from te_fast.ops.op import OperationContext
from te_fast.parallel.checkpoint import Share
from te_fast.parallel.quantized import Role, quantizer_of_rows
from te_fast.parallel.ranks import divided, exchange_of
from te_fast.parallel.segment import Segment
from te_fast.recipe import Recipe
from te_fast.runtime import main_grad, native, rows
from te_fast.runtime.arguments import check_flags, check_functions, check_sizes
from te_fast.runtime.global_state import autocast_state
from te_fast.tensor import primary


def parallelism(op: str, mode: str | None, group: Any) -> tuple[str | None, int]:
    """Return the mode of tensor parallelism, None for one rank, and the number of ranks.

    Raises
    ------
    ArgumentError
        If the mode does not exist.
    RanksError
        If this rank is not in the group.
    """
    if mode not in (None, "column", "row"):
        message = f"{op}: tensor_parallel_mode must be None, 'column' or 'row', got {mode!r}"
        raise ArgumentError(message)
    if mode is None:
        return None, 1
    size = size_of_ranks(group, op, "tensor_parallel_group")
    return (None, 1) if size == 1 else (mode, size)


class BasicLinear(WeightedOperation):
    """Apply ``y = x Wᵀ``, in FP8 inside :class:`te_fast.pytorch.autocast`.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the last dimension. In FP8 both are multiples of 16.
    device : torch.device or str, optional
        Where the weight is made: the GPU, or the CPU without one. ``'meta'`` defers to
        :meth:`reset_parameters` or the first forward.
    dtype : torch.dtype, optional
        Type of the weight; ``torch.get_default_dtype()`` by default.
    tensor_parallel_mode : {'column', 'row'}, optional
        Ranks share `out_features`, or `in_features`. The input's gradient, or the result, is summed over them.
    tensor_parallel_group : torch.distributed.ProcessGroup, optional
        The ranks; all by default.
    sequence_parallel : bool, default = False
        Each rank has its own rows of the input of a column-parallel operation, or of the result of a row-parallel
        operation.
    rng_state_tracker_function : Callable, optional
        Gives the random number generator's tracker that initialisation forks.
    accumulate_into_main_grad : bool, default = False
        Add the weight's gradient to ``weight.main_grad``.
    userbuffers_options : dict, optional
        Not supported yet.

    See Also
    --------
    Linear : With a bias.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te
    >>> from te_fast.pytorch import ops
    >>> op = ops.BasicLinear(32, 16, device="cpu")
    >>> with te.autocast():
    ...     y = op(torch.ones(16, 32))
    >>> y.shape
    torch.Size([16, 16])
    """

    weight: torch.Tensor
    _weight_names = _needed_names = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: torch.distributed.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if userbuffers_options:
            message = f"{name}: userbuffers_options is not supported yet; leave it at its default"
            raise UnsupportedError(message)
        check_sizes(name, in_features=in_features, out_features=out_features)
        check_flags(name, accumulate_into_main_grad=accumulate_into_main_grad)
        check_functions(name, rng_state_tracker_function=rng_state_tracker_function)
        mode, size = parallelism(name, tensor_parallel_mode, tensor_parallel_group)
        self.in_features = self.local_in_features = in_features
        self.out_features = self.local_out_features = out_features
        if mode == "column":
            self.local_out_features = divided(name, "out_features", out_features, size)
        elif mode == "row":
            self.local_in_features = divided(name, "in_features", in_features, size)
        # As in Transformer Engine, these have no effect with one rank.
        self.tensor_parallel_mode = mode
        self.tensor_parallel_group = None if mode is None else tensor_parallel_group
        self.tensor_parallel_size = size
        self.sequence_parallel = mode is not None and sequence_parallel
        self._exchange = exchange_of(mode, size, sequence_parallel=sequence_parallel)
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = bool(accumulate_into_main_grad)
        self._note_init()
        self._make_handle()
        sizes = self.local_out_features, self.local_in_features
        weight = torch.empty(*sizes, **parameter_options(device, dtype, name))
        self.register_parameter("weight", torch.nn.Parameter(weight))
        if not weight.is_meta:
            self.reset_parameters()

    def num_quantizers(self, mode: str) -> int:
        """Two forward (input, weight), one backward (gradient of the output)."""
        return {"forward": 2, "backward": 1}.get(mode, 0)

    def reset_parameters(self) -> None:
        """Initialise the weight; a weight on the meta device gets memory first."""
        weight = to_real(self, "weight")
        tracker = self._rng_state_tracker_function
        init = partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))
        with nullcontext() if tracker is None else tracker().fork(), torch.no_grad():
            if primary.is_quantized(weight):
                primary.initialise_quantized(weight, init)
            else:
                init(weight)
        self._quantize_weights()
        self._drop_weight_cache()

    def pre_first_fuser_forward(self) -> None:
        """Give a weight on the meta device memory."""
        if self.weight.is_meta:
            self.reset_parameters()

    # The native half ------------------------------------------------------------------------------

    def _make_handle(self) -> None:
        handle = native.WeightHandle(type(self).__name__)
        handle.fuse_wgrad_accumulation = self._accumulate_into_main_grad
        self.__dict__["_handle"] = handle

    def _append_to(self, program: Any, label: str) -> None:
        sizes = (self.local_in_features, self.local_out_features)
        program.linear(label, self._handle, self._parameters, "weight", *sizes)

    def _shares_of_parameters(self) -> dict[str, Share]:
        """Return which parameters ranks share."""
        if self.tensor_parallel_mode is None:
            return {}
        dim = 0 if self.tensor_parallel_mode == "column" else 1
        group = self.tensor_parallel_group
        return {"weight": Share(dim, torch.distributed.group.WORLD if group is None else group)}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the native half out; the copy makes its own."""
        state = super().__getstate__()
        state.pop("_own_segment", None)
        return state

    # In Python ------------------------------------------------------------------------------------

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Multiply; in high precision, save input and weight."""
        if self._exchange:
            return self._forward_on_ranks(ctx, input_)
        if not autocast_state.fp8_enabled:
            return super().op_forward(ctx, input_)
        x, wanted = self._cast(ctx, input_), ctx.requires_grad
        weight_wanted = wanted and self.weight.requires_grad
        y, _extra, kept, saved = native.program_run_forward(
            self._program(), self, x, (), ctx.is_first_microbatch, wanted, (), weight_wanted
        )
        ctx.kept = kept  # type: ignore[attr-defined]
        ctx.save_for_backward(*saved)
        return y

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None]]:
        """Multiply by the weight, and the input by the gradient."""
        kept: Any = getattr(ctx, "kept", None)
        saved = ctx.saved_tensors or ()
        if self._exchange:
            weight_of = partial(getattr, self, "weight")
            dx, ranks_grads, _ = self._segment().backward(
                kept, saved, grad_output, (), weight_of, quantizer=self._quantizer_of_rows
            )
            return dx, tuple(ranks_grads)
        if kept is not None:
            dx, grads, _ = rows.run_backward(kept, saved, grad_output, ())
            return dx, grads
        x, weight = saved
        assert x is not None
        assert weight is not None
        weight = weight.dequantize() if primary.is_quantized(weight) else weight
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dy = grad_output.reshape(-1, self.out_features).contiguous()
        gemm(dy, weight.to(dy.dtype), dx.view(-1, self.in_features), w_k_outermost=True)
        if not self.weight.requires_grad:
            return dx, (None,)
        dw: Any = native.weight_gradient(x, grad_output)
        if not self._accumulate_into_main_grad:
            return dx, (dw.to(self.weight.dtype),)
        name, overwrite = type(self).__name__, ctx.is_first_microbatch is True
        return dx, (main_grad.give(self.weight, dw, name, fuse=True, overwrite=overwrite),)

    def _quantizer_of_rows(self, recipe: Recipe, role: Role, group: Any) -> Any:
        """Return the quantizer for gathered rows of the input or of the result's gradient; None to gather values."""
        state = self._delayed_state("backward" if role == "grad" else "forward")
        return quantizer_of_rows(recipe, role, state, 0, group)

    def _segment(self) -> Segment:
        """Return the program of this single operation, between its collectives."""
        segment: Segment | None = self.__dict__.get("_own_segment")
        if segment is None or segment.program is not self._program():
            name, group = type(self).__name__, self.tensor_parallel_group
            kind = f"{name}({self.extra_repr()})"
            made = Segment(name, self._program(), self._exchange, group, self._handle, kind)
            segment = self.__dict__["_own_segment"] = made
        return segment

    def _forward_on_ranks(self, ctx: OperationContext, input_: torch.Tensor) -> torch.Tensor:
        x, wanted = self._cast(ctx, input_), ctx.requires_grad
        needs_weight = wanted and self.weight.requires_grad
        needs = (wanted, (), needs_weight)
        segment = self._segment()
        segment.check(x, wanted=wanted, needs_x=wanted, needs=[needs_weight])
        y, _, run, _ = segment.forward(
            self,
            x,
            (),
            ctx.is_first_microbatch,
            needs,
            (self.weight,),
            quantizer=self._quantizer_of_rows,
        )
        ctx.save_for_backward(*run.saved)
        ctx.kept, run.saved = run, []  # type: ignore[attr-defined]
        return y

    def extra_repr(self) -> str:
        """Sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
