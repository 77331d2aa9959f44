"""Chains of ops for the tests of programs: run by a native program, and by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from te_fast.runtime import native
from te_fast.runtime.delayed import DelayedScalingRecipeState
from te_fast.runtime.global_state import FP8GlobalStateManager

ACTIVATIONS = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}
#: The second norm has factors of `weight + 1`.
NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
EPS = 1e-3


class Chain(torch.nn.Module):
    """Ops written down as a list of names, run by a program and by torch."""

    def __init__(self, ops: list[Any], cols: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.ops = ops
        self.handles: list[Any] = []
        self.begun: list[int] = []
        self.program = native.Program("chain")
        for index, op in enumerate(ops):
            cols = self._append(index, op, cols, dtype)

    def _append(self, index: int, op: Any, cols: int, dtype: torch.dtype) -> int:
        name, *arguments = op
        label = f"{index}: {name}"
        if name == "linear":
            outputs = arguments[0]
            weight = torch.randn(outputs, cols, dtype=dtype) * cols**-0.5
            self.register_parameter(f"p{index}", torch.nn.Parameter(weight))
            self.handles.append(native.WeightHandle(label))
            self.program.linear(
                label, self.handles[-1], self._parameters, f"p{index}", cols, outputs
            )
            return int(outputs)
        if name == "bias":
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.randn(cols, dtype=dtype)))
            self.program.bias(label, self._parameters, f"p{index}", cols)
        elif name == "add":
            self.program.add_extra_input(label, arguments[0])
        elif name == "branch":
            self.program.make_extra_output(label, arguments[0])
        elif name == "residual":
            self.begun.append(self.program.residual(label))
        elif name == "add_residual":
            self.program.add_residual(label, self.begun.pop() if self.begun else 0)
        elif name == "scale":
            self.program.constant_scale(label, arguments[0])
        elif name in NORMS:
            self._append_norm(index, label, name, cols, dtype)
        elif name in ACTIVATIONS:
            self.program.activation(label, name)
            return cols // 2 if name == "swiglu" else cols
        else:
            self.program.identity(label)
        return cols

    def _append_norm(
        self, index: int, label: str, name: str, cols: int, dtype: torch.dtype
    ) -> None:
        names = [f"p{index}", f"q{index}"][: 2 if name == "layer_norm" else 1]
        for parameter in names:
            value = torch.nn.Parameter(torch.randn(cols, dtype=dtype))
            self.register_parameter(parameter, value)
        weight, bias = (*names, None)[:2]
        kind = NORMS[name]
        self.program.norm(
            label, kind, self._parameters, weight, bias, cols, EPS, name == "rms_norm"
        )

    def _init_delayed_scaling(self) -> None:
        recipe: Any = FP8GlobalStateManager.get_fp8_recipe()
        if not hasattr(self, "fwd"):
            count = len(self.handles)
            device = next(self.parameters()).device
            self.fwd = DelayedScalingRecipeState(
                recipe, mode="forward", num_quantizers=2 * count, device=device
            )
            self.bwd = DelayedScalingRecipeState(
                recipe, mode="backward", num_quantizers=count, device=device
            )
        for state in (self.fwd, self.bwd):
            state.use(recipe, None)
            state.take_part()
        epoch = native.autocast_region()[5]
        for index, handle in enumerate(self.handles):
            handle.set_slots(epoch, self.fwd.slots, self.bwd.slots, 2 * index, index)

    def forward(self, x: torch.Tensor, *extras: torch.Tensor, first: bool | None = None) -> Any:
        return native.program_apply(self.program, self, x, extras, first)

    def reference(
        self, x: torch.Tensor, *extras: torch.Tensor, linear: Any = functional.linear
    ) -> Any:
        """Run the ops in torch, with another linear op where one is given."""
        remaining, outputs, begun = list(extras), [], []
        for index, (name, *arguments) in enumerate(self.ops):
            parameter = getattr(self, f"p{index}", None)
            if name == "linear":
                x = linear(x, parameter)
            elif name == "bias":
                x = x + parameter
            elif name == "add":
                x = x + remaining.pop(0)
            elif name == "branch":
                outputs.append(x)
            elif name == "residual":
                begun.append(x)
            elif name == "add_residual":
                x = x + begun.pop()
            elif name == "scale":
                x = x * arguments[0]
            elif name == "layer_norm":
                x = functional.layer_norm(
                    x, x.shape[-1:], parameter, getattr(self, f"q{index}"), EPS
                )
            elif name == "rms_norm":
                x = functional.rms_norm(x, x.shape[-1:], parameter + 1, EPS)
            elif name in ACTIVATIONS:
                x = ACTIVATIONS[name](x)
        return (x, *outputs) if outputs else x


def results(
    chain: Chain,
    run: Any,
    x: torch.Tensor,
    extras: list[torch.Tensor],
    grads: list[torch.Tensor],
    *,
    backwards: int = 1,
) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, *extras)]
    chain.zero_grad(set_to_none=True)
    # In-place ops write into an extra input: torch forbids that for leaves.
    out = run(leaves[0], *[extra.clone() for extra in leaves[1:]])
    outputs = out if isinstance(out, tuple) else (out,)
    for left in reversed(range(backwards)):
        clones = [grad.clone() for grad in grads[: len(outputs)]]
        torch.autograd.backward(outputs, clones, retain_graph=left > 0)
    made = [*outputs, *[leaf.grad for leaf in leaves], *[p.grad for p in chain.parameters()]]
    return [tensor.detach().clone() for tensor in made]


CHAINS: dict[str, list[Any]] = {
    "linear": [("linear", 48)],
    "linear_bias": [("linear", 48), ("bias",)],
    "bias_alone": [("bias",)],
    "scale": [("scale", 0.5)],
    "identity": [("identity",)],
    "three": [("linear", 64), ("bias",), ("linear", 48), ("identity",), ("linear", 32), ("bias",)],
    "add": [("linear", 48), ("add", False)],
    "add_in_place": [("linear", 48), ("bias",), ("add", True)],
    "scale_add": [("linear", 48), ("scale", 0.25), ("add", True)],
    "linear_scale": [("linear", 48), ("scale", -2.0), ("linear", 32)],
    "add_first": [("add", False), ("linear", 48), ("bias",)],
    "two_adds": [("add", False), ("add", False), ("linear", 48)],
    "add_last_alone": [("add", False)],
    "branch": [("linear", 32), ("branch", False), ("linear", 48)],
    "branch_in_place": [("linear", 32), ("branch", True), ("linear", 48)],
    "branch_first": [("branch", False), ("linear", 48)],
    "branch_last": [("linear", 48), ("branch", False)],
    "branch_alone": [("branch", False)],
    "two_branches": [("linear", 32), ("branch", False), ("branch", False), ("linear", 48)],
    "gelu_alone": [("gelu",)],
    "mlp": [("linear", 64), ("bias",), ("gelu",), ("linear", 32), ("bias",)],
    "relu": [("linear", 64), ("bias",), ("relu",), ("linear", 32)],
    "swiglu": [("linear", 128), ("swiglu",), ("linear", 32), ("bias",)],
    "silu_branch": [("linear", 64), ("silu",), ("branch", False), ("linear", 32)],
    "residual": [("branch", False), ("linear", 32), ("bias",), ("add", False), ("linear", 48)],
    "residual_in_one": [("residual",), ("linear", 32), ("bias",), ("add_residual",)],
    "residual_of_nothing": [("residual",), ("add_residual",)],
    "residual_norm": [("residual",), ("rms_norm",), ("linear", 32), ("add_residual",)],
    "residual_handed_out": [
        *[("add", False), ("residual",), ("branch", False), ("layer_norm",), ("linear", 32)],
        *[("add", False), ("add_residual",), ("branch", False), ("rms_norm",), ("linear", 48)],
    ],
    "two_residuals": [
        *[("linear", 32), ("residual",), ("silu",), ("linear", 32), ("add_residual",)],
        *[("residual",), ("rms_norm",), ("linear", 64), ("swiglu",), ("add_residual",), ("bias",)],
    ],
    "residual_in_another": [
        *[("rms_norm",), ("residual",), ("linear", 32), ("residual",), ("residual",)],
        *[("layer_norm",), ("linear", 48), ("silu",), ("linear", 32), ("add_residual",)],
        *[("linear", 32), ("add_residual",), ("linear", 32), ("add_residual",), ("scale", 0.5)],
    ],
    "layer": [
        *[("linear", 32), ("bias",), ("add", False), ("residual",), ("rms_norm",)],
        *[("linear", 64), ("swiglu",), ("linear", 32), ("bias",), ("add_residual",)],
    ],
    "norm_alone": [("layer_norm",)],
    "norm_linear": [("layer_norm",), ("linear", 48), ("bias",)],
    "norm_mlp": [("rms_norm",), ("linear", 64), ("bias",), ("gelu",), ("linear", 32)],
    "norm_swiglu": [("layer_norm",), ("linear", 128), ("swiglu",), ("linear", 32), ("bias",)],
    "norm_last": [("linear", 48), ("rms_norm",)],
    "norm_twice": [("layer_norm",), ("rms_norm",), ("linear", 48)],
    "add_norm": [("linear", 48), ("add", False), ("layer_norm",), ("linear", 32)],
    "add_norm_in_place": [("linear", 48), ("add", True), ("rms_norm",), ("linear", 32)],
    "add_branch_norm": [("add", False), ("branch", False), ("rms_norm",), ("linear", 32)],
    "branch_norm": [("branch", False), ("layer_norm",), ("linear", 48)],
    "branch_norm_in_place": [("branch", True), ("rms_norm",), ("linear", 48)],
    "two_branches_norm": [("branch", False), ("branch", False), ("layer_norm",), ("linear", 48)],
    "norm_branch": [("layer_norm",), ("branch", False), ("linear", 48)],
    "norm_hand": [("rms_norm",), ("linear", 64), ("linear", 48), ("bias",), ("linear", 32)],
    "block": [
        *[("branch", False), ("rms_norm",), ("linear", 64), ("silu",), ("linear", 32), ("bias",)],
        *[("add", False), ("branch", True), ("layer_norm",), ("linear", 32), ("add", False)],
    ],
}


def case(ops: list[Any], rows: int = 24) -> tuple[Chain, torch.Tensor, list[Any], list[Any]]:
    torch.default_generator.manual_seed(0)
    chain = Chain(ops, 32)
    x = torch.randn(2, rows // 2, 32)
    extras, grads = [], []
    width = 32
    for name, *arguments in ops:
        if name == "linear":
            width = arguments[0]
        elif name == "swiglu":
            width //= 2
        elif name == "add":
            extras.append(torch.randn(2, rows // 2, width))
        elif name == "branch":
            grads.append(torch.randn(2, rows // 2, width))
    return chain, x, extras, [torch.randn(2, rows // 2, width), *grads]
