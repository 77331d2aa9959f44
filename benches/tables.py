"""Write benches/results/README.md, tables of all results, and the headline figures of README.md and CHANGELOG.md.

`make lint` checks that all three are current.

python benches/tables.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHES = Path(__file__).resolve().parent
RESULTS = BENCHES / "results"
PAGE = RESULTS / "README.md"
HEAD = """# Results

One file for each bench and machine, written by the bench; `python benches/tables.py` makes this page of them. A figure
is quoted with what stands above its table. Times are microseconds where a column does not say otherwise;
`low` and `high` are quartiles.
"""
#: Sources of the host time over torch.nn's, by kind of call: a bench, and the place of its figures.
LINEAR = {
    "`Linear`, inference, cached weight": ("linear_host", "no_grad"),
    "`Linear`, forward + backward": ("linear_host", "forward + backward"),
}
HEADLINES = {
    "README.md": LINEAR,
    "CHANGELOG.md": LINEAR
    | {
        name: ("ops_overhead", name)
        for name in (
            "24 x Linear(1024), no_grad",
            "24 x Linear(1024), forward + backward",
            "LayerNormMLP(1024, 1024), forward + backward",
            "LayerNorm, no_grad",
            "RMSNorm, no_grad",
        )
    },
}
BEGIN, END = "<!-- begin: python benches/tables.py -->\n", "<!-- end -->"
FACTS = ("gpu", "processor", "python", "torch", "commit", "emulator", "note")

Scalars = dict[str, float | str]


def rows_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Scalars]]:
    """Yield innermost dicts with the keys that lead to them, without lists and None."""
    if not isinstance(value, dict):
        return
    scalars = {key: one for key, one in value.items() if isinstance(one, (int, float, str))}
    if scalars:
        yield path, scalars
    for key, one in value.items():
        yield from rows_of(one, (*path, key))


def text(value: float | str | None) -> str:
    """Show a figure with its significant digits."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(rows: dict[str, Scalars]) -> list[str]:
    """Rows and columns, turned where the table would be wider than high."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    if len(columns) > max(len(rows), 6):
        turned = {
            name: {row: rows[row][name] for row in rows if name in rows[row]} for name in columns
        }
        rows, columns = turned, list(rows)
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for name, row in rows.items():
        lines.append(
            f"| {name} | " + " | ".join(text(row.get(column)) for column in columns) + " |"
        )
    return lines


def section(path: Path) -> list[str]:
    """Tables of one result file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    bench, stamp = data["bench"], data["environment"]
    # Results of ranks are named by their number, too.
    source = (BENCHES / f"{bench.partition('-')[0]}.py").read_text(encoding="utf-8")
    script = ast.get_docstring(ast.parse(source)) or ""
    facts = " · ".join(f"{name} {stamp[name]}" for name in FACTS if stamp.get(name))
    lines = [f"## {path.stem}", "", script.split("\n\n")[0].replace("\n", " "), ""]
    lines += [f"`{stamp['command']}` · {facts}", ""]
    groups: dict[str, dict[str, Scalars]] = {}
    for keys, scalars in rows_of(data["figures"]):
        # Three levels: the first one names a table.
        title = keys[0] if len(keys) > 1 else ""
        groups.setdefault(title, {})[", ".join(keys[1:] if title else keys)] = scalars
    for title, rows in groups.items():
        lines += [f"**{title}**", ""] if title else []
        lines += [*table(rows), ""]
    failures = data.get("failures", {})
    if failures:
        lines += ["Cases that raised:", ""]
        lines += [f"- {name}: `{error}`" for name, error in failures.items()] + [""]
    return lines


def ratios(bench: str, case: str) -> tuple[float, float]:
    """Host time of te_fast and of Transformer Engine over torch.nn's, under delayed scaling."""
    path = RESULTS / f"{bench}-nvidia-h200.json"
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    if bench == "linear_host":
        found = figures["ratios"]
        return found[f"{case}, delayed"], found[f"{case}, Transformer Engine, delayed"]
    found = figures["host_us"][case]
    return found["te_fast"]["ratio"], found["TE"]["ratio"]


def with_headlines(page: str, headlines: dict[str, tuple[str, str]]) -> str:
    """Return a page with today's figures between its two marks."""
    lines = ["| | te_fast | Transformer Engine |", "|---|---:|---:|"]
    for label, (bench, case) in headlines.items():
        own, other = ratios(bench, case)
        lines.append(f"| {label} | {own:.2f} | {other:.1f} |")
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def main() -> int:
    """Write the pages, or report pages that differ from the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    sections = [line for path in sorted(RESULTS.glob("*.json")) for line in section(path)]
    page = HEAD + "\n" + "\n".join(sections).rstrip() + "\n"
    pages = {PAGE: page}
    for name, headlines in HEADLINES.items():
        path = BENCHES.parent / name
        pages[path] = with_headlines(path.read_text(encoding="utf-8"), headlines)
    stale = [
        path
        for path, new in pages.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != new
    ]
    for path in stale:
        if arguments.check:
            print(f"{path} differs from the results: run python benches/tables.py")
        else:
            path.write_text(pages[path], encoding="utf-8")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
