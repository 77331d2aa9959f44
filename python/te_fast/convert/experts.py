"""Experts of other libraries' mixtures, with one stack of weights for each product, and their replacement."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from te_fast.convert.forwards import OwnedForward, Tied, Watched
from te_fast.convert.known import (
    GATED,
    agrees,
    gated_activation,
    in_mode,
    leave,
    leaving,
    random_like,
    random_parameters,
    refuse_parameters,
    refuse_random,
    refuse_wrapped,
    rounded_as,
)
from te_fast.experts.mixture import Mixture
from te_fast.ops.basic.grouped_linear import GroupedLinear
from te_fast.ops.basic.scaled import ScaledSwiGLU
from te_fast.ops.sequential import Sequential

_STACKS = ("gate_up_proj", "down_proj")


class Experts(NamedTuple):
    """Experts that are called with tokens, and with numbers and weights of each token's experts."""

    module: Any
    number: int
    hidden: int
    ffn: int


def is_experts(module: torch.nn.Module) -> bool:
    """Tell whether a module has stacks of weights where Transformers' experts have them."""
    stacks = [module._parameters.get(name) for name in _STACKS]
    return all(stack is not None and stack.dim() == 3 for stack in stacks)


def experts(module: Any, name: str) -> Experts:
    """Return the sizes of experts that te_fast can replace.

    Raises
    ------
    Left
        If te_fast does not support these experts.
    """
    refuse_wrapped(module, name)
    refuse_parameters(module, name)
    own = {key for key, parameter in module._parameters.items() if parameter is not None}
    if others := own - set(_STACKS):
        leave(f"{name} has {', '.join(sorted(others))}, too")
    first, last = (module._parameters[stack] for stack in _STACKS)
    count, rows, hidden = first.shape
    if first.dtype is torch.float64:
        leave(f"{name} has weights of torch.float64, in which te_fast has no experts")
    ffn = rows // 2
    if rows % 2 or last.shape != (count, hidden, ffn) or first.dtype != last.dtype:
        shapes = f"{list(first.shape)} and {list(last.shape)}"
        leave(
            f"{name} has weights of shape {shapes}, which are no stacks for torch.nn.functional.linear"
        )
    for size in (hidden, ffn):
        if size % 16 or size == 0:
            leave(f"{name} has {size} channels, which is no multiple of 16")
    activation = gated_activation(getattr(module, "act_fn", None), name)
    if activation != "swiglu":
        leave(f"{name} has {activation} as activation; te_fast only has experts with swiglu")
    return Experts(module, count, hidden, ffn)


@torch.no_grad()
def try_experts(found: Experts, name: str, make: Callable[[], Callable[..., torch.Tensor]]) -> None:
    """Compare experts with their replacement.

    Both compute with random weights; `make` returns a replacement that has the experts' weights of that moment.

    Raises
    ------
    Left
        If they differ, or cannot be called with tokens, numbers and weights.
    """
    weight = found.module._parameters[_STACKS[0]]
    if weight.is_meta:
        return
    tokens, topk = 16, min(2, found.number)
    x = random_like(weight, tokens, found.hidden)
    scores = random_like(weight, tokens, found.number).float().softmax(-1)
    weights, numbers = scores.topk(topk, -1)
    given = x, numbers, weights.to(x.dtype)
    with in_mode(found.module, training=False), random_parameters([(found.module, GATED)]):
        with leaving(f"{name} cannot be called as Mixtral's experts"):
            wanted = type(found.module).forward(found.module, *given)
        with leaving(f"te_fast cannot compute {name}"):
            got = make()(*given)
    if not isinstance(wanted, torch.Tensor) or not agrees(got, wanted, rounded_as(x.dtype)):
        leave(f"{name} computes something else than Mixtral's experts")
    refuse_random(found.module, name, lambda: type(found.module).forward(found.module, *given))


class ExpertsForward(OwnedForward):
    """Experts as Mixtral's: two products of all of them, an activation, and the weighted sum, as one program.

    Other calls run the module's own forward.

    Parameters
    ----------
    found : Experts
        The experts.
    name : str
        Their name.
    """

    what = "experts"

    def __init__(self, found: Experts, name: str) -> None:
        self._owner = weakref.ref(found.module)
        dtype = found.module._parameters[_STACKS[0]].dtype
        how: dict[str, Any] = {
            "bias": False,
            "device": "meta",
            "dtype": dtype,
            "single_grouped_weight": True,
        }
        first = GroupedLinear(found.number, found.hidden, 2 * found.ffn, **how)
        last = GroupedLinear(found.number, found.ffn, found.hidden, **how)
        self.operations = Sequential(first, ScaledSwiGLU(), last)
        self._count, self._mixture = found.number, Mixture(name)
        self._known = list(found.module._modules.items())
        products = zip(_STACKS, (first, last), strict=True)
        self._tied = {stack: Tied(op, [("weight", found.module, stack)]) for stack, op in products}

    def _watched(self) -> Sequence[Watched]:
        owner: Any = self._owner()
        return [(owner, self._known)]

    def layers(self) -> dict[str, Tied]:
        """Return the products by the names of their weights."""
        return self._tied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run te_fast's program, or the module's own forward if the call is not like Mixtral's."""
        owner: Any = self._owner()
        if (
            len(args) != 3
            or kwargs
            or args[0].dim() != 2
            or args[0].dtype is torch.float64
            or args[1].shape != args[2].shape
            or not self._is_current()
        ):
            return type(owner).forward(owner, *args, **kwargs)
        return self.run(*args)

    def run(
        self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Run te_fast's program.

        Parameters
        ----------
        tokens : torch.Tensor
            ``(tokens, hidden)``.
        numbers, weights : torch.Tensor
            ``(tokens, topk)``: the experts of each token, without repetition, and their weights in the sum.
        """
        shape = tokens.shape[0], self._count
        factors = weights.new_zeros(shape, dtype=torch.float32).scatter(1, numbers, weights.float())
        chosen = torch.zeros(shape, dtype=torch.bool, device=tokens.device)
        chosen = chosen.scatter(1, numbers, True)
        return self._mixture(self.operations, tokens, chosen, factors, numbers.shape[1])
