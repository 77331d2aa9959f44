"""Losses of a Llama over 300 steps, in BF16, by te_fast's recipes and by Transformer Engine's; same seeds, same data.

    python benches/losses.py [--steps 300] [--layers 4] [--hidden 1024] [--plot losses.svg] [--out FILE]

The data are sequences that can be learnt: a walk over the vocabulary with steps from a fixed table. The learning rate
rises linearly over the first tenth of the steps. "Distance" is the mean absolute difference from BF16's losses over
the last half. Beside it stands the distance of BF16 with another seed of the data.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from _harness import RECIPES, attempt, forget, options, show, write
from _llama import llama, source
from _llama_ways import Way, ways

WORDS = 512


def batches(steps: int, batch: int, tokens: int, seed: int) -> torch.Tensor:
    """Return sequences ``(steps, batch, tokens)`` of words that follow from each other."""
    table = torch.randperm(WORDS, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (steps, batch), generator=generator)
    rows = []
    for _ in range(tokens):
        rows.append(words)
        strays = torch.randint(0, WORDS, words.shape, generator=generator)
        is_stray = torch.rand(words.shape, generator=generator) < 0.1
        words = torch.where(is_stray, strays, table[words])
    return torch.stack(rows, -1)


def train(
    way: Way, sizes: tuple[int, int], data: torch.Tensor, device: torch.device
) -> list[float]:
    """Train a model; return its losses."""
    hidden, layers = sizes
    forget()
    torch.compiler.reset()
    model: Any = llama(hidden, layers, data.shape[-1], device)
    way.change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    warm_up = max(len(data) // 10, 1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warm_up)
    losses = []
    for ids in data.to(device):
        with way.region():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the losses, and their differences to the first of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    first = next(iter(curves.values()))
    for name, losses in curves.items():
        above.plot(losses, label=name, linewidth=0.9)
        below.plot([a - b for a, b in zip(losses, first, strict=True)], linewidth=0.9)
    above.set_ylabel("loss")
    below.set_ylabel("difference to BF16")
    below.set_xlabel("step")
    above.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Train every way and print the distances."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--recipes", choices=RECIPES, nargs="+", default=list(RECIPES))
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    curves: dict[str, list[float]] = {}
    sizes = (args.hidden, args.layers)
    data = batches(args.steps, args.batch, args.tokens, seed=2)
    bf16, *others = [way for way in ways(args.recipes) if not way.is_compiled]
    curves[bf16.name] = train(bf16, sizes, data, args.device)
    other = batches(args.steps, args.batch, args.tokens, seed=3)
    curves["BF16, other data"] = train(bf16, sizes, other, args.device)
    failures: dict[str, str] = {}
    for way in others:
        losses = attempt(way.name, partial(train, way, sizes, data, args.device), failures)
        if losses is not None:
            curves[way.name] = losses
        gc.collect()
    half = args.steps // 2
    figures = {}
    for name, losses in curves.items():
        pairs = zip(losses[half:], curves[bf16.name][half:], strict=True)
        distance = statistics.fmean(abs(a - b) for a, b in pairs)
        found = {"first loss": losses[0], "last loss": losses[-1], "distance to BF16": distance}
        figures[name] = {column: round(value, 4) for column, value in found.items()}
    rows = [(name, *map(str, of_way.values())) for name, of_way in figures.items()]
    show(f"Llama ({source()})", ("way", *found), rows)
    if args.plot:
        plot(curves, args.plot)
    shortened = {name: [round(loss, 4) for loss in losses] for name, losses in curves.items()}
    write("losses", args, {"model": source(), **figures, "curves": shortened}, failures)


if __name__ == "__main__":
    main()
