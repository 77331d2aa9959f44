"""Host time per call, measured so that two bodies can be compared.

A burst of calls is timed after a synchronisation, and the clock stops before the next one. So the figure is the time
until the host is free again. The bodies take turns, so that a slow spell of the machine affects all of them. The figure
is the median over the rounds, and the quartiles are its spread.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    Region = Callable[[], AbstractContextManager[Any]]

__all__ = ["Timing", "environment", "interleave", "quiet", "wait"]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over the rounds, and the quartiles around it."""

    median: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return plain numbers, rounded to a nanosecond."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def wait(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _burst(body: Callable[[], object], calls: int, device: torch.device, region: Region) -> float:
    with region():
        wait(device)
        begin = time.perf_counter_ns()
        for _ in repeat(None, calls):
            body()
        return (time.perf_counter_ns() - begin) / (calls * 1e3)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector and torch's other threads out of the bursts.

    OpenMP threads wait by spinning: with two of them a burst on a busy machine measures its load.
    """
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def interleave(
    bodies: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 30,
    calls: int = 20,
    regions: Mapping[str, Region] | None = None,
) -> dict[str, Timing]:
    """Time every body in turn, ``rounds`` times a burst of ``calls`` calls.

    Each round begins with another body: a burst finds the caches as the one before it has left them.

    Parameters
    ----------
    bodies
        What to time, by name. Each is warmed up with two bursts that do not count.
    device
        Where the work goes; a CUDA device is synchronised between bursts. Meanwhile torch computes
        on one CPU thread.
    rounds, calls
        Bursts per body, and calls per burst. A burst must be short enough not to fill the launch
        queue of the device, or the host waits in it.
    regions
        What makes the context that a body runs in, by its name. Entering and leaving it is not timed.
    """
    region = {name: (regions or {}).get(name, nullcontext) for name in bodies}
    samples: dict[str, list[float]] = {name: [] for name in bodies}
    with quiet():
        for name, body in bodies.items():
            _burst(body, calls, device, region[name])
            _burst(body, calls, device, region[name])
        names = deque(bodies)
        for _ in range(rounds):
            for name in names:
                samples[name].append(_burst(bodies[name], calls, device, region[name]))
            gc.collect(0)
            names.rotate(-1)
    wait(device)
    return {name: _summary(values) for name, values in samples.items()}


def _summary(values: list[float]) -> Timing:
    if len(values) == 1:
        return Timing(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, object]:
    """Collect the command, machine, versions and date of a measurement."""
    import te_fast

    facts: dict[str, object] = {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "te_fast": te_fast.__version__,
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts
