"""Tokens through experts as one program: router, permutation, products, activation, and the sum of results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from te_fast import _config
from te_fast.moe.choice import Choice
from te_fast.ops import fuser
from te_fast.ops.basic.grouped_linear import GroupedLinear
from te_fast.ops.basic.scaled import ScaledActivation
from te_fast.ops.common import autocast_dtype
from te_fast.ops.plan import explain_program
from te_fast.ops.sequential import Sequential
from te_fast.runtime import native
from te_fast.runtime.compiling import is_any_autocast_enabled
from te_fast.runtime.global_state import FP8GlobalStateManager
from te_fast.runtime.module_hooks import are_called_plainly
from te_fast.tensor.of_factory import may_fuse


class Router(NamedTuple):
    """A router as the first operation of a program.

    Attributes
    ----------
    choice : Choice
        How experts are chosen.
    is_biased : bool
        Calls pass a bias of the experts, and memory for the number of each expert's tokens.
    gives_logits : bool
        Calls return the logits behind the result.
    """

    choice: Choice
    is_biased: bool
    gives_logits: bool


class ExpertsProgram:
    """The operations of a block, the permutation and the sum as one program, with the router or without.

    The program uses the operations' parameters, FP8 weights and scales. If the operations change, the block makes
    another program.

    Parameters
    ----------
    experts : Sequential
        The two products and the activation between them.
    topk : int
        Experts of a token.
    name : str
        Name in messages.
    router : Router, optional
        The router; without it, calls pass masks and probabilities.
    parameters : dict, optional
        The dictionary that has the router's weight as ``"router"``.
    """

    def __init__(
        self,
        experts: Sequential,
        topk: int,
        name: str,
        router: Router | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self._ops: tuple[Any, ...] = tuple(experts)
        self.name, self._topk, self._router = name, topk, router
        self._handles = _handles_of(self._ops)
        self._is_stale = False
        for op in self._ops:
            op.pre_first_fuser_forward()
            op._captured_by(self)
        self._dtype = _type_of(self._ops)
        self._first_parameters = [
            (op._parameters, name) for op in self._ops[::2] for name in _first_names(op)
        ]
        self._parameters = parameters
        self._labels: list[str] = []
        program = self.program = native.Program(name)
        for label in self._appended(program):
            self._labels += [label] * (program.num_ops - len(self._labels))
        #: The program in exports; made when first exported.
        self.traced: Any = None

    def _appended(self, program: Any) -> Iterator[str]:
        """Append the ops to a program, or to a recorder; yield the label of each operation behind its ops."""
        first, router = self._ops[0], self._router
        if router is not None and self._parameters is not None:
            sizes = first.num_groups, first.in_features
            how = {"biased": router.is_biased, "logits": router.gives_logits}
            program.router("router", self._parameters, "router", *sizes, router.choice, **how)
            yield "router"
        program.permute("permute", first.num_groups, self._topk, routed=router is not None)
        yield "permute"
        for index, op in enumerate(self._ops):
            label = f"{index}: {type(op).__name__}"
            op._append_to(program, label)
            yield label
        program.unpermute("unpermute")
        yield "unpermute"

    def _append_to(self, program: Any) -> None:
        for _ in self._appended(program):
            pass

    def _forget(self, *, stale: bool = False) -> None:
        """Note that an operation has changed; the operation calls this on all programs that contain it."""
        self._is_stale = True

    _mode_changed = _forget

    def is_of(self, experts: Sequential, topk: int, router: Router | None = None) -> bool:
        """Tell whether the program still belongs to a block's operations, number of experts of a token, and router."""
        ops = tuple(experts._modules.values())
        return (
            ops == self._ops
            and topk == self._topk
            and router == self._router
            and not self._is_stale
            and _handles_of(ops) == self._handles
            and all([some[name].dtype is self._dtype for some, name in self._first_parameters])
        )

    def explain(self) -> str:
        """Describe the launches of calls."""
        return "\n".join(explain_program(self.program, self._labels))

    def keeps_type(self, tokens: torch.Tensor) -> bool:
        """Tell whether the experts compute in the tokens' type. A router reads the tokens before any conversion."""
        autocast = autocast_dtype(tokens) if is_any_autocast_enabled() else None
        return self.computes_in(tokens.dtype, autocast)

    def computes_in(self, dtype: torch.dtype, autocast: torch.dtype | None) -> bool:
        """Tell whether the experts compute in a type, perhaps under ``torch.autocast`` to another one."""
        return dtype is (autocast or self._dtype)

    def __call__(
        self,
        tokens: torch.Tensor,
        routing: tuple[torch.Tensor, ...],
        is_first_microbatch: bool | None,
    ) -> Any:
        """Return the sums of the experts' results, in the shape of the tokens; and logits, if the router gives them.

        Parameters
        ----------
        tokens : torch.Tensor
            ``(..., hidden_size)``, at least one; for a router, of the type that the experts compute in.
        routing : tuple of torch.Tensor
            Without a router ``(tokens, num_experts)``: the mask of the experts of each token, and their probabilities.
            For a biased router ``(num_experts,)``: the bias, and int64 memory that receives the number of each expert's
            tokens.
        is_first_microbatch : bool, optional
            As of :class:`te_fast.pytorch.Linear`.
        """
        autocast = autocast_dtype(tokens) if is_any_autocast_enabled() else None
        dtype = autocast or self._dtype
        x = tokens if tokens.dtype is dtype else tokens.to(dtype)
        first = None if is_first_microbatch is None else bool(is_first_microbatch)
        arguments = (self.program, self, x, routing, first, None, None)
        if autocast is None:
            return native.program_apply(*arguments)
        # Probabilities and biases keep their type.
        with torch.autocast(x.device.type, enabled=False):
            return native.program_apply(*arguments)

    def _init_delayed_scaling(self) -> None:
        """Register the scales of the operations; the dispatcher calls it when the autocast region is new."""
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        epoch = native.autocast_region()[5]
        for op in self._ops:
            op._init_scales(recipe, epoch)

    def _delayed_states_of_linears(self, *, forward: bool) -> list[Any]:
        """Return the scales of the products, in order."""
        direction = "forward" if forward else "backward"
        return [op._delayed_state(direction) for op in self._ops[::2]]


