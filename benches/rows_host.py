"""Host time where addresses or row counts change from call to call, as ratios to ``torch.nn`` in BF16 of the same run.

    python benches/rows_host.py [--device cuda] [--length 24 --features 1024 --row-counts 56]

A chain of ``ops.Linear`` and one ``te.Linear`` run without gradients and under delayed scaling, in turn with
``torch.nn`` and, where it is installed, with Transformer Engine. They are called in three ways. Same addresses:
torch's allocator gives each output the memory of the previous output, so that te_fast replays the launches of a call
as one graph. Fresh addresses: outputs stay alive, so that no call is replayed. Row counts in turn: inputs of 64 rows,
of 72, and so on; te_fast sizes each row count once. Calls before the first burst do not count. On the CPU the host
backend computes within the call, so the figures there only show that the bench runs.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch

from _harness import DTYPES, Timing, interleave, options, show, write
from ops_overhead import PLAIN, linears, packages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

SAME, FRESH, TURNS = "same addresses", "fresh addresses", "row counts in turn"
# The most outputs that are kept alive. Then all are freed, and te_fast has long forgotten the addresses that return.
ALIVE = 400
# Launches of a burst by the plain chain. te_fast makes twice as many, which still do not fill the device's queue.
BURST = 192
# Calls per row count before the first burst: the third one of equal addresses is a replay.
WARM_UP = 3


def body_of(
    way: str, layer: torch.nn.Module, x: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> Callable[[], object]:
    """One call, in one of the ways."""
    if way == TURNS:
        turn = cycle(inputs)
        return lambda: layer(next(turn))
    if way == SAME:
        return lambda: layer(x)
    alive: list[torch.Tensor] = []

    def call_and_keep() -> None:
        if len(alive) >= ALIVE:
            alive.clear()
        alive.append(layer(x))

    return call_and_keep


def one_linear(size: int, common: dict[str, Any], package: Any) -> torch.nn.Module:
    """Build the layer of a package."""
    options = {"device": common["device"], "params_dtype": common["dtype"]}
    result: torch.nn.Module = package.Linear(size, size, bias=False, **options)
    return result


def measure(arguments: argparse.Namespace, length: int, way: str) -> dict[str, Timing]:
    """Microseconds per call of a chain, or of ``te.Linear`` for length 0, by package, in turn."""
    torch.manual_seed(0)
    device, size = arguments.device, arguments.features
    common = {"device": device, "dtype": DTYPES[arguments.dtype]}
    x = torch.randn(arguments.rows, size, **common)
    counts = range(64, 64 + 8 * arguments.row_counts, 8)
    inputs = [torch.randn(rows, size, **common) for rows in counts]
    if length:
        plain, build = linears(length, size, False, common)  # noqa: FBT003
    else:
        plain = partial(torch.nn.Linear, size, size, bias=False, **common)
        build = partial(one_linear, size, common)
    bodies, regions = {PLAIN: body_of(way, plain(), x, inputs)}, {}
    for name, (package, recipe) in packages(device).items():
        bodies[name] = body_of(way, build(package), x, inputs)
        regions[name] = partial(package.autocast, enabled=True, recipe=recipe)
    with torch.no_grad():
        for name, body in bodies.items():
            with regions.get(name, nullcontext)():
                for _ in range(WARM_UP * arguments.row_counts):
                    body()
        calls = max(1, min(arguments.calls, BURST // max(length, 1)))
        return interleave(bodies, device, rounds=arguments.rounds, calls=calls, regions=regions)


def main() -> None:
    """Measure, print, write."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--features", type=int, help="1024; 64 on the CPU")
    parser.add_argument("--length", type=int, help="linear ops of the chain (24; 3 on the CPU)")
    parser.add_argument("--row-counts", type=int, help="56; 4 on the CPU")
    arguments = parser.parse_args()
    on_cpu = arguments.device.type == "cpu"
    arguments.features = arguments.features or (64 if on_cpu else 1024)
    arguments.length = arguments.length or (3 if on_cpu else 24)
    arguments.row_counts = arguments.row_counts or (4 if on_cpu else 56)
    subjects = {
        f"{arguments.length} x ops.Linear({arguments.features})": arguments.length,
        f"te.Linear({arguments.features})": 0,
    }
    rows, figures = [], {}
    for subject, length in subjects.items():
        for way in (SAME, FRESH, TURNS):
            timings = measure(arguments, length, way)
            reference = timings[PLAIN].median
            figures[f"{subject}, {way}"] = {
                name: timing.as_dict() | {"ratio": round(timing.median / reference, 3)}
                for name, timing in timings.items()
            }
            for name, timing in timings.items():
                spread = f"{timing.low:.1f} - {timing.high:.1f}"
                ratio = f"{timing.median / reference:.2f}"
                rows.append([f"{subject}, {way}, {name}", f"{timing.median:.2f}", spread, ratio])
    title = f"host time per call, no_grad, [{arguments.rows}, {arguments.features}] on {arguments.device}"
    show(title, ["", "µs", "quartiles", "/ torch.nn"], rows)
    write("rows_host", arguments, dict(figures))


if __name__ == "__main__":
    main()
