"""GPU time of a large Linear per recipe, and the bytes it keeps for backward.

    python benches/linear_gpu.py [--size 8192]

Times come from CUDA events around a burst of calls that the host stays ahead of. The weight is cached; calls run under
``no_grad`` and with backward, in turn with nn.Linear in BF16. Bytes are those that stay allocated
after a forward whose input nothing else keeps, over M * K, with a trainable and with a frozen weight.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import te_fast.pytorch as te
from _harness import RECIPES, as_in_training, options, show, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

BAR_FORWARD = 0.60
BAR_BYTES = 1.02


def event_us(body: Callable[[], object], calls: int) -> float:
    """GPU microseconds per call."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        body()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / calls


def times(size: int, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Median GPU microseconds by mode and layer, the layers in turn."""
    x = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    leaf, gradient = x.clone().requires_grad_(), torch.randn_like(x)
    plain = torch.nn.Linear(size, size, bias=False, dtype=x.dtype, device="cuda")
    layers: dict[str, tuple[Callable[[], AbstractContextManager[Any]], torch.nn.Module]] = {
        "nn.Linear": (nullcontext, plain)
    }
    for name, recipe_class in RECIPES.items():
        recipe = recipe_class()
        layers[name] = (
            partial(te.autocast, recipe=recipe),
            te.Linear(size, size, bias=False, params_dtype=x.dtype),
        )
    result: dict[str, dict[str, float]] = {}
    for mode in ("forward", "forward + backward"):
        samples: dict[str, list[float]] = {name: [] for name in layers}
        for number in range(rounds + 2):
            for name, (region, layer) in layers.items():

                def both(layer: torch.nn.Module = layer) -> None:
                    layer(leaf).backward(gradient)
                    leaf.grad = None
                    layer.zero_grad(set_to_none=True)

                def forward(layer: torch.nn.Module = layer) -> object:
                    return layer(x)

                with torch.set_grad_enabled(mode != "forward"), region():
                    value = event_us(forward if mode == "forward" else both, calls)
                if number >= 2:
                    samples[name].append(value)
        result[mode] = {name: statistics.median(values) for name, values in samples.items()}
    return result


def kept_bytes(size: int, recipe: Any, *, frozen: bool) -> int:
    """Bytes that a forward leaves allocated beside its output."""
    layer = te.Linear(size, size, bias=False, params_dtype=torch.bfloat16)
    layer.weight.requires_grad_(not frozen)
    with te.autocast(recipe=recipe):
        for _ in range(2):  # the second forward starts with the weight cached and the plan built
            x = torch.randn(size, size, dtype=torch.bfloat16, device="cuda", requires_grad=True) * 1
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated() - x.nbytes
            out = layer(x)
            del x
            kept = int(torch.cuda.memory_allocated() - before - out.nbytes)
            out.sum().backward()
            del out
    return kept


def main() -> int:
    """Measure, print, write; 1 when a bar is passed."""
    parser = options(__doc__)
    parser.add_argument("--size", type=int, default=8192)
    parser.set_defaults(calls=10)
    arguments = parser.parse_args()
    if arguments.device.type != "cuda":
        parser.error("this bench measures a GPU")
    size = arguments.size
    as_in_training()
    measured = times(size, arguments.rounds, arguments.calls)
    rows, figures, missed = [], {}, []
    for mode, values in measured.items():
        for name, value in values.items():
            ratio = value / values["nn.Linear"]
            rows.append([f"{mode}, {name}", f"{value:.1f} µs", f"{ratio:.3f}"])
            figures[f"{mode}, {name}"] = {"us": round(value, 2), "ratio": round(ratio, 4)}
    forward = figures["forward, delayed"]["ratio"]
    if forward > BAR_FORWARD:
        missed.append(f"forward, delayed: {forward} > {BAR_FORWARD}")
    for name, recipe_class in RECIPES.items():
        for frozen in (False, True):
            kept = kept_bytes(size, recipe_class(), frozen=frozen) / size**2
            what = f"kept, {name}, {'frozen' if frozen else 'trainable'} weight"
            rows.append([what, f"{kept:.4f} M*K", ""])
            figures[what] = {"bytes_over_mk": round(kept, 5)}
            if kept > (0.0 if frozen else BAR_BYTES):
                missed.append(f"{what}: {kept:.4f}")
    show(f"GPU, {size}^3, BF16", ["", "measured", "/ nn.Linear"], rows)
    write("linear_gpu", arguments, {"rows": figures, "missed": missed})
    print("\n".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
