"""``y = x W_eᵀ + b_e`` on the rows of each expert: the operation of a mixture that runs in FP8."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from te_fast.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from te_fast.ops.basic.native import ExtraTensorOperation, NativeOperation
from te_fast.ops.common import parameter_options, to_real
from te_fast.runtime import native
from te_fast.runtime.capturing import is_graph_capturing
from te_fast.runtime.compiling import is_traced
from te_fast.runtime.global_state import autocast_state
from te_fast.runtime.parts import compute_deferred, joined, lay_together

#: A block of a kernel finds the expert of its rows by a scan over all.
_MAX_GROUPS = 1024
#: Slots of delayed scaling of one expert: input and weight; gradient of the output.
_SLOTS = (2, 1)


class GroupedLinear(ExtraTensorOperation, NativeOperation):
    """Apply ``y = x W_eᵀ + b_e`` to the rows of each expert, in FP8 inside :class:`te_fast.pytorch.autocast`.

    The extra input counts the rows of the experts, which follow each other. Counts on the GPU are not read on the host:
    what they say beyond the rows of the input is cut off, and rows that belong to no expert are not written.

    Parameters
    ----------
    num_groups : int
        Number of experts.
    in_features, out_features : int
        Sizes of the last dimension. In FP8 both are multiples of 16.
    bias : bool, default = True
        Have biases.
    device, dtype : optional
        As of :class:`BasicLinear`.
    rng_state_tracker_function : Callable, optional
        Gives the random number generator's tracker that initialisation forks.
    accumulate_into_main_grad : bool, default = False
        Add the weights' gradients to their ``main_grad``.
    single_grouped_weight, single_grouped_bias : bool, default = False
        One parameter for all experts.
    delay_wgrad_compute : bool, default = False
        Leave the weights' gradients to :meth:`backward_dw`.
    scale_bias : bool, default = False
        Not supported yet.

    Raises
    ------
    UnsupportedError
        For `scale_bias` with biases, and inside ``quantized_model_init``.
    ArgumentError
        If `num_groups` is not 1 to 1024.

    See Also
    --------
    Linear : One product.
    te_fast.pytorch.MoE : A whole block of experts.

    Examples
    --------
    >>> import torch
    >>> import te_fast.pytorch as te

    >>> experts = te.ops.Sequential(
    ...     te.ops.GroupedLinear(2, 16, 64, bias=False, device="cpu"),
    ...     te.ops.ScaledSwiGLU(),
    ...     te.ops.GroupedLinear(2, 32, 16, bias=False, device="cpu"),
    ... )
    >>> splits, probs = torch.tensor([5, 3]), torch.rand(8)
    >>> experts(torch.ones(8, 16), splits, probs, splits).shape
    torch.Size([8, 16])
    """

    num_extra_inputs = 1
    _handle: Any
    _takes_to_fp8 = True
    _counts_rows = True

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not 1 <= num_groups <= _MAX_GROUPS:
            message = f"{name}: num_groups must be 1 to {_MAX_GROUPS}, got {num_groups}"
            raise ArgumentError(message)
        if scale_bias and bias:
            message = f"{name}: scale_bias is not supported yet; add the scaled biases behind it, or pass bias=False"
            raise UnsupportedError(message)
        if autocast_state.fp8_parameters:
            message = (
                f"{name}: experts' weights cannot be quantised tensors yet; make the operation outside of "
                "quantized_model_init"
            )
            raise UnsupportedError(message)
        self.num_groups = num_groups
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.scale_bias = False
        self.single_grouped_weight = bool(single_grouped_weight)
        self.single_grouped_bias = bool(single_grouped_bias and bias)
        self.delay_wgrad_compute = delay_wgrad_compute
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = accumulate_into_main_grad
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self._make_handle()
        self._make_parameters(parameter_options(device, dtype, name))
        if not getattr(self, self._weight_names[0]).is_meta:
            self.reset_parameters()

    def _make_parameters(self, options: dict[str, Any]) -> None:
        numbers, shape = range(self.num_groups), (self.out_features, self.in_features)
        self._weight_names = [f"weight{number}" for number in numbers]
        self._bias_names = [f"bias{number}" for number in numbers] if self.use_bias else []
        if self.single_grouped_weight:
            self._weight_names = ["weight"]
        if self.single_grouped_bias:
            self._bias_names = ["bias"]
        for names, size in ((self._weight_names, shape), (self._bias_names, shape[:1])):
            if not names:
                continue
            stack = torch.empty(self.num_groups, *size, **options)
            parts = [stack] if names in (["weight"], ["bias"]) else list(stack)
            for name, part in zip(names, parts, strict=True):
                self.register_parameter(name, torch.nn.Parameter(part))

    def num_quantizers(self, mode: str) -> int:
        """Two of each expert forward (input, weight), one backward (gradient of the output)."""
        forward, backward = _SLOTS
        return {"forward": forward, "backward": backward}.get(mode, 0) * self.num_groups

    def reset_parameters(self) -> None:
        """Initialise the parameters, after making those real that are on the meta device."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        tracker = self._rng_state_tracker_function
        with nullcontext() if tracker is None else tracker().fork(), torch.no_grad():
            for name in self._weight_names:
                weight = to_real(self, name)
                for expert in weight if self.single_grouped_weight else [weight]:
                    torch.nn.init.kaiming_uniform_(expert, a=math.sqrt(5))
                if self.delay_wgrad_compute:
                    weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
            for name in self._bias_names:
                torch.nn.init.uniform_(to_real(self, name), -bound, bound)
        lay_together(self._of_parts())
        self._drop_weight_cache()

    def pre_first_fuser_forward(self) -> None:
        """Make parameters on the meta device real."""
        if getattr(self, self._weight_names[0]).is_meta:
            self.reset_parameters()

    def _of_parts(self) -> list[list[torch.Tensor]]:
        """Return the weights, and the biases, that are parameters of their own in memory."""
        lists = [
            [getattr(self, name) for name in names]
            for names in (self._weight_names, self._bias_names)
        ]
        return [
            parts
            for parts in lists
            if len(parts) > 1
            and not any(p.is_meta or type(p) is not torch.nn.Parameter for p in parts)
        ]

    # Counts ---------------------------------------------------------------------------------------

    def _counts_of_rows(self, counts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the extra input as int64 on the input's device; what is on a GPU is not looked at.

        Raises
        ------
        DtypeError, ShapeError, DeviceError
            If it is no integer tensor of one count for each expert, on another GPU, or on the host and does not fit the
            rows.
        """
        name = type(self).__name__
        if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
            message = (
                f"{name}: the rows of the experts must be counted by integers, got {counts.dtype}"
            )
            raise DtypeError(message)
        if counts.shape != (self.num_groups,):
            message = (
                f"{name}: the extra input must be one count for each of the {self.num_groups} experts, got a tensor of "
                f"shape {list(counts.shape)}"
            )
            raise ShapeError(message)
        if is_traced(x):  # where nothing looks at counts
            return counts.to(device=x.device, dtype=torch.int64)
        if counts.device.type == "cpu":
            rows = x.shape[:-1].numel()
            listed = counts.tolist()
            if min(listed) < 0 or sum(listed) > rows:
                message = f"{name}: counts of rows must not be negative nor exceed {rows} in sum, got {listed}"
                raise ShapeError(message)
        elif counts.device != x.device:
            message = f"{name}: counts must be on the host or on {x.device}, where the input is, got {counts.device}"
            raise DeviceError(message)
        return counts.to(device=x.device, dtype=torch.int64).contiguous()

    # The native half ------------------------------------------------------------------------------

    def _make_handle(self) -> None:
        handle = native.WeightHandle(type(self).__name__)
        handle.fuse_wgrad_accumulation = (
            self._accumulate_into_main_grad and self.single_grouped_weight
        )
        handle.delay_wgrad_compute = self.delay_wgrad_compute
        self.__dict__["_handle"] = handle

    def _append_to(self, program: Any, label: str) -> None:
        count, sizes = self.num_groups, (self.in_features, self.out_features)
        names = self._weight_names
        program.grouped_linear(label, self._handle, self._parameters, names, count, *sizes, _SLOTS)
        program.fuses_parts = program.fuses_parts or (
            self._accumulate_into_main_grad and not self.single_grouped_weight
        )
        if self.use_bias:
            names = self._bias_names
            program.grouped_bias(label, self._parameters, names, count, self.out_features)

    def _stacks(self) -> list[torch.Tensor]:
        lists = [self._weight_names, self._bias_names]
        return [joined([getattr(self, name) for name in names]) for names in lists if names]

    def _result_type(
        self,
        dtype: torch.dtype,
        extras: tuple[torch.dtype, ...],
        autocast: torch.dtype | None,
    ) -> torch.dtype:
        weight: torch.Tensor = getattr(self, self._weight_names[0])
        return autocast or weight.dtype

    def _set_slots(self, epoch: int) -> None:
        forward, backward = self._scaling_states()
        if forward is not None and backward is not None:
            self._handle.set_slots(epoch, forward.slots, backward.slots, 0, 0)

    def _drop_slots(self) -> None:
        self._handle.drop_slots()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a weight that is brought back may have other values, at the same address and version."""
        super().__setattr__(name, value)
        if isinstance(value, torch.Tensor) and "_handle" in self.__dict__:
            self._drop_weight_cache()

    def _drop_weight_cache(self) -> None:
        self._handle.drop_weight_cache()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Lay the parameters together again, which were moved one by one, and forget what was quantised."""
        result = super()._apply(fn, recurse)
        lay_together(self._of_parts())
        self._drop_weight_cache()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Leave the native half out."""
        state = super().__getstate__()
        state.pop("_handle", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a native half of this copy's own, and lay its parameters together."""
        super().__setstate__(state)
        self._make_handle()
        lay_together(self._of_parts())

    # Weight gradients -----------------------------------------------------------------------------

    def need_backward_dw(self) -> bool:
        """Tell whether :meth:`backward_dw` computes the weights' gradients."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call a hook after each :meth:`backward_dw`."""
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the weights' gradients of the oldest backward that left them.

        Raises
        ------
        StateError
            If no backward did.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._handle.deferred_count():
            message = (
                f"{type(self).__name__}: backward_dw() was called without a backward before it"
            )
            raise StateError(message)
        parts = [getattr(self, name) for name in self._weight_names]
        compute_deferred(self._handle, parts, fuse=self._accumulate_into_main_grad)
        if not is_graph_capturing():
            for hook in self.wgrad_accumulation_and_reduce_hooks:
                hook()

    # In Python ------------------------------------------------------------------------------------

    def fuser_forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: experts run in native programs alone."""
        message = (
            f"{type(self).__name__} runs in native programs, not inside of a fusion of the user's own; "
            "leave it out of those"
        )
        raise UnsupportedError(message)

    def fuser_backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: experts run in native programs alone."""
        self.fuser_forward()

    def extra_repr(self) -> str:
        """Sizes."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}"
        )
