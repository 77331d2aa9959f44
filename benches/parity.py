"""Differences between te_fast and Transformer Engine, in one process: outputs, gradients, scales, histories.

    python benches/parity.py [--device cuda] [--only Linear]

Every layer, op and MoE function runs three training steps under every recipe in both libraries, from the same
parameters and inputs. A figure is ‖te_fast - Transformer Engine‖ / ‖Transformer Engine‖ of the worst step, 0 where
all bits are equal. Where Transformer Engine is not installed there is nothing to compare with, and the bench says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from _harness import DTYPES, options, show, write
from te_fast.errors import TeFastError
from te_fast.state.extra_state import unpack

COLS, ROWS, STEPS = 256, 128, 3
ACTIVATIONS = [
    "gelu",
    "geglu",
    "glu",
    "qgelu",
    "qgeglu",
    "relu",
    "reglu",
    "srelu",
    "sreglu",
    "silu",
    "swiglu",
    "clamped_swiglu",
]
ACTIVATION_OPS = (
    *("GELU", "QGELU", "ReLU", "SReLU", "SiLU"),
    *("GEGLU", "GLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU", "ClampedSwiGLU"),
)
QUANTITIES = ("output", "input gradient", "parameter gradients", "scales", "histories")


@dataclass(frozen=True)
class Library:
    """Transformer Engine's names, of one of the two libraries."""

    pytorch: Any
    recipe: Any


Make = Callable[[Library, dict[str, Any]], torch.nn.Module]


class Routed(torch.nn.Module):
    """Tokens permuted to their experts and merged again."""

    def __init__(self, library: Library, *, mask: bool) -> None:
        super().__init__()
        self.te, self.mask = library.pytorch, mask

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route each token to two of four experts."""
        generator = torch.Generator().manual_seed(5)
        scores = torch.rand(x.shape[0], 4, generator=generator).to(x.device)
        weights, experts = scores.topk(2, dim=-1)
        if not self.mask:
            rows, order = self.te.moe_permute(x, experts.to(torch.int32), map_type="index")
            return rows, self.te.moe_unpermute(rows, order, weights, map_type="index")
        routing = torch.zeros_like(scores, dtype=torch.int32).scatter_(1, experts, 1)
        rows, probs, order = self.te.moe_permute_with_probs(
            x, scores * routing, routing, 2 * x.shape[0]
        )
        merged = self.te.moe_unpermute(
            rows * probs.unsqueeze(-1).to(rows.dtype), order, restore_shape=x.shape, map_type="mask"
        )
        return rows, merged


def layer(
    kind: str,
    sizes: tuple[int, ...],
    extra: dict[str, Any],
    library: Library,
    keywords: dict[str, Any],
) -> torch.nn.Module:
    """Make a layer or a norm."""
    made: torch.nn.Module = getattr(library.pytorch, kind)(*sizes, **extra, **keywords)
    return made


def layers() -> Iterator[tuple[str, Make]]:
    """Yield layers and norms by name."""
    sizes = (COLS, 2 * COLS)
    yield "Linear", partial(layer, "Linear", sizes, {})
    yield "Linear, no bias", partial(layer, "Linear", sizes, {"bias": False})
    for norm in ("LayerNorm", "RMSNorm"):
        yield norm, partial(layer, norm, (COLS,), {})
        extra = {"normalization": norm}
        yield f"LayerNormLinear, {norm}", partial(layer, "LayerNormLinear", sizes, extra)
    for activation in ACTIVATIONS:
        made = partial(layer, "LayerNormMLP", sizes, {"activation": activation})
        yield f"LayerNormMLP, {activation}", made


class Op(NamedTuple):
    """An operation: its class, its arguments, and whether it has parameters."""

    kind: str
    arguments: tuple[Any, ...] = ()
    has_parameters: bool = False


def chain(parts: tuple[Op, ...], library: Library, keywords: dict[str, Any]) -> torch.nn.Module:
    """Make a ``Sequential`` of operations."""
    ops = library.pytorch.ops
    given = {"dtype": keywords["params_dtype"], "device": keywords["device"]}
    made = [
        getattr(ops, part.kind)(*part.arguments, **(given if part.has_parameters else {}))
        for part in parts
    ]
    sequential: torch.nn.Module = ops.Sequential(*made)
    return sequential


LINEAR = Op("Linear", (COLS, COLS), has_parameters=True)
SINGLE_OPS = (
    LINEAR,
    Op("BasicLinear", (COLS, COLS), has_parameters=True),
    Op("Bias", (COLS,), has_parameters=True),
    Op("LayerNorm", (COLS,), has_parameters=True),
    Op("RMSNorm", (COLS,), has_parameters=True),
    Op("L2Normalization"),
    Op("ConstantScale", (0.5,)),
    Op("Identity"),
    *map(Op, ACTIVATION_OPS),
)


def ops() -> Iterator[tuple[str, Make]]:
    """Yield fusible operations, alone and in chains, by name."""
    for op in SINGLE_OPS:
        yield f"ops.{op.kind}", partial(chain, (op,))
    for name in ACTIVATION_OPS:
        yield f"ops: Linear, {name}", partial(chain, (LINEAR, Op(name)))
    yield "ops: Quantize, Linear", partial(chain, (Op("Quantize", (True, True)), LINEAR))
    norm = Op("LayerNorm", (COLS,), has_parameters=True)
    yield "ops: LayerNorm, Linear, GELU, Linear", partial(chain, (norm, LINEAR, Op("GELU"), LINEAR))


def routed(kind: str, library: Library, _: dict[str, Any]) -> torch.nn.Module:
    """Make a module of MoE functions."""
    return Routed(library, mask=kind == "routing mask")


def cases() -> dict[str, Make]:
    """Return all modules by name; functions in a module of their own."""
    found = dict([*layers(), *ops()])
    for kind in ("expert indices", "routing mask"):
        found[f"MoE permutation, {kind}"] = partial(routed, kind)
    return found


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


def states(module: torch.nn.Module) -> list[torch.Tensor]:
    """Scales and histories of delayed scaling of all submodules, in their order."""
    found = []
    for name, part in module.named_modules():
        if type(part).get_extra_state is torch.nn.Module.get_extra_state:
            continue
        state = unpack(part.get_extra_state(), layer=name)
        if state is not None:
            found += [state.scale_fwd, state.scale_bwd]
            found += [state.amax_history_fwd, state.amax_history_bwd]
    return found


def numbers(shape: torch.Size, seed: int, like: torch.Tensor) -> torch.Tensor:
    """Return normal numbers that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like)


