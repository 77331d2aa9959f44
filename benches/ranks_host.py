"""Host time of layers that four ranks share, beside the same layer of one rank (us; on one process, without ranks).

    python benches/ranks_host.py [--device cpu] [--recipes current] [--rounds 400]

torch's fake process group takes the place of the other ranks: its collectives return at once and move nothing, so that
numbers mean nothing. Layers are small, so that the host's work is most of a call. Forward and backward of all layers
run in turn; the medians of calls are shown, and what a shared layer takes over the plain ``te.Linear``. On the CPU the
host backend computes within the calls.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import te_fast.pytorch as te
from _harness import DTYPES, RECIPES, as_in_training, options, show, write

if TYPE_CHECKING:
    import argparse

RANKS, SIZE, ROWS = 4, 128, 64
WARM_UP = 50


def layers(arguments: argparse.Namespace) -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    """Return layers and their inputs; a shared layer has this rank's part."""
    kind: dict[str, Any] = {"device": arguments.device, "dtype": DTYPES[arguments.dtype]}
    common: dict[str, Any] = {
        "bias": False,
        "device": kind["device"],
        "params_dtype": kind["dtype"],
    }
    ranks: dict[str, Any] = {"sequence_parallel": True, "tp_group": dist.group.WORLD}
    column = te.Linear(SIZE, RANKS * SIZE, parallel_mode="column", **common, **ranks)
    row = te.Linear(RANKS * SIZE, SIZE, parallel_mode="row", **common, **ranks)
    mlp = te.LayerNormMLP(SIZE, RANKS * SIZE, set_parallel_mode=True, **common, **ranks)
    share = torch.randn(ROWS // RANKS, SIZE, **kind)
    return {
        "plain": (te.Linear(SIZE, SIZE, **common), torch.randn(ROWS, SIZE, **kind)),
        "column": (column, share),
        "row": (row, torch.randn(ROWS, SIZE, **kind)),
        "LayerNormMLP": (mlp, share),
    }


def step(layer: torch.nn.Module, x: torch.Tensor, recipe: Any) -> tuple[float, float]:
    """Return the seconds of the host for a forward and a backward."""
    leaf = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    if x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    with nullcontext() if recipe is None else te.autocast(recipe=recipe):
        y = layer(leaf)
    middle = time.perf_counter()
    y.backward(torch.ones_like(y))
    return middle - begin, time.perf_counter() - middle


def measure(name: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return figures of all layers under a recipe."""
    recipe = RECIPES[name]() if name in RECIPES else None
    found: dict[str, list[tuple[float, float]]] = {}
    of_all = {what: partial(step, *made, recipe) for what, made in layers(arguments).items()}
    for number in range(WARM_UP + arguments.rounds):
        for what, run in of_all.items():
            taken = run()
            if number >= WARM_UP:
                found.setdefault(what, []).append(taken)
    figures = {}
    for what, samples in found.items():
        forward, backward = (1e6 * statistics.median(taken) for taken in zip(*samples, strict=True))
        figures[what] = {"forward": round(forward, 1), "backward": round(backward, 1)}
    plain = sum(figures["plain"].values())
    for of_layer in figures.values():
        of_layer["over plain"] = round(of_layer["forward"] + of_layer["backward"] - plain, 1)
    return figures


def main() -> None:
    """Measure the recipes that are asked for, and high precision."""
    parser = options(__doc__)
    parser.add_argument("--recipes", choices=RECIPES, nargs="*", default=list(RECIPES))
    parser.set_defaults(rounds=400)
    arguments = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    as_in_training()
    torch.set_num_threads(1)
    figures: dict[str, object] = {}
    for name in ("high precision", *arguments.recipes):
        of_recipe = measure(name, arguments)
        rows = [(what, *map(str, values.values())) for what, values in of_recipe.items()]
        show(name, ("layer", "forward, us", "backward, us", "over plain, us"), rows)
        figures |= {f"{name}: {what}": values for what, values in of_recipe.items()}
    write("ranks_host", arguments, figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
