"""Host time of training steps of a chain of linear layers, eager and compiled, with the kernels.

    python benches/graphs_train.py [--layers 24] [--features 512] [--rows 256] [--steps 100] [--out FILE]

Every step begins after a synchronisation. The clock runs during forward and backward, and stands still while the
optimizer steps, which changes the weights. The region is around the compiled function ("compiled") or inside of it
("compiled, region inside"). The ways take turns, step by step. `benches/graphs_host.py` has the same without kernels,
call behind call.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import torch

import te_fast.pytorch as te
from _harness import DTYPES, RECIPES, Timing, options, quiet, show, write
from te_fast.profiling.timing import wait

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def step(forward: Callable[[torch.Tensor], torch.Tensor], region: Any, x: torch.Tensor) -> float:
    """Run forward and backward; return the host's microseconds."""
    wait(x.device)
    begin = time.perf_counter_ns()
    with region():
        y = forward(x)
    y.backward(torch.ones_like(y))
    return (time.perf_counter_ns() - begin) / 1e3


def measured(arguments: argparse.Namespace, recipe: Any) -> dict[str, Timing]:
    """Return the time of a layer, by the way to run the chain."""
    kind = {"dtype": DTYPES[arguments.dtype], "device": arguments.device}
    size = arguments.features
    chain = torch.nn.Sequential(
        *(
            te.Linear(size, size, bias=False, params_dtype=kind["dtype"], device=kind["device"])
            for _ in range(arguments.layers)
        )
    )
    optimizer = torch.optim.SGD(chain.parameters(), lr=1e-3, foreach=True)
    region = partial(te.autocast, recipe=recipe)

    def alone(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = chain(x)
        return y

    def with_region(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return alone(x)

    ways: dict[str, tuple[Any, Any]] = {
        "eager": (chain, region),
        "compiled": (torch.compile(alone, fullgraph=True), region),
        "compiled, region inside": (torch.compile(with_region, fullgraph=True), nullcontext),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    warm = 20
    for number in range(warm + arguments.steps):
        for name, (forward, around) in ways.items():
            x = torch.randn(arguments.rows, size, requires_grad=True, **kind)
            passed = step(forward, around, x)
            wait(arguments.device)
            optimizer.step()
            optimizer.zero_grad()
            if number >= warm:
                times[name].append(passed / arguments.layers)
    quarters = {name: quantiles(passed, n=4) for name, passed in times.items()}
    return {name: Timing(middle, low, high) for name, (low, middle, high) in quarters.items()}


def main() -> None:
    """Measure and print the table."""
    parser = options(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--features", type=int, default=512, help="sides of a weight")
    parser.add_argument("--rows", type=int, default=256, help="rows of the input")
    parser.add_argument("--steps", type=int, default=100, help="steps of each way")
    arguments = parser.parse_args()
    results: dict[str, object] = {}
    rows = []
    for name, make in RECIPES.items():
        torch.compiler.reset()
        with quiet():
            times = measured(arguments, make())
        eager = times["eager"].median
        for way, timing in times.items():
            results[f"{name}, {way}"] = timing.as_dict() | {"over eager": timing.median / eager}
            rows.append((name, way, f"{timing.median:.1f}", f"{timing.median / eager:.2f}"))
    show(
        f"{arguments.layers} te.Linear, forward + backward of a training step",
        ("recipe", "way", "us a layer", "over eager"),
        rows,
    )
    write("graphs_train", arguments, results)


if __name__ == "__main__":
    main()