def run(
    library: Library, module: torch.nn.Module, recipe: Any, x: torch.Tensor
) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Take training steps; yield what each leaves."""
    for step in range(STEPS):
        leaf = numbers(x.shape, 10 + step, x).requires_grad_()
        with library.pytorch.autocast(enabled=recipe is not None, recipe=recipe):
            result = module(leaf)
        outputs = list(result) if isinstance(result, tuple) else [result]
        gradients = [numbers(y.shape, 20 + step + index, y) for index, y in enumerate(outputs)]
        torch.autograd.backward(outputs, gradients)
        kept = states(module)
        yield {
            "output": [y.detach() for y in outputs],
            "input gradient": [] if leaf.grad is None else [leaf.grad],
            "parameter gradients": [p.grad for p in module.parameters() if p.grad is not None],
            "scales": [one for one in kept if one.dim() == 1],
            "histories": [one for one in kept if one.dim() == 2],
        }
        module.zero_grad(set_to_none=True)


def compare(
    ours: Library, theirs: Library, case: str, recipe: str, x: torch.Tensor
) -> dict[str, float]:
    """Differences of one case under one recipe, by quantity; of what both have."""
    keywords = {"params_dtype": x.dtype, "device": x.device}
    modules = [cases()[case](library, keywords) for library in (ours, theirs)]
    parameters = [dict(module.named_parameters()) for module in modules]
    if parameters[0].keys() != parameters[1].keys():
        message = f"{case}: parameters {sorted(parameters[0])} and {sorted(parameters[1])}"
        raise SystemExit(message)
    for index, (name, parameter) in enumerate(parameters[1].items()):
        values = numbers(parameter.shape, 100 + index, parameter) * 0.1
        for one in (parameter, parameters[0][name]):
            one.data.copy_(values)
    makers = recipes()[recipe]
    steps = zip(
        run(ours, modules[0], makers(ours.recipe), x),
        run(theirs, modules[1], makers(theirs.recipe), x),
        strict=True,
    )
    worst: dict[str, float] = {}
    for mine, other in steps:
        for quantity in QUANTITIES:
            pairs = zip(mine[quantity], other[quantity], strict=True)
            for pair in pairs:
                worst[quantity] = max(worst.get(quantity, 0.0), difference(*pair))
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
