"""How long ``import te_fast.pytorch`` takes where torch is imported already, each time in a new process.

    python benches/import_time.py [--rounds 30] [--out FILE]

The first process writes the byte code and is not counted. The bar is 60 ms.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from _harness import options, show, write

IMPORT = """
import time, torch
begin = time.perf_counter()
import te_fast.pytorch
print((time.perf_counter() - begin) * 1e3)
"""


def once() -> float:
    """Return milliseconds of one process."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure and print."""
    args = options(__doc__).parse_args()
    once()
    times = sorted(once() for _ in range(args.rounds))
    figures = {"median": statistics.median(times), "low": times[0], "high": times[-1]}
    rows = [(name, f"{value:.1f}") for name, value in figures.items()]
    show("import te_fast.pytorch beyond import torch", ("of the processes", "ms"), rows)
    write("import_time", args, {name: round(value, 2) for name, value in figures.items()})


if __name__ == "__main__":
    main()
