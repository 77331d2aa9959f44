"""Differences between te_fast and Transformer Engine, in one process: outputs, gradients, scales, histories.

    python benches/parity.py [--device cuda] [--only Linear]

Every layer, operation, MoE function, loss and optimizer (`_parity_cases.py`) takes three training steps under every
recipe in both libraries, from the same parameters and inputs. A figure is
‖te_fast - Transformer Engine‖ / ‖Transformer Engine‖ of the worst step, 0 where all bits are equal. Where Transformer
Engine is not installed there is nothing to compare with, and the bench says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from _harness import DTYPES, options, show, write
from _parity_cases import COLS, Given, Library, cases
from te_fast.errors import TeFastError
from te_fast.state.extra_state import unpack

ROWS, STEPS = 128, 3
QUANTITIES = ("output", "input gradient", "parameter gradients", "scales", "histories")


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


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return ‖ours - theirs‖ / ‖theirs‖; infinity for other shapes and for values that are finite in one alone."""
    if ours.shape != theirs.shape:
        return math.inf
    if torch.equal(ours, theirs):
        return 0.0
    a, b = ours.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if not bool((a.isfinite() & b.isfinite() | same).all()):
        return math.inf
    a, b = a.masked_fill(same, 0), b.masked_fill(~b.isfinite(), 0)
    return float((a - b.masked_fill(same, 0)).norm() / b.norm().clamp_min(1e-30))


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
    """Give tensors names."""
    return {str(index): one for index, one in enumerate(tensors)}


def run(
    library: Library, module: torch.nn.Module, recipe: Any, x: torch.Tensor
) -> Iterator[dict[str, dict[str, torch.Tensor]]]:
    """Take training steps; yield what each leaves, by quantity and name."""
    for step in range(STEPS):
        leaf = numbers(x.shape, 10 + step, x).requires_grad_()
        with library.pytorch.autocast(enabled=recipe is not None, recipe=recipe):
            result = module(leaf)
        outputs = list(result) if isinstance(result, tuple) else [result]
        learning = [y for y in outputs if y.requires_grad]
        gradients = [numbers(y.shape, 20 + step + index, y) for index, y in enumerate(learning)]
        if learning:
            torch.autograd.backward(learning, gradients)
        kept = states(module)
        yield {
            "output": by_number([y.detach() for y in outputs]),
            "input gradient": {} if leaf.grad is None else {"": leaf.grad},
            "parameter gradients": {
                name: p.grad for name, p in module.named_parameters() if p.grad is not None
            },
            "scales": {name: one for name, one in kept.items() if one.dim() == 1},
            "histories": {name: one for name, one in kept.items() if one.dim() == 2},
        }
        module.zero_grad(set_to_none=True)


def make_both(
    ours: Library, theirs: Library, case: str, recipe: str, x: torch.Tensor
) -> list[torch.nn.Module]:
    """Make a case's module in both libraries, with equal parameters."""
    maker = recipes()[recipe]
    modules = [
        cases()[case](library, Given(x.dtype, x.device, maker(library.recipe)))
        for library in (ours, theirs)
    ]
    mine, other = (dict(module.named_parameters()) for module in modules)
    if mine.keys() != other.keys():
        message = f"{case}: parameters {sorted(mine)} and {sorted(other)}"
        raise SystemExit(message)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(other.items()):
            like = torch.empty((), dtype=x.dtype, device=x.device)
            values = numbers(parameter.shape, 100 + index, like) * 0.1
            for one in (parameter, mine[name]):
                one.copy_(values)
    return modules


def compare(
    ours: Library, theirs: Library, case: str, recipe: str, x: torch.Tensor
) -> dict[str, float]:
    """Differences of one case under one recipe, by quantity; what one library lacks is infinitely far."""
    modules = make_both(ours, theirs, case, recipe, x)
    maker = recipes()[recipe]
    steps = zip(
        run(ours, modules[0], maker(ours.recipe), x),
        run(theirs, modules[1], maker(theirs.recipe), x),
        strict=True,
    )
    worst: dict[str, float] = {}
    for mine, other in steps:
        for quantity in QUANTITIES:
            # Transformer Engine's attention keeps scales that only FP8 attention uses.
            names = [name for name in other[quantity] if "core_attention" not in name]
            for name in dict.fromkeys([*mine[quantity], *names]):
                a, b = mine[quantity].get(name), other[quantity].get(name)
                found = math.inf if a is None or b is None else difference(a, b)
                worst[quantity] = max(worst.get(quantity, 0.0), found)
    return worst


def installed() -> Library | None:
    """Return Transformer Engine, if there is one."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    module = importlib.import_module
    return Library(module("transformer_engine.pytorch"), module("transformer_engine.common.recipe"))


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
    figures: dict[str, dict[str, float | str]] = {}
    for case in cases():
        for recipe in recipes():
            if arguments.only not in case:
                continue
            try:
                figures[f"{case}; {recipe}"] = {**compare(own(), theirs, case, recipe, x)}
            except (
                TeFastError,
                NotImplementedError,
                RuntimeError,
                ValueError,
                AssertionError,
            ) as error:
                first = next(iter(str(error).splitlines()), type(error).__name__)
                figures[f"{case}; {recipe}"] = {"refused": first[:80]}
    show(
        "relative differences",
        ["", *QUANTITIES],
        [
            [name, *(f"{row[one]:.1e}" if one in row else "" for one in QUANTITIES)]
            for name, row in figures.items()
        ],
    )
    write("parity", arguments, dict(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
