"""Common parts of the Python benches: options, recipes, tables, and results with their provenance.

A result file holds the command, the machine, the versions, the date and the commit beside the figures.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.profiling.timing import Timing, environment, interleave, quiet, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from te_fast.common.recipe import Recipe

__all__ = [
    "DTYPES",
    "RECIPES",
    "RESULTS",
    "Peer",
    "Timing",
    "as_in_training",
    "attempt",
    "commit",
    "forget",
    "interleave",
    "options",
    "peer",
    "queued",
    "quiet",
    "reason",
    "show",
    "tried",
    "write",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "results"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
RECIPES: dict[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "block": Float8BlockScaling,
    "current": Float8CurrentScaling,
}

Result = TypeVar("Result")


class Peer(NamedTuple):
    """Transformer Engine: its layers, and its recipes."""

    pytorch: Any
    recipe: Any


def peer() -> Peer | None:
    """Return Transformer Engine where it is installed; te_fast under its name (te_fast_alias) does not count."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    if getattr(importlib.import_module("transformer_engine"), "__te_fast__", False):
        return None
    pytorch = importlib.import_module("transformer_engine.pytorch")
    return Peer(pytorch, importlib.import_module("transformer_engine.common.recipe"))


def forget() -> None:
    """Let Transformer Engine drop its data of freed modules.

    At every region's end and in every backward, Transformer Engine updates the scales of all modules of delayed scaling
    that it has ever seen. Without this call, later cases would pay for earlier ones.
    """
    theirs = peer() if "transformer_engine.pytorch" in sys.modules else None
    if theirs is not None:
        theirs.pytorch.quantization.FP8GlobalStateManager.reset()


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def attempt(name: str, do: Callable[[], Result], failures: dict[str, str]) -> Result | None:
    """Run one case of many and print how long it took; a case that raises is noted in ``failures``.

    A library that refuses a case must not end the other cases, whose time on a GPU is paid for.
    """
    begin = time.perf_counter()
    try:
        result = do()
    except Exception as error:  # another library's case may raise any error
        failures[name] = reason(error)
        print(f"{name}: {failures[name]}", flush=True)
        return None
    print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    return result


def tried(
    make: Callable[[], Callable[[], object]],
    device: torch.device,
    region: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[], object]:
    """Make a body that is to be timed and run it once, so that a case that raises does so before timing begins."""
    body = make()
    with region():
        body()
    wait(device)
    return body


def options(description: str | None) -> argparse.ArgumentParser:
    """Options that every bench has; a bench adds its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(default))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=30, help="bursts per measurement")
    parser.add_argument("--calls", type=int, default=20, help="calls per burst")
    parser.add_argument("--out", type=Path, help="result file (default: benches/results/)")
    return parser


def as_in_training() -> None:
    """Let an optimizer make a step, so that te_fast does not take a missing gradient for a changed weight."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()


def queued(
    body: Callable[[], object],
    region: Callable[[], AbstractContextManager[Any]],
    calls: int,
    rounds: int = 9,
) -> float:
    """Return the median microseconds of a call on the GPU, of calls that are queued behind a pause.

    The driver queues 1,024 launches. With more, the host would wait for the end of the pause, and the GPU then for the
    host.
    """
    times = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(1e8))
        first.record()
        with region():
            for _ in range(calls):
                body()
        last.record()
        torch.cuda.synchronize()
        times.append(float(first.elapsed_time(last)) * 1e3 / calls)
    return statistics.median(times)


def commit() -> str:
    """Commit of the checkout, with ``+`` when the tree differs from it; empty outside of git, and without git."""
    if shutil.which("git") is None:
        return ""
    run = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*run, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    dirty = subprocess.run(
        [*run, "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


def write(
    name: str,
    arguments: argparse.Namespace,
    figures: dict[str, object],
    failures: dict[str, str] | None = None,
) -> Path:
    """Write the figures of a bench and the cases that raised, with the facts to quote beside them."""
    kind = "host"
    if arguments.device.type == "cuda":
        kind = torch.cuda.get_device_name(arguments.device).replace(" ", "-").lower()
    path: Path = arguments.out or RESULTS / f"{name}-{kind}.json"
    stamp = environment(arguments.device) | {"commit": commit()}
    if "command" in arguments:  # of the process that has started this one
        stamp["command"] = arguments.command
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"bench": name, "environment": stamp, "figures": figures}
    if failures:
        data["failures"] = failures
    text = json.dumps(data, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    return path
