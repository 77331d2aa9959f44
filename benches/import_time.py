"""How long ``import te_fast.pytorch`` takes where torch is imported already, each time in a new process.

    python benches/import_time.py [--rounds 30] [--out FILE]

The first process writes the byte code and is not counted. The bar is 60 ms on an otherwise idle machine. Other
processes change the processor's time less than the clock's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from _harness import options, show, write

IMPORT = """
import time, torch
begin, used = time.perf_counter(), time.process_time()
import te_fast.pytorch
print((time.perf_counter() - begin) * 1e3, (time.process_time() - used) * 1e3)
"""


def once() -> list[float]:
    """Return the milliseconds of one process, by the clock and by the processor."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, env=environment
    )
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    """Measure and print."""
    args = options(__doc__).parse_args()
    once()
    times_of_each = zip(*(once() for _ in range(args.rounds)), strict=True)
    clocks = dict(zip(("clock", "processor"), map(sorted, times_of_each), strict=True))
    figures: dict[str, object] = {}
    rows = []
    for name, times in clocks.items():
        found = {"median": statistics.median(times), "low": times[0], "high": times[-1]}
        figures[name] = found
        rows.append((name, *(f"{value:.1f}" for value in found.values())))
    show("import te_fast.pytorch beyond import torch, ms", ("", "median", "low", "high"), rows)
    write("import_time", args, figures)


if __name__ == "__main__":
    main()
