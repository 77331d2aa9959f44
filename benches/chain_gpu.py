"""GPU time of chains of Linear layers, where each GEMM waits for a cast and each cast for a GEMM.

    python benches/chain_gpu.py

The bench times the forward of a chain with cached weights under ``no_grad``: launch by launch, behind a pause that
lets the host get ahead, and as a replayed CUDA graph. The time between the kernels counts, so that the figures tell
how two builds launch. Beside it stands the host time per layer of the same calls.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch

import te_fast.pytorch as te
from _harness import RECIPES, options, show, write

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = ((256, 1024, 16), (2048, 4096, 8), (8192, 8192, 4))
# Clock cycles of the pause; about 3 ms.
PAUSE = 5_000_000


def microseconds(body: Callable[[], object], layers: int) -> tuple[float, float]:
    """GPU and host time per layer of one call, with the host ahead of the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE)
    begin.record()
    start = time.perf_counter()
    body()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / layers, host * 1e6 / layers


def measure(name: str, rows: int, features: int, count: int, rounds: int) -> dict[str, float]:
    """Medians over rounds, per layer."""
    torch.manual_seed(0)
    x = torch.randn(rows, features, dtype=torch.bfloat16, device="cuda")
    layers = [
        te.Linear(features, features, bias=False, params_dtype=torch.bfloat16) for _ in range(count)
    ]

    def forward(*, first: bool = False) -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer(y, is_first_microbatch=first)
        return y

    with torch.no_grad(), te.autocast(recipe=RECIPES[name](), _graph=True):
        forward(first=True)
        for _ in range(3):
            forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        bodies: dict[str, Callable[[], object]] = {"launches": forward, "graph": graph.replay}
        samples: dict[str, list[tuple[float, float]]] = {way: [] for way in bodies}
        for _ in range(rounds):
            for way, body in bodies.items():
                samples[way].append(microseconds(body, count))
    found = {}
    for way, pairs in samples.items():
        found[way] = statistics.median(gpu for gpu, _ in pairs)
        found[f"host, {way}"] = statistics.median(host for _, host in pairs)
    return found


def main() -> int:
    """Measure, print a table and write the result file."""
    arguments = options(__doc__).parse_args()
    figures: dict[str, object] = {}
    rows = []
    for size, features, count in SIZES:
        for name in RECIPES:
            found = measure(name, size, features, count, arguments.rounds)
            figures[f"[{size}, {features}] x {count}, {name}"] = found
            ways = ("launches", "graph", "host, launches")
            rows.append((f"[{size}, {features}], {name}", *(f"{found[way]:.2f}" for way in ways)))
    title = "µs per layer of a chain, cached weights, no_grad"
    show(title, ("chain", "GPU, launches", "GPU, graph", "host, launches"), rows)
    write("chain_gpu", arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
