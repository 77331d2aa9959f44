"""Draw docs/_static/fp8.svg: the values of both FP8 formats, and the error of rounding to them.

python docs/_ext/figures.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("svg")
from matplotlib import pyplot as plt


def positive_values(exponent_bits: int, mantissa_bits: int, top: float) -> np.ndarray:
    """Return all positive values of a format without infinity, up to its largest."""
    bias = 2 ** (exponent_bits - 1) - 1
    steps = 2**mantissa_bits
    subnormal = [step / steps * 2.0 ** (1 - bias) for step in range(1, steps)]
    normal = [
        (1 + step / steps) * 2.0 ** (exponent - bias)
        for exponent in range(1, 2**exponent_bits)
        for step in range(steps)
    ]
    return np.array([value for value in subnormal + normal if value <= top])


def main() -> None:
    """Draw."""
    mpl.rcParams["svg.hashsalt"] = "te_fast"
    figure, (lines, errors) = plt.subplots(2, 1, figsize=(8, 3.6), layout="constrained")
    formats = (("E4M3", 4, 3, 448.0, "#3b6ea8"), ("E5M2", 5, 2, 57344.0, "#b8862b"))
    for place, (name, exponent, mantissa, top, colour) in enumerate(formats):
        values = positive_values(exponent, mantissa, top)
        lines.eventplot(values, lineoffsets=place, linelengths=0.7, color=colour, linewidths=0.8)
        x = np.logspace(-8, 5, 2000)
        x = x[x <= top]
        grid = np.concatenate([[0.0], values])
        rounded = grid[np.abs(grid[None] - x[:, None]).argmin(1)]
        label = f"{name}, to {top:.0f}"
        errors.semilogx(x, np.abs(rounded - x) / x, color=colour, lw=0.8, label=label)
    lines.set_xscale("log")
    lines.set_yticks([0, 1], [name for name, *_ in formats])
    lines.set_title("positive values of either format", fontsize=10)
    lines.set_xlim(1e-5, 1e5)
    errors.set(xlim=(1e-5, 1e5), ylim=(0, 0.5), xlabel="value", ylabel="relative error")
    errors.legend(fontsize=8, frameon=False)
    path = Path(__file__).parent.parent / "_static" / "fp8.svg"
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
