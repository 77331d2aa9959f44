"""Runs experts one by one, where nothing multiplies all of them at once.

In FP8 each is a dense program, otherwise torch multiplies. So the results outside of FP8 are those of `Linear` layers,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from te_fast import _config
from te_fast.errors import UnsupportedError
from te_fast.ops import cublas_groups
from te_fast.runtime import high_precision, main_grad, native
from te_fast.runtime.compiling import is_traced
from te_fast.runtime.global_state import autocast_state
from te_fast.tensor.primary import is_quantized
from te_fast.tensor.stacks import experts_of

#: The GPUs that te_fast's products of all experts in one launch are compiled for.
_ONE_LAUNCH = (9, 0)
#: Dense products in FP8 take rows in multiples of this; zeros pad them.
_ROWS = 8


def is_needed(x: torch.Tensor, *lines: int, biased: bool = False) -> bool:
    """Tell whether experts run one by one on values of a tensor's device and type.

    The products of all experts in one launch need a GPU that has their kernels or a cuBLASLt that has them, operands in
    FP8 or of 16 bits, and lines of a multiple of 16 bytes. Their backward cannot take operands that were dequantised.

    Parameters
    ----------
    x : torch.Tensor
        The input, or a weight.
    *lines : int
        Elements of the lines of input, weights and result.
    biased : bool
        Whether a product adds a bias.
    """
    if _config.EXPERT_LOOP:
        return True
    on_gpu = x.device.type == "cuda"
    if on_gpu and not has_kernels(x.device.index) and (biased or not _cublas_multiplies(x)):
        return True
    if is_traced(x):  # the operator itself says what it does not take
        return False
    recipe = _recipe()
    override = getattr(recipe, "backward_override", None)
    if override == "dequantized":
        return True
    if not on_gpu or takes(x.dtype, *lines):
        return False
    if recipe is not None and override is None:  # all products are of FP8 operands
        return False
    in_autocast = torch.is_autocast_enabled("cuda")
    return not (in_autocast and takes(torch.get_autocast_dtype("cuda"), *lines))


def is_never_needed(x: torch.Tensor, *lines: int) -> bool:
    """Tell whether te_fast's kernels multiply values like these on their GPU, whatever region a call is in."""
    return x.device.type == "cuda" and has_kernels(x.device.index) and takes(x.dtype, *lines)


def _recipe() -> Any:
    """Return the recipe in force; None outside of FP8."""
    return native.autocast_objects()[0] if autocast_state.fp8_enabled else None


def _cublas_multiplies(x: torch.Tensor) -> bool:
    """Tell whether cuBLASLt takes the products of all experts, forward and backward, in one call each."""
    recipe = _recipe()
    if recipe is None or getattr(recipe, "backward_override", None) is not None:
        in_autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if in_autocast else x.dtype
        if dtype.itemsize != 2 or not cublas_groups.multiplies(
            x.device.index, str(dtype).removeprefix("torch.")
        ):
            return False
    if recipe is None:
        return True
    one_scale = recipe.delayed() or recipe.float8_current_scaling()
    return one_scale and cublas_groups.multiplies(x.device.index, "fp8")


def takes(dtype: torch.dtype, *lines: int) -> bool:
    """Tell whether one launch multiplies operands of a type and with lines of these lengths as they are."""
    return dtype.itemsize == 2 and all(line % 8 == 0 for line in lines)


@cache
def has_kernels(index: int | None) -> bool:
    """Tell whether a GPU has te_fast's kernels for the products of all experts."""
    return torch.cuda.get_device_capability(index) == _ONE_LAUNCH


def read_counts(counts: torch.Tensor, rows: int, name: str) -> list[int]:
    """Return counts for the host: counts on a GPU are read, and cut off at the rows of the input.

    Raises
    ------
    UnsupportedError
        If the counts are on a GPU while a graph is captured.
    """
    if counts.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        message = (
            f"{name}: experts run one by one on this GPU, which counts on it do not allow in a graph under capture; "
            "give counts on the host"
        )
        raise UnsupportedError(message)
    taken: list[int] = []
    for count in counts.tolist():
        taken.append(min(max(count, 0), rows))
        rows -= taken[-1]
    return taken


class Experts(NamedTuple):
    """The arguments of a loop: a module, and the names of its experts' parameters."""

    owner: Any
    name: str
    inputs: int
    outputs: int
    #: Names of the parameters: one for each expert, or one stack.
    weights: Sequence[str]
    #: None if no bias is added.
    biases: Sequence[str] | None
    number: int
    fuse: bool
    later: bool
    save_original_input: bool
    #: Slots of delayed scaling from one expert to the next, forward and backward.
    slots: tuple[int, int]

    @property
    def is_stack(self) -> bool:
        """Whether the weights are one parameter."""
        return list(self.weights) == ["weight"]


