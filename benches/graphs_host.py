"""Host time of a chain of linear layers, eager and compiled, with the bookkeeping alone: no kernel runs.

    python benches/graphs_host.py [--layers 24] [--dtype f32] [--out FILE]

A recorder stands in for the kernels, so that any machine measures the work of its host. Layers have 64 features and
weights of their own; the input has 16 rows. The two ways take turns, burst by burst.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import te_fast.pytorch as te
from _harness import DTYPES, RECIPES, Timing, as_in_training, interleave, options, show, write
from te_fast import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable

FEATURES, ROWS = 64, 16


def step(
    model: Callable[[torch.Tensor], torch.Tensor], region: Any, x: torch.Tensor, *, grads: bool
) -> None:
    """Run forward, and backward if gradients are needed."""
    with region(), nullcontext() if grads else torch.no_grad():
        y = model(x)
    if grads:
        y.backward(torch.ones_like(y))


def candidates(layers: int, recipe: str, kind: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Return the ways to run the chain, by name; all are warm."""
    chain = torch.nn.Sequential(
        *(
            te.Linear(
                FEATURES, FEATURES, bias=False, params_dtype=kind["dtype"], device=kind["device"]
            )
            for _ in range(layers)
        )
    )
    region = partial(te.autocast, recipe=RECIPES[recipe]())
    ways: dict[str, Callable[[], object]] = {}
    for name, model in (
        ("eager", chain),
        ("compiled", torch.compile(lambda x: chain(x), fullgraph=True)),
    ):
        for grads in (False, True):
            x = torch.randn(ROWS, FEATURES, requires_grad=grads, **kind)
            run = partial(step, model, region, x, grads=grads)
            for _ in range(3):
                run()
            ways[f"{name}, {'forward + backward' if grads else 'no_grad'}"] = run
    return ways


def main() -> None:
    """Measure and print the table."""
    parser = options(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    kind = {"dtype": DTYPES[args.dtype], "device": args.device}
    as_in_training()
    torch.set_num_threads(1)  # as during the timing: graphs are guarded by the number
    results: dict[str, object] = {}
    rows = []
    for recipe in RECIPES:
        torch.compiler.reset()
        ways = candidates(args.layers, recipe, kind)
        with dispatch.record(execute=False):
            times: dict[str, Timing] = interleave(
                ways, args.device, rounds=args.rounds, calls=args.calls
            )
        for name, timing in times.items():
            results[f"{recipe}, {name}"] = timing.as_dict() | {"layers": args.layers}
        for what in ("no_grad", "forward + backward"):
            eager, compiled = (
                times[f"{way}, {what}"].median / args.layers for way in ("eager", "compiled")
            )
            rows.append(
                (recipe, what, f"{eager:.1f}", f"{compiled:.1f}", f"{compiled / eager:.2f}")
            )
    columns = ("recipe", "call", "eager, us a layer", "compiled", "compiled / eager")
    show(f"{args.layers} te.Linear, bookkeeping alone", columns, rows)
    write("graphs_host", args, results)


if __name__ == "__main__":
    main()
