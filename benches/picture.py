"""Draw docs/_static/host_time.svg, the picture of the README, from the results of benches/ops_overhead.py.

python benches/picture.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "benches" / "results" / "ops_overhead-nvidia-h200.json"
COLOURS = {"te_fast": "#3b6ea8", "torch.nn BF16": "#9aa5b1", "TE": "#b8862b"}
NAMES = {"TE": "Transformer Engine"}


def main() -> None:
    """Draw one group of bars for each case, one bar for each library of the run."""
    host = json.loads(SOURCE.read_text(encoding="utf-8"))["figures"]["host_us"]
    libraries = [name for name in COLOURS if all(name in row for row in host.values())]
    mpl.rcParams["svg.hashsalt"] = "te_fast"
    figure = Figure(
        figsize=(8, 0.22 * (len(libraries) + 1) * len(host) + 0.8), layout="constrained"
    )
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(host.values()):
        reference = row["torch.nn BF16"]["median"]
        for index, name in enumerate(libraries):
            at, ratio = place + index / (len(libraries) + 1), row[name]["median"] / reference
            label = NAMES.get(name, name) if place == 0 else None
            axes.barh(at, ratio, 1 / (len(libraries) + 1), color=COLOURS[name], label=label)
            axes.text(ratio, at, f" {ratio:.2f}", va="center", fontsize=8)
    middle = (len(libraries) - 1) / (len(libraries) + 1) / 2
    axes.set_yticks([place + middle for place in range(len(host))], list(host), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("host time of a call, torch.nn in BF16 = 1 (H200)")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "_static" / "host_time.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
