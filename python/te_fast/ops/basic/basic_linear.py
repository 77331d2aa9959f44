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
from te_fast.ops.basic.native import NativeOperation
from te_fast.ops.common import parameter_options, refuse_ranks, to_real
from te_fast.ops.op import OperationContext
from te_fast.runtime import main_grad, native, rows
from te_fast.runtime.global_state import autocast_state
from te_fast.tensor import primary

#: The weight's among the forward scales of delayed scaling, behind the input's.
_WEIGHT_SLOT = 1


def check_parallelism(
    op: str, mode: str | None, group: Any, options: dict[str, Any] | None = None
) -> None:
    """Raise for what runs on several ranks.

    Raises
    ------
    ArgumentError
        If the mode does not exist.
    UnsupportedError
        For a group of several ranks, and Userbuffers.
    """
    if mode not in (None, "column", "row"):
        message = f"{op}: tensor_parallel_mode must be None, 'column' or 'row', got {mode!r}"
        raise ArgumentError(message)
    if mode is not None:
        refuse_ranks(group, op, "tensor_parallel_group")
    if options:
        message = f"{op}: userbuffers_options is not supported yet; leave it at its default"
        raise UnsupportedError(message)


class BasicLinear(NativeOperation):
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
    tensor_parallel_mode, tensor_parallel_group, sequence_parallel : optional
        Tensor parallelism; groups of one rank only so far.
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
    _handle: Any
    _takes_to_fp8 = True

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
        check_parallelism(name, tensor_parallel_mode, tensor_parallel_group, userbuffers_options)
        # With one rank, as in Transformer Engine, these say nothing.
        del sequence_parallel
        self.in_features = self.local_in_features = in_features
        self.out_features = self.local_out_features = out_features
        self.tensor_parallel_mode = None
        self.tensor_parallel_group = None
        self.tensor_parallel_size = 1
        self.sequence_parallel = False
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self._with_quantized_weight = autocast_state.fp8_parameters
        self._preserves_init_value = autocast_state.high_precision_init_val
        self._weight_recipe = autocast_state.model_recipe
        self._make_handle()
        weight = torch.empty(out_features, in_features, **parameter_options(device, dtype, name))
        self.register_parameter("weight", torch.nn.Parameter(weight))
        if not weight.is_meta:
            self.reset_parameters()

    def num_quantizers(self, mode: str) -> int:
        """Two forward (input, weight), one backward (gradient of the output)."""
        return {"forward": 2, "backward": 1}.get(mode, 0)

    def reset_parameters(self) -> None:
        """Initialise the weight, after making it real if it is on the meta device."""
        weight = to_real(self, "weight")
        tracker = self._rng_state_tracker_function
        init = partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))
        with nullcontext() if tracker is None else tracker().fork(), torch.no_grad():
            if primary.is_quantized(weight):
                primary.initialise_quantized(weight, init)
            else:
                init(weight)
        self._quantize_weight()
        self._drop_weight_cache()

    def _quantize_weight(self) -> None:
        """Put a quantised tensor in the place of the weight, if the operation was made to have one."""
        recipe, weight = self._weight_recipe, self.weight
        if not self._with_quantized_weight or recipe is None or primary.is_quantized(weight):
            return
        self.reset_recipe_state(recipe=recipe)
        quantizer = primary.weight_quantizer(recipe, self._scaling_states()[0], _WEIGHT_SLOT)
        made = primary.quantized_parameter(weight, quantizer, preserves=self._preserves_init_value)
        self.register_parameter("weight", made)

    def _point_weight(self) -> None:
        """Let a weight of delayed scaling be quantised with the scale that the operation has now."""
        if primary.is_quantized(self.weight):
            primary.point_at(self.weight, self._scaling_states()[0], _WEIGHT_SLOT)

    def pre_first_fuser_forward(self) -> None:
        """Make a weight on the meta device real."""
        if self.weight.is_meta:
            self.reset_parameters()

    # The native half ------------------------------------------------------------------------------

    def _make_handle(self) -> None:
        handle = native.WeightHandle(type(self).__name__)
        handle.fuse_wgrad_accumulation = self._accumulate_into_main_grad
        self.__dict__["_handle"] = handle

    def _append_to(self, program: Any, label: str) -> None:
        sizes = (self.in_features, self.out_features)
        program.linear(label, self._handle, self._parameters, "weight", *sizes)

    def _set_slots(self, epoch: int) -> None:
        self._point_weight()
        forward, backward = self._scaling_states()
        if forward is not None and backward is not None:
            self._handle.set_slots(epoch, forward.slots, backward.slots, 0, 0)

    def _drop_slots(self) -> None:
        self._handle.drop_slots()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a weight that FSDP brings back may have other values, at the same address and version."""
        super().__setattr__(name, value)
        if isinstance(value, torch.Tensor) and "_handle" in self.__dict__:
            self._drop_weight_cache()

    def _drop_weight_cache(self) -> None:
        self._handle.drop_weight_cache()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Forget what was quantised: ``.to()`` and its kin exchange the weight's memory."""
        kept = primary.attributes_of(self)
        result = super()._apply(partial(primary.keep_quantized, fn), recurse)
        primary.restore_attributes(self, kept)
        self._point_weight()
        self._drop_weight_cache()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Leave the native half out."""
        state = super().__getstate__()
        state.pop("_handle", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a native half of this copy's own."""
        super().__setstate__(state)
        self._make_handle()
        self._point_weight()

    def set_extra_state(self, state: Any) -> None:
        """Restore what :meth:`get_extra_state`, or Transformer Engine's, returned."""
        super().set_extra_state(state)
        self._point_weight()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Values in high precision are quantised as they are loaded, with the scale of the checkpoint.
        key = f"{prefix}_extra_state"
        if key in state_dict and primary.is_quantized(self.weight):
            self.set_extra_state(state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # In Python ------------------------------------------------------------------------------------

    def op_forward(self, ctx: OperationContext, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        """Multiply; in high precision input and weight are what is kept."""
        if not autocast_state.fp8_enabled:
            return super().op_forward(ctx, input_)
        x, wanted = self._cast(ctx, input_), ctx.requires_grad
        weight_wanted = wanted and self.weight.requires_grad
        y, _extra, kept, saved = native.program_run_forward(
            self._program(), self, x, (), None, wanted, (), weight_wanted
        )
        ctx.kept = kept  # type: ignore[attr-defined]
        ctx.save_for_backward(*saved)
        return y

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None]]:
        """Multiply by the weight, and the input by the gradient."""
        kept, saved = getattr(ctx, "kept", None), ctx.saved_tensors or ()
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
        return dx, (main_grad.give(self.weight, dw, fuse=True, overwrite=False),)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
