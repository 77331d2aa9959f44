"""The benchmark of Transformer Engine PR #2146, with separate times of first and later microbatches.

    python benches/linear_cpu_overhead.py [--device cuda] [--microbatches 8]

Only forwards run, under ``no_grad`` with inputs that need no gradient. A round is one batch: a first
microbatch, which quantises the weight, and the others, which reuse the quantised weight. First and later microbatches
are timed separately. Warm-up rounds do not count. FLOP/s come from the time of one whole round, synchronised at both
ends. nn.Linear and te_fast always run, Transformer Engine where it is installed, round by round in turn.
"""

from __future__ import annotations

import importlib
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import te_fast.pytorch as te
from _harness import DTYPES, RECIPES, attempt, options, peer, quiet, show, tried, write

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from contextlib import AbstractContextManager


@dataclass
class Candidate:
    """A layer under test and its times, a list entry per round, in microseconds."""

    region: Callable[[], AbstractContextManager[Any]]
    #: Called with ``is_first_microbatch``.
    forward: Callable[..., object]
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def round(self, microbatches: int, synchronize: Callable[[], None]) -> None:
        """Run one batch and note its times."""
        with self.region():
            synchronize()
            begin = time.perf_counter_ns()
            self.forward(True)  # noqa: FBT003
            first = time.perf_counter_ns()
            for _ in range(microbatches - 1):
                self.forward(False)  # noqa: FBT003
            later = time.perf_counter_ns()
            synchronize()
            end = time.perf_counter_ns()
        self.first.append((first - begin) / 1e3)
        self.later.append((later - first) / 1e3 / (microbatches - 1))
        self.whole.append((end - begin) / 1e3)


def call(layer: torch.nn.Module, x: torch.Tensor, first: bool | None = None) -> object:  # noqa: FBT001
    """Run a layer on the first or a later microbatch, or without telling it which."""
    return layer(x, is_first_microbatch=first)


def candidates(
    arguments: argparse.Namespace, x: torch.Tensor, failures: dict[str, str]
) -> dict[str, Candidate]:
    """nn.Linear, te_fast per recipe, and Transformer Engine per recipe where it is installed and has it."""
    kwargs = {"bias": False, "params_dtype": x.dtype, "device": x.device}
    size = arguments.features
    plain = torch.nn.Linear(size, size, bias=False, dtype=x.dtype, device=x.device)
    result = {"nn.Linear": Candidate(nullcontext, lambda _: plain(x))}
    packages: dict[str, tuple[Any, Any]] = {
        "te_fast": (te, importlib.import_module("te_fast.common.recipe"))
    }
    theirs = peer() if x.is_cuda else None
    if theirs is not None:
        packages["TE"] = theirs
    for package, (pytorch, recipes) in packages.items():
        for name, recipe_class in RECIPES.items():
            recipe = getattr(recipes, recipe_class.__name__)()
            region = partial(pytorch.autocast, enabled=True, recipe=recipe)
            linear = partial(pytorch.Linear, size, size, **kwargs)

            def make(linear: Callable[[], torch.nn.Module] = linear) -> Callable[[], object]:
                return partial(call, linear(), x)

            trial = partial(tried, make, x.device, region)
            forward = attempt(f"{package} {name}", trial, failures)
            if forward is not None:
                result[f"{package} {name}"] = Candidate(region, forward)
    return result


def main() -> None:
    """Measure, print, write."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, help="rows of one microbatch (2048; 256 on the CPU)")
    parser.add_argument("--features", type=int, help="3072; 512 on the CPU")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=5, help="rounds that do not count")
    arguments = parser.parse_args()
    dtype, device = DTYPES[arguments.dtype], arguments.device
    arguments.rows = arguments.rows or (256 if device.type == "cpu" else 2048)
    arguments.features = arguments.features or (512 if device.type == "cpu" else 3072)
    x = torch.randn(arguments.rows, arguments.features, dtype=dtype, device=device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    failures: dict[str, str] = {}
    with torch.no_grad():
        competitors = candidates(arguments, x, failures)
    with torch.no_grad(), quiet():
        for number in range(arguments.warmup + arguments.rounds):
            for candidate in competitors.values():
                candidate.round(arguments.microbatches, synchronize)
            if number + 1 == arguments.warmup:
                for candidate in competitors.values():
                    candidate.first.clear()
                    candidate.later.clear()
                    candidate.whole.clear()
    floating_point_operations = 2 * arguments.microbatches * arguments.rows * arguments.features**2
    base = statistics.median(competitors["nn.Linear"].later)
    rows: list[list[str]] = []
    figures: dict[str, object] = {}
    for name, candidate in competitors.items():
        first, later, whole = (
            statistics.median(values)
            for values in (candidate.first, candidate.later, candidate.whole)
        )
        teraflops = floating_point_operations / whole / 1e6
        rows.append(
            [
                name,
                f"{first:.2f}",
                f"{later:.2f}",
                f"{later / base:.2f}",
                f"{whole:.1f}",
                f"{teraflops:.2f}",
            ]
        )
        figures[name] = {
            "first_microbatch_us": round(first, 3),
            "later_microbatch_us": round(later, 3),
            "later_over_nn_linear": round(later / base, 3),
            "round_us": round(whole, 3),
            "teraflops": round(teraflops, 3),
        }
    title = f"{arguments.microbatches} microbatches of [{arguments.rows}, {arguments.features}] on {device}"
    columns = ["", "first, host µs", "later, host µs", "/ nn.Linear", "round, µs", "TFLOP/s"]
    show(title, columns, rows)
    write("linear_cpu_overhead", arguments, figures, failures)


if __name__ == "__main__":
    main()
