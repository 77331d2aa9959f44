"""Host time of op chains, norms and LayerNormMLP, as ratios to ``torch.nn`` in BF16 of the same run.

    python benches/ops_overhead.py [--device cuda] [--plot ops_overhead.png] [--only host,lengths,gpu]

Host: a chain of 24 Linear(1024) in ``ops.Sequential``, LayerNorm -> Linear(4096) -> GELU -> Linear, LayerNormMLP and
the norm modules. They run under delayed scaling with cached weights, in turn with their ``torch.nn`` equivalents and,
where it is installed, with Transformer Engine's. Lengths: the host time of chains of 1 to 32 linear layers, which
``--plot`` draws. GPU: a LayerNormMLP step of 8192 rows, 4096 -> 16384, and the launches of its forward. The bars hold
for CUDA. On the CPU the host backend computes within the call, so the figures there only show that the bench runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import te_fast.pytorch as te
from _harness import (
    DTYPES,
    Timing,
    as_in_training,
    attempt,
    forget,
    interleave,
    options,
    peer,
    quiet,
    show,
    tried,
    write,
)
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    Build = Callable[[Any], torch.nn.Module]

PLAIN, OURS, THEIRS = "torch.nn BF16", "te_fast", "TE"
LENGTHS = (1, 2, 4, 8, 16, 24, 32)
GPU_BAR_MS = 4.95
LAUNCHES_BAR = 4


@dataclass(frozen=True)
class Case:
    """A measure: how to build it from ``torch.nn`` and from ``te_fast.pytorch`` or its rival, and the bar."""

    name: str
    plain: Callable[[], torch.nn.Module]
    fused: Build
    backward: bool
    bar: float
    #: Calls per burst, few enough that their launches do not fill the queue of the device.
    calls: int = 20


def packages(device: torch.device) -> dict[str, Any]:
    """te_fast and, where it is installed, Transformer Engine, with the recipe of each."""
    found: dict[str, Any] = {OURS: (te, DelayedScaling())}
    theirs = peer() if device.type == "cuda" else None
    if theirs is not None:
        found[THEIRS] = (theirs.pytorch, theirs.recipe.DelayedScaling())
    return found


def linears(count: int, size: int, bias: bool, common: dict[str, Any]) -> tuple[Any, Build]:  # noqa: FBT001
    """``torch.nn`` and fused chains of equal linear layers."""

    def plain() -> torch.nn.Module:
        layers = [torch.nn.Linear(size, size, bias=bias, **common) for _ in range(count)]
        return torch.nn.Sequential(*layers)

    def fused(package: Any) -> torch.nn.Module:
        ops = package.ops
        layers = [ops.Linear(size, size, bias=bias, **common) for _ in range(count)]
        result: torch.nn.Module = ops.Sequential(*layers)
        return result

    return plain, fused


def plain_mlp(hidden: int, ffn: int, common: dict[str, Any]) -> torch.nn.Module:
    """LayerNorm, Linear, GELU, Linear of ``torch.nn``."""
    return torch.nn.Sequential(
        torch.nn.LayerNorm(hidden, **common),
        torch.nn.Linear(hidden, ffn, **common),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Linear(ffn, hidden, **common),
    )


def chain_of_ops(hidden: int, ffn: int, common: dict[str, Any], package: Any) -> torch.nn.Module:
    """Build the same chain in ``ops.Sequential``."""
    ops = package.ops
    result: torch.nn.Module = ops.Sequential(
        ops.LayerNorm(hidden, **common),
        ops.Linear(hidden, ffn, **common),
        ops.GELU(),
        ops.Linear(ffn, hidden, **common),
    )
    return result


def module_mlp(hidden: int, ffn: int, common: dict[str, Any], package: Any) -> torch.nn.Module:
    """Build the same chain as a LayerNormMLP."""
    options = {"device": common["device"], "params_dtype": common["dtype"]}
    result: torch.nn.Module = package.LayerNormMLP(hidden, ffn, **options)
    return result


def norm_module(name: str, size: int, common: dict[str, Any], package: Any) -> torch.nn.Module:
    """Build a norm module of a package."""
    result: torch.nn.Module = getattr(package, name)(size, **common)
    return result


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Every host measure of the page."""
    size = arguments.features
    common = {"device": arguments.device, "dtype": DTYPES[arguments.dtype]}
    plain, fused = linears(24, size, arguments.bias, common)
    block, square = (partial(plain_mlp, size, ffn, common) for ffn in (4 * size, size))
    chain = partial(chain_of_ops, size, 4 * size, common)
    mlp = partial(module_mlp, size, size, common)
    norm = partial(torch.nn.LayerNorm, size, **common)
    return [
        Case(f"24 x Linear({size}), no_grad", plain, fused, backward=False, bar=0.80, calls=4),
        Case(f"24 x Linear({size}), forward + backward", plain, fused, True, 0.50, calls=2),  # noqa: FBT003
        Case(
            f"LayerNorm, Linear({4 * size}), GELU, Linear, forward + backward",
            block,
            chain,
            backward=True,
            bar=0.6,
            calls=10,
        ),
        Case(
            f"LayerNormMLP({size}, {size}), forward + backward",
            square,
            mlp,
            backward=True,
            bar=0.6,
            calls=10,
        ),
        *(
            Case(f"{name}, no_grad", norm, partial(norm_module, name, size, common), False, 0.9)  # noqa: FBT003
            for name in ("LayerNorm", "RMSNorm")
        ),
    ]


