"""Write benches/results/README.md, the tables of all result files; `make lint` checks that it is current.

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
FACTS = ("gpu", "processor", "python", "torch", "commit", "emulator")

Scalars = dict[str, float | str]


def rows_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Scalars]]:
    """Innermost dicts, with the keys that lead to them; lists and what is None are left out."""
    if not isinstance(value, dict):
        return
    scalars = {key: one for key, one in value.items() if isinstance(one, (int, float, str))}
    if scalars:
        yield path, scalars
    for key, one in value.items():
        yield from rows_of(one, (*path, key))


def text(value: float | str | None) -> str:
    """Show a figure with as many digits as it is good for."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(rows: dict[str, Scalars]) -> list[str]:
    """Rows and columns, whichever way is higher than wide."""
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
    script = (
        ast.get_docstring(ast.parse((BENCHES / f"{bench}.py").read_text(encoding="utf-8"))) or ""
    )
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


def main() -> int:
    """Write the page, or say that it is not what the results give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    sections = [line for path in sorted(RESULTS.glob("*.json")) for line in section(path)]
    page = HEAD + "\n" + "\n".join(sections).rstrip() + "\n"
    if not arguments.check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
        print("benches/results/README.md is not what the results give: python benches/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
