"""``y = x W_eᵀ + b_e`` on the rows of each expert, in FP8."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from te_fast.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    ShapeError,
    StateError,
)
from te_fast.ops.basic.native import ExtraTensorOperation
from te_fast.ops.basic.weighted import WeightedOperation
from te_fast.ops.chain import joined_on_nothing
from te_fast.ops.common import NATIVE_TYPES, autocast_dtype, parameter_options, to_real
from te_fast.ops.expert_loop import ExpertLoop, Experts, is_needed, read_counts
from te_fast.ops.op import ALONE, Beside, OperationContext, PerOp
from te_fast.runtime import native
from te_fast.runtime.arguments import (
    check_flags,
    check_functions,
    check_positive_sizes,
    check_sizes,
)
from te_fast.runtime.capturing import is_graph_capturing
from te_fast.runtime.compiling import is_traced
from te_fast.runtime.parts import compute_deferred, fit_state, lay_together, save_alone
from te_fast.runtime.splits import check_in_debug
from te_fast.tensor import primary, stacks
from te_fast.tensor.of_recipe import ONE, Stack

#: A block of a kernel finds the expert of its rows by a scan over all.
_MAX_GROUPS = 1024
#: Delayed scaling's slots of one expert: forward input and weight; backward the gradient of the output.
_SLOTS = (2, 1)
#: Whether the current backward retains its graph; older torch does not tell.
_retains_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def _check_factors(name: str, factors: torch.Tensor, x: torch.Tensor) -> None:
    if factors.dtype not in NATIVE_TYPES:
        message = f"{name}: the factors of the biases must be float32, float16 or bfloat16, got {factors.dtype}"
        raise DtypeError(message)
    rows = x.shape[:-1].numel()
    if factors.dim() == 0 or factors.numel() != rows:
        message = (
            f"{name}: the factors of the biases must be one value for each of the {rows} rows, got a tensor of shape "
            f"{list(factors.shape)}"
        )
        raise ShapeError(message)


class GroupedLinear(ExtraTensorOperation, WeightedOperation):
    """Apply ``y = x W_eᵀ + b_e`` to the rows of each expert, in FP8 inside :class:`te_fast.pytorch.autocast`.

    The extra input counts the rows of the experts, which follow each other. The host does not read counts on the GPU:
    counts beyond the rows of the input are cut off, and rows that belong to no expert are not written.

    Parameters
    ----------
    num_groups : int
        Number of experts.
    in_features, out_features : int
        Sizes of the last dimension. In FP8 both are multiples of 16.
    bias : bool, default = True
        Have biases, zero at first.
    device, dtype : optional
        As of :class:`BasicLinear`.
    rng_state_tracker_function : Callable, optional
        Gives the random number generator's tracker that initialisation forks.
    accumulate_into_main_grad : bool, default = False
        Add the weights' gradients to their ``main_grad``, as :class:`te_fast.pytorch.GroupedLinear` does.
    single_grouped_weight, single_grouped_bias : bool, default = False
        One parameter for all experts.
    delay_wgrad_compute : bool, default = False
        Leave the weights' gradients to :meth:`backward_dw`.
    scale_bias : bool, default = False
        Multiply the biases by a factor of each row, a second extra input ``(rows,)``, such as the probabilities of the
        experts. The product is a native program of its own then, and torch adds the biases.

    Raises
    ------
    ArgumentError
        If `num_groups` is not 1 to 1024.
    ShapeError, DtypeError
        If a size is not an integer of 1 or more.

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
        check_sizes(name, num_groups=num_groups)
        check_positive_sizes(name, in_features=in_features, out_features=out_features)
        if not 1 <= num_groups <= _MAX_GROUPS:
            message = f"{name}: num_groups must be 1 to {_MAX_GROUPS}, got {num_groups}"
            raise ArgumentError(message)
        check_flags(
            name,
            accumulate_into_main_grad=accumulate_into_main_grad,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        check_functions(name, rng_state_tracker_function=rng_state_tracker_function)
        self.num_groups = num_groups
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.scale_bias = scale_bias and bias
        if self.scale_bias:
            self.num_extra_inputs = 2
        self.single_grouped_weight = bool(single_grouped_weight)
        self.single_grouped_bias = bool(single_grouped_bias and bias)
        self.delay_wgrad_compute = bool(delay_wgrad_compute)
        self._rng_state_tracker_function = rng_state_tracker_function
        self._accumulate_into_main_grad = bool(accumulate_into_main_grad)
        self._note_init()
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
        self._needed_names = (*self._weight_names, *self._bias_names)
        for number in () if self.use_bias else numbers:
            self.register_parameter(f"bias{number}", None)
        for names, size in ((self._weight_names, shape), (self._bias_names, shape[:1])):
            if not names:
                continue
            stack = torch.empty(self.num_groups, *size, **options)
            parts = [stack] if names in (["weight"], ["bias"]) else list(stack)
            for name, part in zip(names, parts, strict=True):
                self.register_parameter(name, torch.nn.Parameter(part))

    _KIND = "grouped_linear"

    def num_quantizers(self, mode: str) -> int:
        """Two of each expert forward (input, weight), one backward (gradient of the output)."""
        forward, backward = _SLOTS
        return {"forward": forward, "backward": backward}.get(mode, 0) * self.num_groups

    def reset_parameters(self) -> None:
        """Initialise the parameters; parameters on the meta device get memory first."""
        tracker = self._rng_state_tracker_function
        with nullcontext() if tracker is None else tracker().fork(), torch.no_grad():
            for name in self._weight_names:
                weight = to_real(self, name)
                if primary.is_quantized(weight):
                    primary.initialise_quantized(weight, self._initialise)
                else:
                    self._initialise(weight)
            for name in self._bias_names:
                torch.nn.init.zeros_(to_real(self, name))
        self._quantize_weights()
        for name in self._weight_names if self.delay_wgrad_compute else ():
            getattr(self, name).skip_backward_post_hook = True
        self._lay_together()
        self._drop_weight_cache()

    def _initialise(self, weight: torch.Tensor) -> None:
        init = partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))
        if self.single_grouped_weight:
            stacks.fill_experts(weight, init)
        else:
            init(weight)

    # Quantised weights ----------------------------------------------------------------------------

    def _stack_of_weight(self) -> Stack:
        return Stack(self.num_groups, _SLOTS[0]) if self.single_grouped_weight else ONE

    def _lay_together(self) -> None:
        """Let the parameters of all experts share one memory."""
        lay_together(self._of_parts())
        weights = [getattr(self, name) for name in self._weight_names]
        weights = [weight for weight in weights if primary.is_quantized(weight)]
        if len(weights) > 1 and not any(weight.is_meta for weight in weights):
            stacks.lay_together(weights)

    def pre_first_fuser_forward(self) -> None:
        """Give parameters on the meta device memory."""
        if getattr(self, self._weight_names[0]).is_meta:
            self.reset_parameters()

    def _of_parts(self) -> list[list[torch.Tensor]]:
        """Return the weights and the biases that are separate parameters with memory."""
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
        """Return the extra input as int64 on the input's device, without reading counts on a GPU.

        Raises
        ------
        DtypeError, ShapeError, DeviceError
            If it is not an integer tensor with one count for each expert, is on another GPU, or is on the host and does
            not fit the rows.
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
        if is_traced(x):  # a trace does not read counts
            return counts.to(device=x.device, dtype=torch.int64)
        if counts.device.type == "cpu":
            rows = x.shape[:-1].numel()
            listed = counts.tolist()
            if min(listed) < 0 or sum(listed) > rows:
                message = f"{name}: counts of rows must not be negative nor exceed {rows} in sum, got {listed}"
                raise ShapeError(message)
            if self._is_looped(x):  # the host reads counts there
                return counts.to(torch.int64)
        elif counts.device != x.device:
            message = f"{name}: counts must be on the host or on {x.device}, where the input is, got {counts.device}"
            raise DeviceError(message)
        else:
            check_in_debug(name, counts, x)
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
        if self._accumulate_into_main_grad and not self.single_grouped_weight:
            program.fuse_parts()
        if self.use_bias and not self.scale_bias:
            names = self._bias_names
            program.grouped_bias(label, self._parameters, names, count, self.out_features)

    def _parts_of_parameters(self) -> list[tuple[torch.Tensor, ...]]:
        lists = [self._weight_names, self._bias_names]
        return [tuple([getattr(self, name) for name in names]) for names in lists if names]

    def _fused_parts(self) -> list[torch.Tensor]:
        if not self._accumulate_into_main_grad or self.single_grouped_weight:
            return []
        return [getattr(self, name) for name in self._weight_names]

    def _result_type(
        self,
        dtype: torch.dtype,
        extras: tuple[torch.dtype, ...],
        autocast: torch.dtype | None,
    ) -> torch.dtype:
        weight: torch.Tensor = getattr(self, self._weight_names[0])
        return autocast or weight.dtype

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_alone(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        singles = {"weight": self.single_grouped_weight, "bias": self.single_grouped_bias}
        fit_state(state_dict, prefix, self.num_groups, singles)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # Weight gradients -----------------------------------------------------------------------------

    def need_backward_dw(self) -> bool:
        """Tell whether :meth:`backward_dw` computes the weights' gradients."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        """Call a hook after each :meth:`backward_dw`."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def _has_deferred(self) -> bool:
        """Tell whether weight gradients wait for :meth:`backward_dw`."""
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        in_loop = loop is not None and loop.has_deferred()
        return in_loop or bool(self._handle.deferred_count())

    def backward_dw(self) -> None:
        """Compute the weights' gradients of the oldest backward that left them; frozen weights leave none."""
        if not self.delay_wgrad_compute or not self._has_deferred():
            return
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        if loop is not None and loop.has_deferred():
            loop.compute_deferred()
        else:
            parts = [getattr(self, name) for name in self._weight_names]
            compute_deferred(self._handle, parts, fuse=self._accumulate_into_main_grad)
        if not is_graph_capturing():
            for hook in self.wgrad_accumulation_and_reduce_hooks:
                hook()

    # In Python ------------------------------------------------------------------------------------

    def _is_native(self, beside: Beside = ALONE) -> bool:
        """Tell whether a native program runs this: not with scaled biases, and not if experts run one by one."""
        alone = self.scale_bias or self._is_looped()
        return not alone and super()._is_native(beside)

    def _is_looped(self, like: torch.Tensor | None = None) -> bool:
        """Tell whether experts run one by one on values like these, or like the weights."""
        if like is None:
            like = getattr(self, self._weight_names[0], None)
        # A weight that is gone is refused when the group of operations is planned.
        return like is not None and is_needed(
            like, self.in_features, self.out_features, biased=self.use_bias
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the parameters, and choose the path for the new device."""
        result = super()._apply(fn, recurse)
        for fuser in self.__dict__.get("_capturing_fusers", ()):
            fuser._forget()
        return result

    def _is_in_parts(self) -> bool:
        # One expert, too, may have a parameter that is no stack.
        return not self.single_grouped_weight or (self.use_bias and not self.single_grouped_bias)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        **_: Any,
    ) -> tuple[torch.Tensor, list[tuple[()]]]:
        """Run the operation under a torch graph of its own, which backward runs through."""
        ctx: Any = basic_op_ctxs[0]
        counts, *factors = basic_op_extra_inputs[0]
        if factors:
            _check_factors(type(self).__name__, factors[0], input_)
        wanted = bool(ctx.requires_grad)
        with torch.set_grad_enabled(wanted):
            x = input_.detach().to(self._result_type(input_.dtype, (), autocast_dtype(input_)))
            x.requires_grad_(wanted)
            scales = [factor.detach().requires_grad_(factor.requires_grad) for factor in factors]
            y = self._products(x.reshape(-1, self.in_features), counts, ctx.is_first_microbatch)
            if self.scale_bias:
                y = y + self._biases_of_rows(y, counts) * scales[0].reshape(-1, 1).to(y.dtype)
            y = y.view(*x.shape[:-1], self.out_features)
        if wanted:
            ctx.graph = (y, x, scales, input_.dtype)
        return y.detach(), [()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, PerOp, PerOp]:
        """Run backward through that graph, only once unless the outer graph is retained.

        Raises
        ------
        StateError
            If backward has run already.
        """
        ctx: Any = basic_op_ctxs[0]
        if ctx.graph is None:
            message = (
                f"{type(self).__name__}: backward ran through this graph a second time; pass retain_graph=True to the "
                "first"
            )
            raise StateError(message)
        y, x, scales, dtype = ctx.graph
        retains = bool(_retains_graph())
        if not retains:
            ctx.graph = None
        parameters = list(self.parameters())
        leaves = [tensor for tensor in (x, *scales, *parameters) if tensor.requires_grad]
        grads = torch.autograd.grad(
            y, leaves, grad_output.to(y.dtype), retain_graph=retains, allow_unused=True
        )
        found = iter(grads)
        dx, *rest = (next(found) if t.requires_grad else None for t in (x, *scales, *parameters))
        extras = (None, *rest[: len(scales)])
        dx = torch.zeros_like(x) if dx is None else dx
        return dx.to(dtype), [tuple(rest[len(scales) :])], [extras]

    def _products(
        self, x: torch.Tensor, counts: torch.Tensor, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        """Return the products of all experts, with the biases that have no factors."""
        if self._is_looped(x):
            loop: ExpertLoop | None = self.__dict__.get("_loop")
            if loop is None:
                loop = self.__dict__["_loop"] = ExpertLoop(self._experts())
            listed = read_counts(counts, x.shape[0], type(self).__name__)
            return loop.apply(x, listed, is_first_microbatch)
        program, params = self._program(), None
        if x.numel() == 0 and program.has_parts:  # without launches, torch joins the parts
            params = joined_on_nothing(program, [self], type(self).__name__, is_first_microbatch)
        arguments = (program, self, x, (counts,), is_first_microbatch, params, None)
        y: torch.Tensor = native.program_apply(*arguments)
        return y

    def _biases_of_rows(self, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the bias of each row's expert, and zeros for rows of no expert.

        The rows are FP32 until they are gathered, so that backward sums the gradients of an expert's rows in FP32, and
        those of rows of no expert into the row of zeros.
        """
        ends = counts.to(y.device).clamp(min=0).cumsum(0)
        numbers = torch.arange(y.shape[0], device=y.device)
        expert = torch.searchsorted(ends, numbers, right=True)
        biases = [getattr(self, name) for name in self._bias_names]
        stack = biases[0] if self.single_grouped_bias else torch.stack(biases)
        return torch.nn.functional.pad(stack.to(y.dtype).float(), (0, 0, 0, 1))[expert].to(y.dtype)

    def _experts(self) -> Experts:
        """Return the arguments of a loop over the experts."""
        return Experts(
            owner=self,
            name=type(self).__name__,
            inputs=self.in_features,
            outputs=self.out_features,
            weights=self._weight_names,
            biases=self._bias_names if self.use_bias and not self.scale_bias else None,
            number=self.num_groups,
            fuse=self._accumulate_into_main_grad,
            later=self.delay_wgrad_compute,
            save_original_input=False,
            slots=_SLOTS,
        )

    def _set_slots(self, epoch: int) -> None:
        super()._set_slots(epoch)
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        states = self._scaling_states()
        if loop is not None and None not in states:
            loop.set_slots(epoch, *(state.slots for state in states))

    def _drop_slots(self) -> None:
        super()._drop_slots()
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        for handle in () if loop is None else loop.handles:
            handle.drop_slots()

    def _drop_weight_cache(self, *, of_graphs: bool = True) -> None:
        super()._drop_weight_cache(of_graphs=of_graphs)
        loop: ExpertLoop | None = self.__dict__.get("_loop")
        for handle in () if loop is None else loop.handles:
            handle.drop_weight_cache(of_graphs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the native halves out; the copy makes its own."""
        state = super().__getstate__()
        state.pop("_loop", None)
        return state

    def extra_repr(self) -> str:
        """Sizes."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}"
        )
