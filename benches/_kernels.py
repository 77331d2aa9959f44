"""Common parts of kernel benches: GPU time over the byte floor at the copy rate of the same run.

Each figure is the median, over calls, of the durations that the profiler reports of all kernels of a call; before each
call a 1 GiB read fills L2 with clean lines of other data.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from _harness import RESULTS, commit
from te_fast.profiling.timing import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

REPEATS = 25
#: The shape that bars are for.
BARRED = (8192, 8192)
#: Prefixes of the timed kernels of te_fast, and of a copy; the read that fills L2 is torch's.
KERNELS = (
    "activation",
    "amax",
    "cast",
    "cross_entropy",
    "dequantize",
    "norm",
    "scale",
    "Memcpy DtoD",
)

Shape = tuple[int, ...]


class Case(NamedTuple):
    """A call, the fewest bytes that it can move, and its bar over them."""

    name: str
    call: Callable[[], object]
    size: float
    bar: float | None = None


class Timer:
    """Median kernel time of a call."""

    def __init__(self) -> None:
        self.flush = torch.ones(1 << 28, dtype=torch.int32, device="cuda")

    def kernel_us(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        """Microseconds of all kernels of a call together."""
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(repeats):
                self.flush.amax()
                call()
            torch.cuda.synchronize()
        times = [event.device_time for event in trace.events() if event.name.startswith(KERNELS)]
        per_call, rest = divmod(len(times), repeats)
        if per_call == 0 or rest != 0:
            message = f"{len(times)} kernels in {repeats} calls"
            raise RuntimeError(message)
        return statistics.median(
            sum(times[i : i + per_call]) for i in range(0, len(times), per_call)
        )


def copy_rate(timer: Timer) -> float:
    """Bytes read and written per µs by a 2 GiB device-to-device copy."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / timer.kernel_us(lambda: target.copy_(source), 8)


def measure(name: str, shapes: Iterable[Shape], cases: Callable[[Shape], Iterable[Case]]) -> None:
    """Print every case of every shape, and write them to the file that the command line names, or to results/."""
    timer = Timer()
    rate = copy_rate(timer)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape in shapes:
        rows = found["x".join(map(str, shape))] = {}
        for case in cases(shape):
            micros, floor = timer.kernel_us(case.call), case.size / rate
            row = {
                "us": round(micros, 2),
                "floor_us": round(floor, 2),
                "ratio": round(micros / floor, 3),
            }
            if case.bar is not None and shape == BARRED:
                row["bar"] = case.bar
            rows[case.name] = row
            print(shape, f"{case.name:44}", row, flush=True)
    stamp = environment(torch.device("cuda")) | {"commit": commit()}
    report = {
        "bench": name,
        "environment": stamp,
        "copy_tb_per_s": round(rate / 1e6, 4),
        "figures": found,
    }
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / f"{name}-{gpu}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
