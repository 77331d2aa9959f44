"""The part of a layer behind attention as one program: projection, norm, feed-forward block, residual sums."""

from __future__ import annotations

from typing import Any

import torch

from te_fast.graphs.form import form_of, parameters_of
from te_fast.graphs.region import key_of_region
from te_fast.graphs.traced import Traced
from te_fast.layers.layernorm_mlp import LayerNormMLP
from te_fast.layers.linear import Linear
from te_fast.runtime import native
from te_fast.runtime.compiling import is_unseen
from te_fast.runtime.module_hooks import are_called_plainly
from te_fast.tensor.of_factory import may_fuse

#: A module, and names of its attributes and children.
Noted = tuple[torch.nn.Module, tuple[str, ...]]


class Tail:
    """The layers behind attention as one program over their parameters, with their FP8 weights and scales.

    Parameters
    ----------
    proj : Linear
        The projection, with whole parameters.
    mlp : LayerNormMLP
        The feed-forward block, with a norm; the halves of its first weight may be two parameters.
    name : str
        Name in messages.
    """

    #: Calls do not pass parameters, since the program may join them of parts, which get the gradients.
    finds_parameters = True

    def __init__(self, proj: Linear, mlp: LayerNormMLP, name: str) -> None:
        self._proj, self._mlp = proj, mlp
        self._handles = (proj._handles, mlp._handles)
        self._epoch: int | None = None
        program = self.program = native.Program(name)
        sizes = proj.in_features, proj.out_features
        program.linear("proj", proj._handles["weight"], proj._parameters, "weight", *sizes)
        if proj.use_bias:
            program.bias("proj_bias", proj._parameters, "bias", proj.out_features)
        program.add_extra_input("residual", False)
        begin = program.residual("sum")
        mlp._append_ops(program, lambda: None)
        if mlp.use_bias and not mlp.apply_bias:
            program.bias("fc2_bias", mlp._parameters, "fc2_bias", mlp.hidden_size)
        program.add_residual("sum", begin)
        #: The program in graphs, and those of the layers, which have others after a change.
        self.traced = Traced(program, self, name)
        self._of_layers = proj._traced, mlp._traced

    def is_of(self, proj: Linear, mlp: LayerNormMLP) -> bool:
        """Tell whether the program still belongs to these layers, whose native halves may have been replaced."""
        handles = self._handles
        return (
            proj.__dict__.get("_handles") is handles[0]
            and mlp.__dict__.get("_handles") is handles[1]
        )

    def noted(self) -> list[Noted]:
        """Return the layers, with the names of attributes that :meth:`is_of` and :meth:`takes` read."""
        names = ("_handles", "_exchange")
        return [(self._proj, (*names, "_save_original_input")), (self._mlp, (*names, "checkpoint"))]

    def takes(self, hidden: torch.Tensor) -> bool:
        """Tell whether the program computes the same as calls of the layers."""
        proj, mlp = self._proj, self._mlp
        if (
            not is_unseen(hidden)
            or not self.has_plain_layers()
            or mlp.checkpoint
            or proj._exchange
            or mlp._exchange
        ):
            return False
        weight: Any = proj._parameters["weight"]
        if weight.dtype != hidden.dtype or weight.device != hidden.device:
            return False
        if hidden.numel() == 0 and not mlp._is_whole():
            return False  # calls on no rows get whole parameters, through which halves get no gradients
        enabled, calibrating, *_ = native.autocast_region()
        return bool(enabled or not calibrating) and may_fuse()

    def __call__(
        self, context: torch.Tensor, residual: torch.Tensor, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        """Return the layer's result.

        Parameters
        ----------
        context : torch.Tensor
            ``(..., heads · channels)``, the result of attention.
        residual : torch.Tensor
            ``(..., hidden_size)``, the layer's input.
        is_first_microbatch : bool, optional
            As :meth:`te_fast.pytorch.Linear.forward` takes it.
        """
        first = None if is_first_microbatch is None else bool(is_first_microbatch)
        enabled, *_, epoch = native.autocast_region()
        if enabled and epoch != self._epoch:
            self._epoch = epoch
            self._enter_region()
        out: torch.Tensor = native.program_apply(self.program, self, context, (residual,), first)
        return out

    def has_plain_layers(self) -> bool:
        """Tell whether the layers' calls, as the layers are now, are forwards that the program can replace."""
        proj, mlp = self._proj, self._mlp
        return (
            type(proj) is Linear
            and are_called_plainly(proj, mlp)
            and not proj.__dict__["_save_original_input"]
            and proj._parameters.get("weight") is not None
        )

    def joins(self, proj: Any, mlp: Any) -> bool:
        """Tell whether the program is that of these layers as they are; a trace that asks is not used for others."""
        of_proj, of_mlp = self._of_layers
        return (
            proj is self._proj
            and mlp is self._mlp
            and proj._traced is of_proj
            and mlp._traced is of_mlp
        )

    def parameters_in_graph(
        self, layers: tuple[Any, Any], hidden: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """Return the program's parameters in a trace; None if a graph must hold the layers one by one.

        Parameters
        ----------
        layers : tuple
            The projection and the feed-forward block, on the trace's own way to them.
        hidden : torch.Tensor
            The layer's input.
        """
        proj, mlp = layers
        of_proj, of_mlp = form_of(proj), form_of(mlp)
        if not key_of_region()[0] or of_proj.is_shared or of_mlp.is_shared or of_mlp.is_recomputed:
            return None
        names = ["weight", "bias"] if proj.use_bias else ["weight"]
        params = parameters_of(proj, of_proj, [(name,) for name in names])
        params += parameters_of(mlp, of_mlp, of_mlp.parameters)
        if mlp.use_bias and not mlp.apply_bias:
            params += parameters_of(mlp, of_mlp, [("fc2_bias",)])
        if any([part.dtype != hidden.dtype for parts in params for part in parts]):
            return None
        return tuple(params)

    def call_in_graph(
        self,
        params: tuple[tuple[torch.Tensor, ...], ...],
        context: torch.Tensor,
        residual: torch.Tensor,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        """Return what a call returns, as an operator of a graph.

        Parameters
        ----------
        params : tuple
            As of :meth:`parameters_in_graph`.
        context, residual, is_first_microbatch
            As of a call.
        """
        from te_fast.graphs import operators

        first = None if is_first_microbatch is None else bool(is_first_microbatch)
        out: torch.Tensor = operators.apply(self.traced, self, context, (residual,), params, first)
        return out

    @property
    def scale_owners(self) -> tuple[Any, ...]:
        """The layers that own the scales, for graphs."""
        return self._proj, self._mlp

    def _delayed_states_of_linears(self, *, forward: bool) -> list[Any]:
        """Return the scales of both layers, in the order of the program's linear operations."""
        states: list[Any] = []
        for layer in self.scale_owners:
            states += layer._delayed_states_of_linears(forward=forward)
        return states

    def _handles_of_linears(self) -> list[native.WeightHandle]:
        """Return the handles of both layers' weights, in the same order."""
        return [handle for handles in self._handles for handle in handles.values()]

    def _check_quantized_weights(self, recipe: Any) -> None:
        """Raise if weights are quantised by another recipe than that of the region."""
        self._proj._check_quantized_weights(recipe)
        self._mlp._check_quantized_weights(recipe)

    def _enter_region(self) -> None:
        """Note the autocast region in both layers; the dispatcher calls it, too, when the region is new."""
        self._proj._enter_region()
        self._mlp._enter_region()

    def _init_delayed_scaling(self) -> None:
        """Register the scales of both layers; the dispatcher calls it when the autocast region is new."""
        self._proj._init_delayed_scaling()
        self._mlp._init_delayed_scaling()