def body_of(
    layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor | None
) -> Callable[[], object]:
    """One call: a forward, or a whole step whose gradients are set, not added."""
    if gradient is None:
        return lambda: layer(x)
    leaf = x.detach().clone().requires_grad_()
    parameters = [leaf, *layer.parameters()]

    def forward_and_backward() -> None:
        layer(leaf).backward(gradient)
        for parameter in parameters:
            parameter.grad = None

    return forward_and_backward


def measure(
    case: Case, arguments: argparse.Namespace, x: torch.Tensor, failures: dict[str, str]
) -> dict[str, Timing]:
    """Microseconds per call, by package, in turn; the error of a package that raises goes into ``failures``."""
    forget()
    torch.manual_seed(0)
    gradient = torch.randn_like(x) if case.backward else None
    bodies = {PLAIN: body_of(case.plain(), x, gradient)}
    regions = {}
    with torch.set_grad_enabled(case.backward):
        for name, (package, recipe) in packages(arguments.device).items():
            regions[name] = partial(package.autocast, enabled=True, recipe=recipe)

            def make(package: Any = package) -> Callable[[], object]:
                return body_of(case.fused(package), x, gradient)

            trial = partial(tried, make, arguments.device, regions[name])
            body = attempt(f"{case.name}, {name}", trial, failures)
            if body is not None:
                bodies[name] = body
        return interleave(
            bodies,
            arguments.device,
            rounds=arguments.rounds,
            calls=min(case.calls, arguments.calls),
            regions=regions,
        )


