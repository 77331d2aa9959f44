"""Host time of te_fast.pytorch.Linear per recipe, as ratios to torch.nn.Linear of the same run.

    python benches/linear_host.py [--device cuda] [--rows 256 --features 1024]

Rows of the table: no_grad with a cached weight, forward with grad, forward + backward, entering and leaving
``autocast``. The bars are the project's; they hold for CUDA, where the host only launches. On the CPU the host backend
also computes within the call, so the figures there only show that the bench runs. Where Transformer Engine is
installed, its layer runs beside te_fast's. It reuses its FP8 weight only in calls that it is told belong to a later
microbatch.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import te_fast.pytorch as te
from _harness import (
    DTYPES,
    RECIPES,
    Timing,
    as_in_training,
    attempt,
    interleave,
    options,
    peer,
    show,
    tried,
    write,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from te_fast.common.recipe import Recipe

# Ratio to nn.Linear that must not be passed, by mode and recipe.
BARS = {
    "no_grad": {"delayed": 0.95, "block": 0.95, "current": 1.2},
    "forward with grad": {"delayed": 1.25},
    "forward + backward": {"delayed": 1.05, "block": 1.05, "current": 1.2},
}
AUTOCAST_BAR_US = 1.5


def bodies_of(
    layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor, *, told: bool = False
) -> dict[str, Callable[[], object]]:
    """One call per mode; ``no_grad`` is entered by the caller. ``told``: the layer hears that its weight is kept."""
    kept = {"is_first_microbatch": False} if told else {}
    leaf = x.clone().requires_grad_()
    parameters = [leaf, *layer.parameters()]

    def forward_and_backward() -> None:
        layer(leaf).backward(gradient)
        for parameter in parameters:
            parameter.grad = None

    return {
        "no_grad": lambda: layer(x, **kept),
        "forward with grad": lambda: layer(leaf),
        "forward + backward": forward_and_backward,
    }


def of_peer(
    x: torch.Tensor, kind: dict[str, Any], failures: dict[str, str]
) -> dict[str, tuple[torch.nn.Module, Callable[[], AbstractContextManager[Any]]]]:
    """Layers and regions of Transformer Engine, where it is installed, by name; each has seen a first microbatch."""
    theirs = peer() if x.is_cuda else None
    if theirs is None:
        return {}
    found: dict[str, tuple[torch.nn.Module, Callable[[], AbstractContextManager[Any]]]] = {}
    for recipe, known in RECIPES.items():
        own = getattr(theirs.recipe, known.__name__)()
        region = partial(theirs.pytorch.autocast, enabled=True, recipe=own)
        layer = theirs.pytorch.Linear(x.shape[-1], x.shape[-1], **kind)

        def make(layer: torch.nn.Module = layer) -> Callable[[], object]:
            return partial(layer, x, is_first_microbatch=True)

        name = f"Transformer Engine, {recipe}"
        if attempt(name, partial(tried, make, x.device, region), failures) is not None:
            found[name] = (layer, region)
    return found


def measure(
    arguments: argparse.Namespace, failures: dict[str, str]
) -> dict[str, dict[str, Timing]]:
    """Microseconds per call, by mode and layer."""
    torch.manual_seed(0)
    dtype, device, size = DTYPES[arguments.dtype], arguments.device, arguments.features
    x = torch.randn(arguments.rows, size, dtype=dtype, device=device)
    gradient = torch.randn_like(x)
    layers: dict[str, torch.nn.Module] = {
        "nn.Linear": torch.nn.Linear(size, size, bias=False, dtype=dtype, device=device)
    }
    regions: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    kind: dict[str, Any] = {"bias": False, "params_dtype": dtype, "device": device}
    for name, recipe in RECIPES.items():
        layers[name] = te.Linear(size, size, **kind)
        regions[name] = partial(te.autocast, enabled=True, recipe=recipe())
    told = of_peer(x, kind, failures)
    layers |= {name: layer for name, (layer, _) in told.items()}
    regions |= {name: region for name, (_, region) in told.items()}
    result: dict[str, dict[str, Timing]] = {}
    for mode in BARS:
        bodies = {
            name: bodies_of(layer, x, gradient, told=name in told)[mode]
            for name, layer in layers.items()
        }
        with torch.set_grad_enabled(mode != "no_grad"):
            result[mode] = interleave(
                bodies, device, rounds=arguments.rounds, calls=arguments.calls, regions=regions
            )
    return result


def autocast_regions(arguments: argparse.Namespace) -> dict[str, Timing]:
    """Microseconds to enter and leave an empty region, by recipe."""

    def region(recipe: Recipe) -> Callable[[], None]:
        def enter_and_leave() -> None:
            with te.autocast(enabled=True, recipe=recipe):
                pass

        return enter_and_leave

    bodies = {name: region(recipe()) for name, recipe in RECIPES.items()}
    return interleave(bodies, arguments.device, rounds=arguments.rounds, calls=arguments.calls)


def main() -> int:
    """Measure, print, write; 1 when a bar is passed on CUDA."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--features", type=int, default=1024)
    arguments = parser.parse_args()
    as_in_training()
    failures: dict[str, str] = {}
    modes, regions = measure(arguments, failures), autocast_regions(arguments)
    rows, ratios, missed = [], {}, []
    bars = BARS if arguments.device.type == "cuda" else {mode: {} for mode in BARS}
    for mode, timings in modes.items():
        reference = timings["nn.Linear"].median
        for name, timing in timings.items():
            ratio, bar = timing.median / reference, bars[mode].get(name)
            ratios[f"{mode}, {name}"] = round(ratio, 3)
            if bar is not None and ratio > bar:
                missed.append(f"{mode}, {name}: {ratio:.2f} > {bar}")
            spread = f"{timing.low:.2f} - {timing.high:.2f}"
            rows.append(
                [f"{mode}, {name}", f"{timing.median:.2f}", spread, f"{ratio:.2f}", str(bar or "")]
            )
    for name, timing in regions.items():
        if timing.median > AUTOCAST_BAR_US:
            missed.append(f"autocast, {name}: {timing.median:.2f} µs > {AUTOCAST_BAR_US}")
        spread = f"{timing.low:.2f} - {timing.high:.2f}"
        rows.append(
            [f"autocast, {name}", f"{timing.median:.2f}", spread, "", f"{AUTOCAST_BAR_US} µs"]
        )
    shape = f"[{arguments.rows}, {arguments.features}] {arguments.dtype} on {arguments.device}"
    show(f"host time per call, {shape}", ["", "µs", "quartiles", "/ nn.Linear", "bar"], rows)
    figures: dict[str, object] = {
        "microseconds": {
            mode: {name: timing.as_dict() for name, timing in timings.items()}
            for mode, timings in (modes | {"autocast": regions}).items()
        },
        "ratios": ratios,
        "missed": missed,
    }
    write("linear_host", arguments, figures, failures)
    if arguments.device.type == "cuda" and missed:
        print("\n".join(missed))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