def _handles_of(ops: tuple[Any, ...]) -> list[Any]:
    return [op.__dict__.get("_handle") for op in ops]


def _type_of(ops: tuple[Any, ...]) -> torch.dtype | None:
    """Return the type of the linear operations' parameters; None if they differ."""
    first, last = ({getattr(op, name).dtype for name in _first_names(op)} for op in ops[::2])
    return first.pop() if first == last and len(first) == 1 else None


def _first_names(op: GroupedLinear) -> list[str]:
    return [*op._weight_names[:1], *op._bias_names[:1]]


def is_one_program(experts: Any) -> bool:
    """Tell whether the operations can be one native program."""
    ops = tuple(experts)
    return (
        type(experts) is Sequential
        and len(ops) == 3
        and [type(op) for op in ops[::2]] == [GroupedLinear] * 2
        and isinstance(ops[1], ScaledActivation)
        and all(op._is_native() for op in ops)
        and not any(op._extra_input_channels or "parametrizations" in op._modules for op in ops)
        and _type_of(ops) is not None
    )


def takes(experts: Any, tokens: torch.Tensor) -> bool:
    """Tell whether the program may replace calls of the operations, since nothing observes these calls.

    Parameters
    ----------
    experts : Sequential
        The operations.
    tokens : torch.Tensor
        ``(..., hidden_size)``, without hooks or tracing.
    """
    return tokens.numel() != 0 and may_replace(experts)


def may_replace(experts: Any) -> bool:
    """Tell the same of calls with tokens."""
    enabled, calibrating, *_ = native.autocast_region()
    return (
        are_called_plainly(experts, *experts._modules.values())
        and not fuser._is_custom()
        and not _config.DEBUG  # which checks for dropped rows
        and (enabled or not calibrating)
        and may_fuse()
    )