def lengths(
    arguments: argparse.Namespace, x: torch.Tensor, failures: dict[str, str]
) -> dict[str, dict[str, list[float]]]:
    """Host microseconds by mode and package, one per length of the chain."""
    common = {"device": arguments.device, "dtype": DTYPES[arguments.dtype]}
    result: dict[str, dict[str, list[float]]] = {}
    for backward, mode in ((False, "no_grad"), (True, "forward + backward")):
        result[mode] = {}
        for length in LENGTHS:
            plain, fused = linears(length, arguments.features, arguments.bias, common)
            calls = max(1, (48 if backward else 96) // length)
            name = f"{length} x Linear, {mode}"
            case = Case(name, plain, fused, backward, bar=0.0, calls=calls)
            for name, timing in measure(case, arguments, x, failures).items():
                result[mode].setdefault(name, []).append(round(timing.median, 2))
    return result


def plot(path: Path, found: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Host time against the length of the chain."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (mode, lines) in enumerate(found.items(), 1):
        axes = figure.add_subplot(1, len(found), number)
        for name, values in lines.items():
            axes.plot(LENGTHS, values, marker="o", label=name)
        axes.set(
            title=mode, xlabel="linear layers", ylabel="host time per call, µs", ylim=(0, None)
        )
        axes.legend()
    figure.savefig(path)
    print(path)


def step_ms(body: Callable[[], object], calls: int) -> float:
    """GPU milliseconds per call, the host ahead of it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        body()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / calls


def training_step(
    make: Callable[[], torch.nn.Module],
    region: Callable[[], AbstractContextManager[Any]],
    x: torch.Tensor,
    gradient: torch.Tensor,
) -> Callable[[], object]:
    """Return a step whose region is entered for its forward alone, as in training."""
    layer, leaf = make(), x.clone().requires_grad_()

    def step() -> None:
        with region():
            y = layer(leaf)
        y.backward(gradient)
        leaf.grad = None
        layer.zero_grad(set_to_none=True)

    return step


def gpu(arguments: argparse.Namespace, failures: dict[str, str]) -> dict[str, float]:
    """Median GPU milliseconds of a LayerNormMLP step, by package, in turn."""
    forget()
    rows, hidden, ffn = arguments.gpu_rows, arguments.gpu_hidden, arguments.gpu_ffn
    common = {"device": arguments.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, hidden, **common)
    gradient = torch.randn_like(x)
    plain = body_of(plain_mlp(hidden, ffn, common), x, gradient)
    bodies: dict[str, Callable[[], object]] = {PLAIN: plain}
    for name, (package, recipe) in packages(arguments.device).items():
        region = partial(package.autocast, enabled=True, recipe=recipe)
        mlp = partial(module_mlp, hidden, ffn, common, package)
        trial = partial(tried, partial(training_step, mlp, region, x, gradient), arguments.device)
        body = attempt(f"step of {rows} rows, {name}", trial, failures)
        if body is not None:
            bodies[name] = body
    samples: dict[str, list[float]] = {name: [] for name in bodies}
    with quiet():
        for number in range(arguments.rounds + 3):
            for name, each in bodies.items():
                value = step_ms(each, arguments.gpu_calls)
                if number >= 3:
                    samples[name].append(value)
    return {name: statistics.median(values) for name, values in samples.items()}


def forward_launches(arguments: argparse.Namespace) -> list[str]:
    """List the launches of a forward of LayerNormMLP under delayed scaling with cached weights."""
    common = {"device": arguments.device, "dtype": torch.bfloat16}
    layer = module_mlp(1024, 4096, common, te)
    x = torch.randn(256, 1024, requires_grad=True, **common)
    with te.autocast(recipe=DelayedScaling()):
        for _ in range(2):  # a weight is cached when it is used again
            layer(x)
        with dispatch.record() as launches:
            layer(x)
    return [launch.name for launch in launches]


def host_rows(
    arguments: argparse.Namespace, x: torch.Tensor, failures: dict[str, str]
) -> tuple[list[list[str]], Any, list[str]]:
    """Rows of the table, the figures behind them, and the bars that were passed."""
    rows, figures, missed = [], {}, []
    for case in cases(arguments):
        timings = measure(case, arguments, x, failures)
        reference = timings[PLAIN].median
        figures[case.name] = {
            name: timing.as_dict() | {"ratio": round(timing.median / reference, 3)}
            for name, timing in timings.items()
        }
        for name, timing in timings.items():
            ratio, is_ours = timing.median / reference, name == OURS
            if is_ours and ratio > case.bar:
                missed.append(f"{case.name}: {ratio:.2f} > {case.bar}")
            spread = f"{timing.low:.1f} - {timing.high:.1f}"
            bar = str(case.bar) if is_ours else ""
            rows.append(
                [f"{case.name}, {name}", f"{timing.median:.1f}", spread, f"{ratio:.2f}", bar]
            )
    return rows, figures, missed


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--bias", action="store_true", help="biases in the chains of linear layers")
    parser.add_argument("--plot", type=Path, help="draw host time against chain length")
    parser.add_argument("--replot", type=Path, help="draw --plot of this result file, and stop")
    parser.add_argument("--only", default="host,lengths,gpu", help="parts, separated by commas")
    parser.add_argument("--gpu-rows", type=int, default=8192)
    parser.add_argument("--gpu-hidden", type=int, default=4096)
    parser.add_argument("--gpu-ffn", type=int, default=16384)
    parser.add_argument("--gpu-calls", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.replot and not arguments.plot:
        parser.error("--replot needs --plot")
    return arguments


def main() -> int:
    """Measure, print, write; 1 when a bar is passed on CUDA."""
    arguments = parse()
    if arguments.replot:
        kept = json.loads(arguments.replot.read_text(encoding="utf-8"))["figures"]
        plot(arguments.plot, kept["lengths"]["us"])
        return 0
    parts, on_gpu = arguments.only.split(","), arguments.device.type == "cuda"
    shape = (arguments.rows, arguments.features)
    x = torch.randn(shape, dtype=DTYPES[arguments.dtype], device=arguments.device)
    as_in_training()
    figures: dict[str, object] = {}
    missed: list[str] = []
    failures: dict[str, str] = {}
    if "host" in parts:
        rows, figures["host_us"], missed = host_rows(arguments, x, failures)
        title = f"host time per call, {list(shape)} {arguments.dtype} on {arguments.device}"
        show(title, ["", "µs", "quartiles", "/ torch.nn", "bar"], rows)
    found = None
    if "lengths" in parts:
        found = lengths(arguments, x, failures)
        figures["lengths"] = {"linears": LENGTHS, "us": found}
    launches = forward_launches(arguments)
    figures["forward_launches"] = launches
    print(f"LayerNormMLP forward, delayed, cached weights: {len(launches)} launches: {launches}")
    if len(launches) > LAUNCHES_BAR:
        missed.append(f"launches of a forward: {len(launches)} > {LAUNCHES_BAR}")
    if "gpu" in parts and on_gpu:
        times = gpu(arguments, failures)
        figures["gpu_step_ms"] = {name: round(value, 4) for name, value in times.items()}
        reference = times[PLAIN]
        rows = [[name, f"{value:.3f}", f"{value / reference:.3f}"] for name, value in times.items()]
        show("GPU, LayerNormMLP step, delayed", ["", "ms", "/ torch.nn"], rows)
        if times.get(OURS, 0.0) > GPU_BAR_MS:
            missed.append(f"GPU step: {times[OURS]:.3f} ms > {GPU_BAR_MS}")
    missed += [f"{name}: {error}" for name, error in failures.items() if name.endswith(OURS)]
    write("ops_overhead", arguments, figures | {"missed": missed}, failures)
    if arguments.plot and found is not None:
        plot(arguments.plot, found)
    print("\n".join(missed))
    return int(on_gpu and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
