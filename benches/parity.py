"""Differences between te_fast and Transformer Engine, in one process: outputs, gradients, scales, histories.

    python benches/parity.py [--device cuda] [--only Linear]

Every layer, operation, MoE function, loss and optimizer (`_parity_cases.py`) takes three training steps under every
recipe in both libraries, from the same parameters and inputs. A figure is
‖te_fast - Transformer Engine‖ / ‖Transformer Engine‖ of the worst step, 0 where all bits are equal. `NOT_COMPARABLE`
lists the quantities that are left out, with reasons. A case that a library refuses is a row of its own, with the
library's reason. Where Transformer Engine is not installed there is nothing to compare with, and the bench says so.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from _harness import DTYPES, attempt, forget, options, peer, reason, show, write
from _parity_cases import COLS, Given, Library, cases
from te_fast.state.extra_state import unpack

ROWS, STEPS = 128, 3
#: Quantities of cases that cannot be compared: the prefix of the case, the quantities, and the reason.
NOT_COMPARABLE = {
    "DotProductAttention": (
        {"scales", "histories"},
        "Transformer Engine's attention has scales, which only FP8 attention uses; te_fast's has none",
    ),
    "ops: Quantize, Linear": (
        {"scales", "histories"},
        "Transformer Engine keeps the input's history in Quantize, te_fast in the linear operation that reads it",
    ),
}
QUANTITIES = ("output", "input gradient", "parameter gradients", "scales", "histories")
#: Results of a step, by quantity and name.
Step = dict[str, dict[str, torch.Tensor]]


class RefusedError(RuntimeError):
    """A case that one of the libraries, or both, did not run."""

    def __init__(self, errors: dict[str, Exception]) -> None:
        super().__init__("; ".join(f"{name}: {reason(error)}" for name, error in errors.items()))
        self.libraries = frozenset(errors)


def recipes() -> dict[str, Callable[[Any], Any]]:
    """Return recipes by name, of a library's recipe module."""
    return {
        "none": lambda _: None,
        "delayed": lambda recipe: recipe.DelayedScaling(),
        "delayed, E4M3": lambda recipe: recipe.DelayedScaling(
            fp8_format=recipe.Format.E4M3,
            amax_history_len=4,
            amax_compute_algo="most_recent",
            margin=1,
        ),
        "current": lambda recipe: recipe.Float8CurrentScaling(),
        "block": lambda recipe: recipe.Float8BlockScaling(),
    }


def difference(
    ours: torch.Tensor, theirs: torch.Tensor, beside: torch.Tensor | None = None
) -> float:
    """Return ‖ours - theirs‖ / ‖beside‖; infinity for unequal shapes and for values that are finite in one of them.

    `beside` is `theirs` by default.
    """
    if ours.shape != theirs.shape:
        return math.inf
    if torch.equal(ours, theirs):
        return 0.0
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if not bool((a.isfinite() & b.isfinite() | same).all()):
        return math.inf
    a, b = a.masked_fill(same, 0), b.masked_fill(~b.isfinite(), 0)
    scale = b if beside is None else beside.double().masked_fill(~beside.isfinite(), 0)
    return float((a - b.masked_fill(same, 0)).norm() / scale.norm().clamp_min(1e-30))


def states(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales and histories of delayed scaling of all submodules, by name."""
    found = {}
    for name, part in module.named_modules():
        if type(part).get_extra_state is torch.nn.Module.get_extra_state:
            continue
        state = unpack(part.get_extra_state(), layer=name)
        if state is not None:
            for field in ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd"):
                found[f"{name}.{field}"] = getattr(state, field)
    return found


def numbers(shape: torch.Size, seed: int, like: torch.Tensor) -> torch.Tensor:
    """Return normal numbers that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like)


