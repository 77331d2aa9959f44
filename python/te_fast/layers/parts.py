"""Layers whose weight consists of several parameters in one memory, which the program reads as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fast.errors import StateError
from te_fast.layers.program import ProgramLayer
from te_fast.runtime import main_grad, native
from te_fast.runtime.parts import (
    are_adjacent,
    compute_deferred,
    joined,
    lay_together,
    save_alone,
    version_of,
    whole_of,
)
from te_fast.tensor import stacks
from te_fast.tensor.primary import as_read, is_quantized
from te_fast.tensor.stacks import stack_of


class _Concatenate(torch.autograd.Function):
    """Concatenation, without a copy if the parts are adjacent in memory."""

    @staticmethod
    def forward(
        ctx: Any, layer: PartedLayer, adjacent: bool, overwrite: bool, *parts: torch.Tensor
    ) -> torch.Tensor:
        # A reference to the layer would keep a layer alive that keeps its result.
        ctx.name, ctx.fuses = layer.name, layer.fuse_wgrad_accumulation
        ctx.parts, ctx.overwrite = parts, overwrite
        ctx.set_materialize_grads(False)
        ctx.versions = None
        if is_quantized(parts[0]):
            ctx.versions = [version_of(part) for part in parts]
            return stack_of(parts)
        return whole_of(list(parts)) if adjacent else joined([part.detach() for part in parts])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.versions is not None:
            _check_versions(ctx.name, ctx.parts, ctx.versions)
        if grad is None:  # backward_dw computes and adds the gradient later
            if not ctx.fuses:
                return (None,) * (3 + len(ctx.parts))
            trained = zip(ctx.parts, ctx.needs_input_grad[3:], strict=True)
            takes = [part if needed else None for part, needed in trained]
            for part in takes if ctx.overwrite else ():
                if part is not None:
                    main_grad.main_grad_of(part, ctx.name).zero_()
            after = main_grad.after_main_grad
            return (None, None, None, *(None if part is None else after(part) for part in takes))
        parts = grad.split([part.shape[0] for part in ctx.parts])
        if not ctx.fuses:
            return (None, None, None, *parts)
        given = [
            main_grad.give(parameter, part, ctx.name, fuse=True, overwrite=ctx.overwrite)
            if needed
            else None
            for parameter, part, needed in zip(
                ctx.parts, parts, ctx.needs_input_grad[3:], strict=True
            )
        ]
        return (None, None, None, *given)


def concatenate(
    parts: list[torch.Tensor], layer: PartedLayer, *, overwrite: bool
) -> tuple[torch.Tensor, int | None]:
    """Return the whole tensor and a number that changes whenever a part's content may have changed.

    With `overwrite`, ``main_grad`` takes the gradient instead of adding it.

    Raises
    ------
    StateError
        If gradients are needed of parts that cannot have any.
    """
    if torch.is_grad_enabled() and any(p.requires_grad and p.is_inference() for p in parts):
        message = (
            f"{layer.name}: the parameters were made under torch.inference_mode(), and get no gradients; make the "
            "layer outside of it to train it, else call it under torch.no_grad()"
        )
        raise StateError(message)
    parts = [as_read(part) for part in parts]
    if is_quantized(parts[0]):
        return _Concatenate.apply(layer, True, overwrite, *parts), None
    if torch._C._are_functorch_transforms_active():  # its tensors have no memory
        return joined(parts), None
    adjacent = are_adjacent(parts)
    whole: torch.Tensor = _Concatenate.apply(layer, adjacent, overwrite, *parts)
    # Tensors that were made under torch.inference_mode() have no versions.
    counts = adjacent and not any(part.is_inference() for part in parts)
    version = sum(part._version for part in parts) if counts else native.version_of_copy()
    return whole, version


def _check_versions(layer: str, parts: Sequence[torch.Tensor], versions: list[int]) -> None:
    """Raise if a part has changed since it had these versions; messages have the layer's name."""
    if versions != [version_of(part) for part in parts]:
        message = (
            f"{layer}: a part of the weight was modified by an inplace operation between forward and backward; modify "
            "it after backward"
        )
        raise StateError(message)


def watch(layer: PartedLayer, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Let the backward of a result of torch's product raise if a part of `weight` has changed since.

    torch compares the version of the whole weight, which has the parts' memory and not their versions.
    """
    # Under transforms, concatenate() copies.
    if out.grad_fn is None or torch._C._are_functorch_transforms_active():
        return
    # The hook must not refer to the layer: Python finds no cycles through hooks of torch's own nodes.
    name, parts = layer.name, [getattr(layer, name) for name in layer.weight_names]
    if weight.data_ptr() != parts[0].data_ptr():  # a copy stays as it is
        return
    versions = [version_of(part) for part in parts]
    out.grad_fn.register_prehook(lambda _: _check_versions(name, parts, versions))


class PartedLayer(ProgramLayer):
    """A layer whose weight, and bias, may consist of several parameters in one memory."""

    weight_names: list[str]
    bias_names: list[str]
    use_bias: bool

    def _has_parts(self) -> bool:
        """Tell whether weight and bias consist of parts."""
        raise NotImplementedError

    def _of_parts(self) -> list[list[torch.Tensor]]:
        """Return the parts of weight and bias that are plain tensors with memory."""
        if not self._has_parts() or len(self.weight_names) == 1:
            return []
        names = [self.weight_names, self.bias_names if self.use_bias else []]
        lists = [[getattr(self, name) for name in some] for some in names if some]
        plain = (torch.Tensor, torch.nn.Parameter)
        return [
            parts
            for parts in lists
            if all(
                type(part) in plain and not (part.is_meta or part.is_inference()) for part in parts
            )
            and len({(part.dtype, part.device) for part in parts}) == 1
        ]

    def _lay_quantized_together(self) -> None:
        """Let quantised parts of the weight share one memory."""
        parts = [getattr(self, name) for name in self.weight_names]
        if len(parts) > 1 and all(is_quantized(part) and not part.is_meta for part in parts):
            stacks.lay_together(parts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Move the parts of a copy to one memory, since each was copied by itself."""
        super().__setstate__(state)
        lay_together(self._of_parts())
        self._lay_quantized_together()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_alone(self, destination, prefix)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move parts to one memory if they were moved one by one. Parts keep memory that a caller has given them."""
        before = {
            name: parameter.data_ptr()
            for name, parameter in self._parameters.items()
            if parameter is not None and self._has_parts() and type(parameter) is torch.nn.Parameter
        }
        result = super()._apply(fn, recurse)
        moved = {
            id(parameter)
            for name, parameter in self._parameters.items()
            if parameter is not None and before.get(name) not in (None, parameter.data_ptr())
        }
        lay_together([parts for parts in self._of_parts() if all(id(p) in moved for p in parts)])
        self._lay_quantized_together()
        return result

    # Weight gradients ----------------------------------------------------------------------------

    def _compute_deferred(self, name: str, handle: native.WeightHandle) -> None:
        if not self._has_parts():
            super()._compute_deferred(name, handle)
            return
        parts = [getattr(self, part) for part in self.weight_names]
        compute_deferred(handle, parts, fuse=self.fuse_wgrad_accumulation)
