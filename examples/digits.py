"""Train on scikit-learn's handwritten digits in FP8, beside the same network in FP32.

    python examples/digits.py [--recipe delayed|current|block] [--device cpu|cuda]

Both networks start from the same weights and see the same batches. The script writes the loss curves to
``demo_out/`` and prints the test accuracies and the host time per forward. On a CPU, where layers compute within
the call, it is the host time of the bookkeeping alone. The script fails if FP8 learns less: both accuracies must
reach 0.97 and differ by 0.01 at the most.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fast.profiling.timing import interleave

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

RECIPES = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
# FP8 matrix products want multiples of 16: 10 classes become 16 outputs, 6 of them never the label.
WIDTHS = (64, 256, 256, 16)
BATCH, EPOCHS, TEST_ROWS = 128, 60, 448
NEEDED, ALLOWED_GAP = 0.97, 0.01


@dataclass
class Run:
    """A network, the context its forward runs in, and its losses."""

    network: torch.nn.Sequential
    region: AbstractContextManager[Any]
    losses: list[float] = field(default_factory=list)

    def step(self, optimizer: torch.optim.Optimizer, x: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch."""
        optimizer.zero_grad()
        with self.region:
            out = self.network(x)
        loss = cross_entropy(out, labels)
        loss.backward()
        optimizer.step()
        self.losses.append(loss.item())

    def accuracy(self, x: torch.Tensor, labels: torch.Tensor) -> float:
        """Share of the rows whose largest output is the label."""
        with torch.no_grad(), self.region:
            return float((self.network(x).argmax(1) == labels).float().mean())


def networks(device: torch.device) -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """Build the FP32 network and its FP8 twin with the same weights."""
    plain, fast = torch.nn.Sequential(), torch.nn.Sequential()
    for inputs, outputs in pairwise(WIDTHS):
        plain += torch.nn.Sequential(
            torch.nn.Linear(inputs, outputs, device=device), torch.nn.ReLU()
        )
        fast += torch.nn.Sequential(te.Linear(inputs, outputs, device=device), torch.nn.ReLU())
    plain.pop(-1)
    fast.pop(-1)
    # A layer of te_fast takes the state of nn.Linear, which lacks only the state of the recipe.
    fast.load_state_dict(plain.state_dict(), strict=False)
    return plain, fast


def data(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the 1797 images as rows of 64 values around zero, shuffled, with their labels."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 8 - 1
    return x.to(device), torch.tensor(labels, dtype=torch.int64)[order].to(device)


def train(runs: dict[str, Run], x: torch.Tensor, labels: torch.Tensor) -> None:
    """Train every network on the same batches."""
    optimizers = {
        name: torch.optim.Adam(run.network.parameters(), lr=1e-3) for name, run in runs.items()
    }
    shuffle = torch.Generator().manual_seed(1)
    with Progress() as progress:
        task = progress.add_task("training", total=EPOCHS)
        for _ in range(EPOCHS):
            order = torch.randperm(len(labels), generator=shuffle)
            for batch in order.split(BATCH)[: len(labels) // BATCH]:
                for name, run in runs.items():
                    run.step(optimizers[name], x[batch], labels[batch])
            losses = "   ".join(f"{name} {run.losses[-1]:.4f}" for name, run in runs.items())
            progress.update(task, advance=1, description=losses)


def plot(runs: dict[str, Run], path: Path) -> None:
    """Write the loss curves."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, run in runs.items():
        axes.semilogy(run.losses, label=name, linewidth=1)
    axes.set(
        xlabel="step", ylabel="training loss", title="Handwritten digits, same start, same batches"
    )
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def host_times(runs: dict[str, Run], x: torch.Tensor) -> Table:
    """Time a forward of 256 to 256 in each network, or, on the CPU, its bookkeeping alone."""
    fast, plain = runs["FP8"].network[2], runs["FP32"].network[2]
    rows = x.new_zeros(BATCH, WIDTHS[1]).normal_()
    if x.device.type == "cpu":
        # Kernels are recorded instead of run, as the host would launch them to a GPU. torch cannot leave its
        # arithmetic out, so that its layer is made tiny.
        plain, row = torch.nn.Linear(16, 16), x.new_zeros(1, 16)
        title = "bookkeeping of a forward on this CPU, without the arithmetic"
        plain_name = "torch.nn.Linear FP32, [1, 16] to 16"
        recorded: AbstractContextManager[Any] = dispatch.record(execute=False)
    else:
        row, recorded = rows, nullcontext()
        title = f"host time per forward, [{BATCH}, {WIDTHS[1]}] on {x.device}"
        plain_name = "torch.nn.Linear FP32"
    bodies = {plain_name: lambda: plain(row), "te_fast.pytorch.Linear FP8": lambda: fast(rows)}
    table = Table(title=title, title_justify="left")
    for column in ("layer", "µs", "/ nn.Linear"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    with torch.no_grad(), runs["FP8"].region:
        fast(rows)  # quantises the weight; the timed forwards then find it cached
        with recorded:
            timings = interleave(bodies, x.device)
    for name, timing in timings.items():
        ratio = timing.median / timings[plain_name].median
        table.add_row(name, f"{timing.median:.1f}", f"{ratio:.2f}")
    return table


def main() -> int:
    """Train, compare, and say whether FP8 kept up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    parser.add_argument("--device", type=torch.device, help="default: cuda where FP8 runs there")
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    arguments = parser.parse_args()
    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.perf_counter()
    torch.manual_seed(0)
    plain, fast = networks(device)
    region = te.autocast(enabled=True, recipe=RECIPES[arguments.recipe]())
    runs = {"FP32": Run(plain, nullcontext()), "FP8": Run(fast, region)}
    x, labels = data(device)
    train(runs, x[TEST_ROWS:], labels[TEST_ROWS:])
    plot(runs, arguments.out / f"loss-{arguments.recipe}.png")
    console = Console(width=100)
    console.print(host_times(runs, x))
    accuracy = {name: run.accuracy(x[:TEST_ROWS], labels[:TEST_ROWS]) for name, run in runs.items()}
    for name, value in accuracy.items():
        console.print(f"test accuracy {name}: {value:.4f}")
    console.print(
        f"{arguments.out}/loss-{arguments.recipe}.png   {time.perf_counter() - begin:.0f} s"
    )
    if min(accuracy.values()) < NEEDED or abs(accuracy["FP8"] - accuracy["FP32"]) > ALLOWED_GAP:
        console.print(f"expected both to reach {NEEDED} and to differ by {ALLOWED_GAP} at the most")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
