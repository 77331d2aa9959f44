"""The doctor's report: a table, plain data, a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from te_fast.doctor.swap import Swap
from te_fast.doctor.trace import Owner, Spent, Times

#: If the GPU works for less than this share of a step, the host limits the step.
HOST_BOUND = 0.8
ROWS = 24
_FORWARD, _BACKWARD, _GPU = "#3b6ea5", "#9db9d6", "#d98c3f"


@dataclass
class Row:
    """A step's share of modules of one name and class, without the modules in them; times in microseconds."""

    owner: Owner
    calls: float = 0.0
    #: Forward's host time by the clock; None if only the profiler has measured it.
    clocked: float | None = None
    forward: Times = field(default_factory=Times)
    backward: Times = field(default_factory=Times)

    @property
    def host(self) -> float:
        """Host time of both directions."""
        forward = self.forward.host if self.clocked is None else self.clocked
        return forward + self.backward.host

    def as_dict(self) -> dict[str, object]:
        """Return plain data."""
        times = {"forward": asdict(self.forward), "backward": asdict(self.backward)}
        own = {"name": self.owner.name, "class": self.owner.kind, "calls": self.calls}
        return own | {"forward_host_us": self.clocked} | times


@dataclass
class Report:
    """A report of a script.

    Attributes
    ----------
    script : str
        Name of the script.
    step_us : list of float
        The clocked steps.
    profiled_steps : int
        Steps under the profiler; without any there are no figures of the GPU, backward, synchronisations and casts.
    gpu_busy_us : float
        Time of a step in which the GPU works.
    rows : list of Row
        By module, the longest first.
    swaps : list of Swap
        te_fast's counterparts of the modules.
    notes : list of str
        Remarks on the figures.
    environment : dict
        Machine and versions.

    See Also
    --------
    te_fast.profile : One module, stage by stage.

    Examples
    --------
    >>> from te_fast.doctor import Report
    >>> report = Report("train.py", [2500.0], 0, 0.0, [], [], [], {"processor": "a CPU"})
    >>> print(report)
    te_fast.doctor: train.py, on a CPU
    a step takes 2.50 ms (median of 1)
    """

    script: str
    step_us: list[float]
    profiled_steps: int
    gpu_busy_us: float
    rows: list[Row]
    swaps: list[Swap]
    notes: list[str]
    environment: dict[str, object]

    def __str__(self) -> str:
        """Return the table."""
        return "\n".join([*self._head(), *self._table(), *self._swaps(), *self._notes()])

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data."""
        return {
            "script": self.script,
            "environment": self.environment,
            "step_us": self.step_us,
            "profiled_steps": self.profiled_steps,
            "gpu_busy_us": self.gpu_busy_us,
            "modules": [row.as_dict() for row in self.rows],
            "swaps": [swap.as_dict() for swap in self.swaps],
            "notes": self.notes,
        }

    def write_json(self, path: str | Path) -> None:
        """Write :meth:`as_dict` to a file."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def _head(self) -> Iterator[str]:
        device = self.environment.get("gpu") or self.environment.get("processor")
        yield f"te_fast.doctor: {self.script}, on {device}"
        if not self.step_us:
            yield "no module was called"
            return
        step = median(self.step_us)
        line = f"a step takes {step / 1e3:.2f} ms (median of {len(self.step_us)})"
        if self.gpu_busy_us:
            share = self.gpu_busy_us / step
            line += f"; the GPU works {self.gpu_busy_us / 1e3:.2f} ms of it ({share:.0%}): "
            line += "the host is late" if share < HOST_BOUND else "the GPU is busy"
        yield line

    def _table(self) -> Iterator[str]:
        if not self.rows:
            return
        yield ""
        width = max(len(str(row.owner)) for row in self.rows[:ROWS])
        columns = "   calls   fwd host    fwd GPU  bwd host*    bwd GPU  syncs  casts"
        yield f"{'a step, µs':{width}}{columns}"
        for row in self.rows[:ROWS]:
            host = row.forward.host if row.clocked is None else row.clocked
            mark = "*" if row.clocked is None and host else " "
            forward, backward = row.forward, row.backward
            yield (
                f"{row.owner!s:{width}}{row.calls:8.4g}{host:10.1f}{mark}{forward.gpu:11.1f}"
                f"{backward.host:10.1f} {backward.gpu:11.1f}"
                f"{forward.synchronisations + backward.synchronisations:7.4g}"
                f"{forward.casts + backward.casts:7.4g}"
            )
        if len(self.rows) > ROWS:
            rest = self.rows[ROWS:]
            yield f"and {len(rest)} more, {sum(row.host for row in rest):.1f} µs on the host"
        yield "* under torch's profiler, whose own time is in it"

    def _swaps(self) -> Iterator[str]:
        if self.swaps:
            yield ""
            yield "what te_fast has for this (forward + backward until the device is done):"
        gain = 0.0
        for swap in self.swaps:
            line = f"  {swap.owner}: {swap.what}"
            if swap.before is None or swap.after is None:
                yield f"{line}; {swap.why}"
                continue
            gain += (swap.before - swap.after) * swap.calls
            ratio = swap.after / swap.before
            yield f"{line}; {swap.before:.1f} -> {swap.after:.1f} µs ({ratio:.2f}), {swap.calls} a step"
        if gain:
            yield f"  all of it: {gain / 1e3:+.2f} ms less a step"

    def _notes(self) -> Iterator[str]:
        if self.notes:
            yield ""
        yield from self.notes

    def svg(self) -> str:
        """Return a bar chart: host time of forward and backward, and GPU time, by module.

        Returns
        -------
        str
            The picture.
        """
        rows = self.rows[:ROWS]
        longest = max([max(row.host, row.forward.gpu + row.backward.gpu) for row in rows] or [0.0])
        scale = 420.0 / (longest or 1.0)
        parts = []
        for index, row in enumerate(rows):
            top = 46 + 30 * index
            forward = row.forward.host if row.clocked is None else row.clocked
            parts.append(_text(300, top + 13, str(row.owner), "end"))
            parts.append(_bar(310, top, forward * scale, _FORWARD))
            parts.append(_bar(310 + forward * scale, top, row.backward.host * scale, _BACKWARD))
            gpu = (row.forward.gpu + row.backward.gpu) * scale
            parts.append(_bar(310, top + 11, gpu, _GPU))
            end = 316 + max(row.host * scale, gpu)
            parts.append(_text(end, top + 13, f"{row.host:.0f} µs", "start"))
        legend = [("forward, host", _FORWARD), ("backward, host", _BACKWARD), ("GPU", _GPU)]
        for place, (name, colour) in enumerate(legend):
            parts.append(_bar(310 + 130 * place, 24, 10.0, colour))
            parts.append(_text(325 + 130 * place, 33, name, "start"))
        height = 60 + 30 * len(rows)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="820" height="{height}" '
            'font-family="sans-serif" font-size="12">'
            '<rect width="100%" height="100%" fill="white"/>'
        )
        title = _text(10, 16, f"{self.script}: a step by module", "start")
        return "\n".join([head, title, *parts, "</svg>", ""])


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="10" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _share(times: Times, steps: int) -> Times:
    return Times(**{name: value / steps for name, value in asdict(times).items()})


def rows_of(clocked: list[dict[Owner, Any]], spent: Spent | None, steps: int) -> list[Row]:
    """Return each owner's share of a step.

    Parameters
    ----------
    clocked : list of dict
        Calls and host time of forwards by owner, of each step on the clock.
    spent : Spent, optional
        Times from the trace.
    steps : int
        Steps that are in it.

    Returns
    -------
    list of Row
        The longest on the host first.
    """
    rows: dict[Owner, Row] = {}
    for step in clocked:
        for owner, forward in step.items():
            row = rows.setdefault(owner, Row(owner, clocked=0.0))
            row.calls += forward.calls / len(clocked)
            row.clocked = (row.clocked or 0.0) + forward.microseconds / len(clocked)
    if spent is not None and steps:
        for owner, times in spent.forward.items():
            rows.setdefault(owner, Row(owner)).forward = _share(times, steps)
        for owner, times in spent.backward.items():
            rows.setdefault(owner, Row(owner)).backward = _share(times, steps)
    return sorted(rows.values(), key=lambda row: -row.host)