def by_number(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name tensors by their numbers."""
    return {str(index): one for index, one in enumerate(tensors)}


def owner_less(name: str) -> str:
    """Name a parameter without the basic operation that owns it: only te_fast names the owner."""
    return re.sub(r"basic_ops\.\d+\.", "", name)


def start(module: torch.nn.Module, x: torch.Tensor) -> None:
    """Give parameters values that depend on their names alone."""
    like = torch.empty((), dtype=x.dtype, device=x.device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            seed = zlib.crc32(owner_less(name).encode())
            parameter.copy_(numbers(parameter.shape, seed, like) * 0.1)


def run(library: Library, case: str, recipe: str, x: torch.Tensor) -> list[Step]:
    """Make a case's module in a library and take training steps."""
    made = recipes()[recipe](library.recipe)
    module = cases()[case](library, Given(x.dtype, x.device, made))
    start(module, x)
    steps: list[Step] = []
    for step in range(STEPS):
        leaf = numbers(x.shape, 10 + step, x).requires_grad_()
        with library.pytorch.autocast(enabled=made is not None, recipe=made):
            result = module(leaf)
        outputs = list(result) if isinstance(result, tuple) else [result]
        learning = [y for y in outputs if y.requires_grad]
        gradients = [numbers(y.shape, 20 + step + index, y) for index, y in enumerate(learning)]
        if learning:
            torch.autograd.backward(learning, gradients)
        kept = states(module)
        found = {
            "output": by_number([y.detach() for y in outputs]),
            "input gradient": {} if leaf.grad is None else {"": leaf.grad},
            "parameter gradients": {
                owner_less(name): p.grad
                for name, p in module.named_parameters()
                if p.grad is not None
            },
            "scales": {name: one for name, one in kept.items() if one.dim() == 1},
            "histories": {name: one for name, one in kept.items() if one.dim() == 2},
        }
        # A later step must not change the results of this one.
        steps.append(
            {
                quantity: {name: one.detach().clone() for name, one in values.items()}
                for quantity, values in found.items()
            }
        )
        module.zero_grad(set_to_none=True)
    return steps


def in_place_of(name: str) -> str:
    """Name the tensor whose norm divides a difference: the tensor itself, except for key biases.

    A number that is added to all scores of a query does not change their softmax. So the gradient of a key bias is zero
    except for roundings, which are compared with the gradient of the value bias.
    """
    return re.sub(r"\bkey_bias$", "value_bias", name)


def compare(
    ours: Library, theirs: Library, case: str, recipe: str, x: torch.Tensor
) -> dict[str, float]:
    """Differences of one case under one recipe, by quantity; infinity for a quantity that one library lacks.

    Raises
    ------
    RefusedError
        If a library does not run the case.
    """
    forget()
    runs: list[list[Step]] = []
    errors: dict[str, Exception] = {}
    for name, library in (("te_fast", ours), ("Transformer Engine", theirs)):
        try:
            runs.append(run(library, case, recipe, x))
        except Exception as error:  # noqa: PERF203  # a library may raise any error
            errors[name] = error
    if errors:
        raise RefusedError(errors)
    left_out = next((one for name, (one, _) in NOT_COMPARABLE.items() if case.startswith(name)), ())
    worst: dict[str, float] = {}
    for mine, other in zip(*runs, strict=True):
        for quantity in (one for one in QUANTITIES if one not in left_out):
            # Transformer Engine's attention keeps scales that only FP8 attention uses.
            names = [name for name in other[quantity] if "core_attention" not in name]
            for name in dict.fromkeys([*mine[quantity], *names]):
                a, b = mine[quantity].get(name), other[quantity].get(name)
                beside = other[quantity].get(in_place_of(name))
                found = math.inf if a is None or b is None else difference(a, b, beside)
                worst[quantity] = max(worst.get(quantity, 0.0), found)
    return worst


def installed() -> Library | None:
    """Return Transformer Engine, if there is one."""
    found = peer()
    return None if found is None else Library(*found)


def own() -> Library:
    """Return te_fast."""
    module = importlib.import_module
    return Library(module("te_fast.pytorch"), module("te_fast.common.recipe"))


def main() -> int:
    """Compare, print, write."""
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    arguments = parser.parse_args()
    theirs = installed()
    if theirs is None:
        print("Transformer Engine is not installed: there is nothing to compare te_fast with")
        return 0
    x = torch.empty(ROWS, COLS, dtype=DTYPES[arguments.dtype], device=arguments.device)
    worst: dict[str, dict[str, float | str]] = {recipe: {} for recipe in recipes()}
    details: list[dict[str, float | str]] = []
    refused: dict[str, str] = {}
    rows = []
    for case in (one for one in cases() if arguments.only in one):
        for recipe in recipes():
            name = f"{case}; {recipe}"
            found = attempt(name, partial(compare, own(), theirs, case, recipe, x), refused)
            if found is None:
                worst[recipe][case] = "refused"
                continue
            # JSON has no infinity.
            figures = {
                key: value if math.isfinite(value) else "inf" for key, value in found.items()
            }
            worst[recipe][case] = max(found.values()) if "inf" not in figures.values() else "inf"
            details.append({"case": case, "recipe": recipe, **figures})
            rows.append(
                [name, *(f"{found[one]:.1e}" if one in found else "" for one in QUANTITIES)]
            )
    show("relative differences", ["", *QUANTITIES], rows)
    show("refused", ["", "by"], refused.items())
    left_out = [(name, ", ".join(sorted(one)), why) for name, (one, why) in NOT_COMPARABLE.items()]
    show("not comparable", ["", "what", "why"], left_out)
    write("parity", arguments, {**worst, "details": details}, refused)
    return 0


if __name__ == "__main__":
    sys.exit(main())
