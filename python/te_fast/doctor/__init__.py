"""Find out why the steps of a script are slow, while the script runs unchanged.

From the shell::

    python -m te_fast.doctor --json report.json --svg report.svg train.py --epochs 1

runs ``train.py --epochs 1`` as ``python`` would. It then reports the host's and the GPU's time of each module, the
modules that wait for the GPU, the modules that cast, and te_fast's counterparts. The script computes the same numbers
as without the doctor.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from te_fast.doctor.report import Report, rows_of
from te_fast.doctor.swap import Sketch, swaps
from te_fast.doctor.trace import Owner
from te_fast.doctor.watch import Watch
from te_fast.profiling.arguments import count, count_or_none
from te_fast.profiling.regions import RECIPES
from te_fast.profiling.timing import environment

__all__ = ["Report", "main"]


def _written_later(text: str) -> Path:
    """Read the path of a file that is written when the script has ended, and may have changed the folder."""
    path = Path(text).absolute()
    if not path.parent.is_dir():
        message = f"there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(message)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m te_fast.doctor",
        description="Run a script unchanged, and say by module where the time of its steps goes.",
    )
    parser.add_argument(
        "--steps", type=count, default=3, help="steps on the clock, and as many under the profiler"
    )
    parser.add_argument("--skip", type=count_or_none, default=2, help="steps before, which warm up")
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="current",
        help="recipe of te_fast's modules in the comparison",
    )
    parser.add_argument(
        "--json", type=_written_later, metavar="PATH", help="write the report as JSON"
    )
    parser.add_argument("--svg", type=_written_later, metavar="PATH", help="write a bar chart")
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the script is a module's name"
    )
    # Of two arguments the first would take a `--` that is the script's.
    parser.add_argument(
        "script", nargs=argparse.PARSER, help="the script, and behind it its own arguments"
    )
    return parser


def _run(script: str, arguments: list[str], *, is_module: bool) -> int:
    """Run a script as ``python`` does; return its exit code."""
    sys.argv = [script, *arguments]
    try:
        if is_module:
            sys.path[0] = str(Path.cwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # Print frames from the script's own on, as `python` does.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _notes(watch: Watch) -> list[str]:
    notes = []
    if watch.profiler_is_taken:
        notes.append(
            "the script ran torch's profiler itself: choose other steps by --skip for figures of backward, the GPU, "
            "synchronisations and casts"
        )
    elif watch.clocked and not watch.profiled_steps:
        notes.append(
            f"the script ended after {len(watch.clocked)} steps, before the profiler began: lower --skip and --steps "
            "for figures of backward, the GPU, synchronisations and casts"
        )
    return notes


def _report(shown: str, watch: Watch, sketches: list[Sketch], recipe: str) -> Report:
    steps = watch.profiled_steps if watch.profiled is not None else 0
    rows = rows_of([step.forwards for step in watch.clocked], watch.profiled, steps)
    calls: dict[Owner, int] = {row.owner: round(row.calls) for row in rows}
    device = next((s.device for s in sketches), torch.device("cpu"))
    busy = watch.profiled.gpu_busy / steps if watch.profiled is not None and steps else 0.0
    notes = _notes(watch) + [sketch.why for sketch in sketches if sketch.why]
    return Report(
        script=shown,
        step_us=[step.microseconds for step in watch.clocked],
        profiled_steps=steps,
        gpu_busy_us=busy,
        rows=rows,
        swaps=swaps(sketches, watch.examples, calls, recipe),
        notes=notes,
        environment=environment(device),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m te_fast.doctor``.

    The report goes to stderr when the script has ended. With several ranks, only the first one reports.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command line; that of the process by default.

    Returns
    -------
    int
        The script's exit code.

    See Also
    --------
    te_fast.profile : One module, stage by stage.

    Examples
    --------
    >>> from te_fast.doctor import main
    >>> main(["--help"])  # doctest: +SKIP
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    script, *own = options.script
    if not options.is_module and not Path(script).exists():
        parser.error(f"there is no file {script!r}")
    sketches: list[Sketch] = []
    watch = Watch(
        options.skip,
        options.steps,
        lambda roots: sketches.extend(Sketch(root) for root in roots),
    )
    with watch.installed():
        code = _run(script, own, is_module=options.is_module)
    if watch.rank != 0:
        return code
    shown = " ".join([script, *own])
    try:
        report = _report(shown, watch, sketches, options.recipe)
        print(report, file=sys.stderr)
        if options.json:
            report.write_json(options.json)
        if options.svg:
            options.svg.write_text(report.svg(), encoding="utf-8")
    except OSError as error:
        print(f"te_fast.doctor: {error}", file=sys.stderr)
        return code or 2
    return code