class _Unstack(torch.autograd.Function):
    """The experts' weights from one stack; gradients become a stack again, or are in ``main_grad`` already."""

    @staticmethod
    def forward(ctx: Any, stack: torch.Tensor, fuse: bool) -> tuple[torch.Tensor, ...]:
        ctx.stack, ctx.fuse = stack, fuse
        ctx.set_materialize_grads(False)
        return experts_of(stack)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if ctx.fuse:
            return main_grad.after_main_grad(ctx.stack), None
        found = next((grad for grad in grads if grad is not None), None)
        if found is None:
            return None, None
        zero = torch.zeros_like(found)
        return torch.stack([zero if grad is None else grad for grad in grads]), None


class ExpertLoop:
    """The products of experts, one after the other.

    Parameters
    ----------
    experts : Experts
        The arguments of the loop.
    """

    def __init__(self, experts: Experts) -> None:
        self.handles: list[native.WeightHandle] = []
        self._experts = experts
        self._programs: list[native.Program] = []
        for expert in range(experts.number):
            name = f"{experts.name}, expert {expert}"
            handle = native.WeightHandle(name)
            handle.fuse_wgrad_accumulation = experts.fuse
            handle.delay_wgrad_compute = experts.later
            handle.save_original_input = experts.save_original_input
            program = native.Program(name)
            # Calls pass the parameters.
            program.linear("linear", handle, {}, "weight", experts.inputs, experts.outputs)
            if experts.biases is not None:
                program.bias("bias", {}, "bias", experts.outputs)
            self.handles.append(handle)
            self._programs.append(program)

    def set_slots(self, epoch: int, forward: Any, backward: Any) -> None:
        """Register the scales of delayed scaling with each expert."""
        of_input, of_grad = self._experts.slots
        for number, handle in enumerate(self.handles):
            handle.set_slots(epoch, forward, backward, number * of_input, number * of_grad)

    def apply(
        self, x: torch.Tensor, counts: list[int], is_first_microbatch: bool | None
    ) -> torch.Tensor:
        """Return the results for ``(rows, in_features)``; rows of no expert are zero."""
        experts = self._experts
        weights = self._parts("weight", experts.weights, fuse=experts.fuse)
        biases = None if experts.biases is None else self._parts("bias", experts.biases, fuse=False)
        *chunks, rest = x.split([*counts, x.shape[0] - sum(counts)])
        run = self._in_fp8 if autocast_state.fp8_enabled else self._in_high_precision
        results = [
            run(
                number,
                chunk,
                weight,
                None if biases is None else biases[number],
                is_first_microbatch,
            )
            for number, (chunk, weight) in enumerate(zip(chunks, weights, strict=True))
        ]
        if rest.shape[0]:
            results.append(rest.new_zeros(rest.shape[0], experts.outputs))
        return torch.cat(results)

    def _in_fp8(
        self, number: int, x: torch.Tensor, weight: Any, bias: Any, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        parameters = (weight,) if bias is None else (weight, bias)
        lacks = -x.shape[0] % _ROWS
        given = functional.pad(x, (0, 0, 0, lacks)) if lacks else x
        program, owner = self._programs[number], self._experts.owner
        y = native.program_apply(program, owner, given, (), is_first_microbatch, parameters, None)
        return y[: x.shape[0]]

    def _in_high_precision(
        self, number: int, x: torch.Tensor, weight: Any, bias: Any, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        plain = weight.dequantize() if is_quantized(weight) else weight
        options = {"parameter": weight, "overwrite": is_first_microbatch is True}
        return high_precision.linear(x, plain, bias, self.handles[number], **options)

    def _parts(self, kind: str, names: Sequence[str], *, fuse: bool) -> list[Any]:
        """Return the weights, or the biases, of the experts, each with its ``main_grad``."""
        owner = self._experts.owner
        if list(names) != [kind]:
            return [getattr(owner, name) for name in names]
        whole = getattr(owner, kind)
        parts: list[Any] = list(_Unstack.apply(whole, fuse))
        if fuse and whole.requires_grad:
            buffer = main_grad.main_grad_of(whole, self._experts.name)
            for part, grad in zip(parts, buffer, strict=True):
                part.main_grad = grad
                part.overwrite_main_grad = getattr(whole, "overwrite_main_grad", False)
        return parts

    def has_deferred(self) -> bool:
        """Tell whether weight gradients wait."""
        return any(handle.deferred_count() for handle in self.handles)

    def compute_deferred(self) -> None:
        """Compute the oldest weight gradients that wait, and give them to the weights."""
        experts = self._experts
        weights = self._parts("weight", experts.weights, fuse=experts.fuse)
        found = [
            # Frozen experts leave none.
            native.program_backward_dw(handle, weight, experts.fuse)
            if handle.deferred_count()
            else None
            for handle, weight in zip(self.handles, weights, strict=True)
        ]
        if experts.is_stack and not experts.fuse:
            grads = [grad for grad in found if grad is not None]
            stack = experts.owner.weight
            main_grad.give(stack, torch.stack(grads), experts.name, fuse=False, overwrite=False)
        for weight, grad in zip(weights, found, strict=True):
            if grad is not None and weight.requires_grad and not experts.is_stack:
                main_grad.give(weight, grad, experts.name, fuse=experts.fuse, overwrite=False)
