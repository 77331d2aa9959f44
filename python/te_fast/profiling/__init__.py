"""Where the host time of a forward goes, stage by stage, against ``torch.nn.Linear`` in the same run.

From the shell::

    python -m te_fast.profiling --rows 256 --recipe delayed --json report.json --plot report.png

From Python, inside the autocast region that is to be measured::

    with te.autocast(recipe=DelayedScaling()):
        print(te_fast.profile(layer, x))

Any module can be measured. The time of parts that are not te_fast's counts as the call from Python.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_fast.profiling.arguments import count
from te_fast.profiling.regions import RECIPES, region
from te_fast.profiling.timing import Timing, environment, interleave, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Report", "main", "profile"]

NO_GRAD, GRAD = "no_grad", "with grad"
CALL = "call from Python"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Report:
    """Host time of one forward, in microseconds.

    See Also
    --------
    te_fast.profile : Makes one.

    Examples
    --------
    >>> import torch
    >>> import te_fast
    >>> import te_fast.pytorch as te
    >>> report = te_fast.profile(te.Linear(32, 32, device="cpu"), torch.ones(16, 32), rounds=2, calls=2)
    >>> sorted(report.ratios)
    ['no_grad', 'with grad']
    """

    #: Description of the measured call: layer, shape, device.
    subject: str
    #: Whole calls of the module and of the reference, without and with autograd.
    totals: dict[str, Timing]
    #: Parts of the ``no_grad`` forward, in the order in which they run. The clock that tells them
    #: apart runs meanwhile, so they add up to a little more than the total.
    stages: dict[str, float]
    #: Command, machine and versions.
    environment: dict[str, object] = field(repr=False)

    @property
    def ratios(self) -> dict[str, float]:
        """The module's time over the reference's, without and with autograd; empty without a reference."""
        return {
            mode: self.totals[f"module, {mode}"].median / self.totals[f"nn.Linear, {mode}"].median
            for mode in (NO_GRAD, GRAD)
            if f"nn.Linear, {mode}" in self.totals
        }

    def __str__(self) -> str:
        """Return the table."""
        lines = [f"host time per forward: {self.subject}", "", f"{'':30}      µs   quartiles"]
        for name, timing in self.totals.items():
            lines.append(f"{name:30}{timing.median:8.2f}   {timing.low:.2f} - {timing.high:.2f}")
        lines += [f"{'ratio, ' + mode:30}{ratio:8.2f}" for mode, ratio in self.ratios.items()]
        total = sum(self.stages.values()) or 1.0
        lines += ["", f"{'stage (' + NO_GRAD + ')':30}      µs   share"]
        for name, microseconds in self.stages.items():
            lines.append(f"{name:30}{microseconds:8.2f}   {microseconds / total:.0%}")
        if not any(value for name, value in self.stages.items() if name != CALL):
            lines += ["", f"no stage was marked: all of the call counts as '{CALL}'"]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data, as it is written to JSON."""
        return {
            "subject": self.subject,
            "environment": self.environment,
            "totals_us": {name: timing.as_dict() for name, timing in self.totals.items()},
            "ratios": {name: round(ratio, 3) for name, ratio in self.ratios.items()},
            "stages_us": {name: round(value, 3) for name, value in self.stages.items()},
        }

    def write_json(self, path: str | Path) -> None:
        """Write :meth:`as_dict` to a file."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Write a bar chart: the reference beside the stages of the module.

        The end of the file's name is the format: ``.png``, ``.svg`` or another of matplotlib's.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            message = "the bar chart needs matplotlib: pip install matplotlib"
            raise ImportError(message) from error
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        reference = self.totals.get(f"nn.Linear, {NO_GRAD}")
        if reference is not None:
            axes.barh("nn.Linear", reference.median, color="0.6")
        left = 0.0
        for name, microseconds in self.stages.items():
            width = max(microseconds, 0.0)
            axes.barh("te_fast", width, left=left, label=f"{name}: {microseconds:.2f}")
            left += width
        axes.set_xlabel("host time per forward, µs")
        axes.set_title(self.subject, fontsize=10)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:
            from te_fast.errors import ArgumentError

            message = f"plot: {path}: {error}"
            raise ArgumentError(message) from error


def _reference(module: torch.nn.Module, x: Any, out: Any) -> torch.nn.Linear | None:
    """Build an ``nn.Linear`` from the same rows to as many columns; None if the module does not map rows to rows."""
    if not (isinstance(x, torch.Tensor) and isinstance(out, torch.Tensor)):
        return None
    if not x.is_floating_point() or x.dim() == 0 or x.shape[:-1] != out.shape[:-1]:
        return None
    bias = getattr(module, "bias", None)
    has_bias = isinstance(bias, torch.nn.Parameter)
    return torch.nn.Linear(x.shape[-1], out.shape[-1], has_bias, device=x.device, dtype=x.dtype)


def _device_of(module: torch.nn.Module, inputs: tuple[Any, ...]) -> torch.device:
    """Return the device of the first tensor among inputs and parameters."""
    given = (value for value in inputs if isinstance(value, torch.Tensor))
    tensor = next(itertools.chain(given, module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _subject(module: torch.nn.Module, x: Any, out: Any, device: torch.device) -> str:
    name = type(module).__name__
    if not isinstance(x, torch.Tensor):
        return f"{name}, {device}"
    shape = " x ".join(str(size) for size in x.shape)
    to = f" -> {out.shape[-1]}" if isinstance(out, torch.Tensor) and out.dim() else ""
    return f"{name}, [{shape}]{to}, {x.dtype}, {device}"


def _stages(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    device: torch.device,
    rounds: int,
    calls: int,
) -> dict[str, float]:
    """Return the median over bursts of each native stage, and of the rest of the call."""
    from te_fast import dispatch

    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        wait(device)
        begin = time.perf_counter_ns()
        stages = dispatch.stage_times(module, *inputs, calls=calls)
        whole = (time.perf_counter_ns() - begin) / (calls * 1e3)
        for name, microseconds in {CALL: whole - sum(stages.values()), **stages}.items():
            samples.setdefault(name, []).append(microseconds)
    return {name: statistics.median(values) for name, values in samples.items()}


def _check(module: Any, **counts: Any) -> None:
    from te_fast.errors import ArgumentError

    if not isinstance(module, torch.nn.Module):
        message = f"profile: module must be a torch.nn.Module, got {type(module).__name__}"
        raise ArgumentError(message)
    for name, number in counts.items():
        if not isinstance(number, int) or number < 1:
            message = f"profile: {name} must be an integer of 1 or more, got {number!r}"
            raise ArgumentError(message)


def profile(module: torch.nn.Module, *inputs: Any, rounds: int = 30, calls: int = 20) -> Report:
    """Measure where the host time of ``module(*inputs)`` goes.

    The measurement runs in the autocast state of the caller. On the CPU the host backend computes
    within the call, so its stages include the arithmetic. The calls are real ones: under delayed scaling
    their maxima enter the histories, and so the scales of later iterations. To keep these, profile a
    copy of the module.

    Parameters
    ----------
    module : torch.nn.Module
        A layer of te_fast, or any module. The stages add up all te_fast layers in it; other work counts as the call
        from Python.
    inputs
        Arguments of the call.
    rounds, calls : int
        Bursts per measurement, and calls per burst.

    Returns
    -------
    Report
        Totals and stages; if the module maps rows to rows, also the ratio to an ``nn.Linear`` of as many columns;
        ``print`` shows the table.

    Raises
    ------
    ArgumentError
        If `module` is no module, or `rounds` or `calls` is no integer of 1 or more.

    See Also
    --------
    te_fast.doctor : Where the time of a whole script goes.

    Examples
    --------
    >>> import torch, te_fast
    >>> import te_fast.pytorch as te
    >>> layer = te.Linear(64, 32, device="cpu")
    >>> with te.autocast():
    ...     report = te_fast.profile(layer, torch.ones(16, 64), rounds=3, calls=2)
    >>> report.subject
    'Linear, [16 x 64] -> 32, torch.float32, cpu'
    """
    _check(module, rounds=rounds, calls=calls)
    x = inputs[0] if inputs else None
    device = _device_of(module, inputs)
    with torch.no_grad():
        out = module(*inputs)
    reference = _reference(module, x, out)
    calls_of: dict[str, Callable[[], Any]] = {"module": lambda: module(*inputs)}
    if reference is not None:
        calls_of["nn.Linear"] = lambda: reference(x)
    # The burst runs inside no_grad, so that entering it is not measured.
    with torch.no_grad():
        bodies = {f"{name}, {NO_GRAD}": call for name, call in calls_of.items()}
        totals = interleave(bodies, device, rounds=rounds, calls=calls)
        stages = _stages(module, inputs, device, rounds, calls)
    bodies = {f"{name}, {GRAD}": call for name, call in calls_of.items()}
    totals |= interleave(bodies, device, rounds=rounds, calls=calls)
    return Report(_subject(module, x, out, device), totals, stages, environment(device))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m te_fast.profiling",
        description="Where the host time of a Linear forward goes, against nn.Linear.",
    )
    parser.add_argument("--rows", type=count, default=256)
    parser.add_argument("--in-features", type=count, default=1024)
    parser.add_argument("--out-features", type=count, default=1024)
    parser.add_argument("--bias", action="store_true", help="with a bias")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    parser.add_argument("--rounds", type=count, default=30, help="bursts per measurement")
    parser.add_argument("--calls", type=count, default=20, help="calls per burst")
    parser.add_argument("--json", metavar="PATH", help="write the report as JSON")
    parser.add_argument("--plot", metavar="PATH", help="write a bar chart, as .png or .svg")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile a ``te_fast.pytorch.Linear`` with the options of the command line.

    See Also
    --------
    te_fast.profile : The same in Python.

    Examples
    --------
    >>> from te_fast import profiling
    >>> profiling.main(["--device", "cpu", "--rows", "16", "--rounds", "2"])  # doctest: +SKIP
    """
    from te_fast.errors import TeFastError

    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        report = _profile_linear(options)
        if options.json:
            report.write_json(options.json)
        if options.plot:
            report.plot(options.plot)
    except (TeFastError, ImportError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    print(report)
    return 0


def _device(name: str | None) -> torch.device:
    from te_fast.errors import DeviceError

    try:
        return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        message = f"--device must be cuda, cuda:<number> or cpu, got {name!r}"
        raise DeviceError(message) from None


def _profile_linear(options: argparse.Namespace) -> Report:
    import te_fast.pytorch as te

    device = _device(options.device)
    dtype = DTYPES[options.dtype]
    layer = te.Linear(
        options.in_features,
        options.out_features,
        bias=options.bias,
        params_dtype=dtype,
        device=device,
    )
    x = torch.randn(options.rows, options.in_features, dtype=dtype, device=device)
    with region(options.recipe):
        return profile(layer, x, rounds=options.rounds, calls=options.calls)
