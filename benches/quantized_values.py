"""FP8 values between layers, and FP8 rows in a MoE permutation, over 16-bit values.

    python benches/quantized_values.py [--device cuda] [--rows 256 --features 1024] [--tokens 4096 --hidden 7168]

Hand-over: two ``te_fast.pytorch.Linear`` in a row, the first of which returns a quantised tensor (``fp8_output``), over
the same two with a plain tensor between them; host time. Permutation: ``moe_permute`` of quantised rows, 32 experts,
8 for each token, over that of 16-bit rows; GPU time. The bars are the project's, for CUDA.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import te_fast.pytorch as te
from _harness import DTYPES, RECIPES, as_in_training, interleave, options, queued, show, write

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

BAR_HANDOVER, BAR_PERMUTATION = 1.1, 0.6
EXPERTS, CHOSEN, QUEUED = 32, 8, 20


class Pair:
    """Two linear layers in a row, and what is between them: a plain tensor, or an FP8 tensor."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        dtype, device, size = DTYPES[arguments.dtype], arguments.device, arguments.features
        options: dict[str, Any] = {"bias": False, "params_dtype": dtype, "device": device}
        self.first, self.second = (te.Linear(size, size, **options) for _ in range(2))
        self.x = torch.randn(arguments.rows, size, dtype=dtype, device=device, requires_grad=True)
        self.gradient = torch.randn_like(self.x)

    def forward(self, *, in_fp8: bool) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(self.x, fp8_output=in_fp8))
        return y

    def both(self, *, in_fp8: bool) -> None:
        self.forward(in_fp8=in_fp8).backward(self.gradient)


def measure_handover(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the host's microseconds by recipe and mode: ``plain``, ``FP8``."""
    found = {}
    for name, kind in RECIPES.items():
        pair, region = Pair(arguments), partial(te.autocast, recipe=kind())
        modes = {"no_grad": pair.forward, "forward + backward": pair.both}
        for mode, body in modes.items():
            bodies = {way: partial(body, in_fp8=way == "FP8") for way in ("plain", "FP8")}
            regions = dict.fromkeys(bodies, region)
            given = {"rounds": arguments.rounds, "calls": arguments.calls, "regions": regions}
            with torch.set_grad_enabled(mode != "no_grad"):
                times = interleave(bodies, arguments.device, **given)
            found[f"{name}, {mode}"] = {way: time.median for way, time in times.items()}
    return found


def quantizer(name: str, device: torch.device) -> Any:
    """Return a quantizer of rows as experts read them."""
    if name == "block":
        return te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1
        )
    if name == "current":
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device, columnwise=False)
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
    return te.Float8Quantizer(one, zero, te.DType.kFloat8E4M3, columnwise=False)


def measure_permutation(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the microseconds of a permutation of rows: the GPU's, and on the CPU the host's."""
    dtype, device, tokens = DTYPES[arguments.dtype], arguments.device, arguments.tokens
    x = torch.randn(tokens, arguments.hidden, dtype=dtype, device=device)
    chosen = torch.rand(tokens, EXPERTS, device=device).topk(CHOSEN, -1).indices
    mask = torch.zeros(tokens, EXPERTS, device=device).scatter_(1, chosen, 1.0).bool()
    rows = {"plain": x} | {name: quantizer(name, device)(x) for name in RECIPES}
    bodies: dict[str, Callable[[], object]] = {
        name: partial(te.moe_permute, given, mask, tokens * CHOSEN) for name, given in rows.items()
    }
    with torch.no_grad():
        if device.type == "cuda":
            return {name: queued(body, nullcontext, QUEUED) for name, body in bodies.items()}
        times = interleave(bodies, device, rounds=arguments.rounds, calls=arguments.calls)
    return {name: time.median for name, time in times.items()}


def main() -> int:
    """Measure, print, write; 1 when a bar is passed on CUDA."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    arguments = parser.parse_args()
    as_in_training()
    handover, permutation = measure_handover(arguments), measure_permutation(arguments)
    rows = [
        (f"hand-over, {name}", times["plain"], times["FP8"], BAR_HANDOVER)
        for name, times in handover.items()
    ]
    rows += [
        (f"permutation, {name}", permutation["plain"], permutation[name], BAR_PERMUTATION)
        for name in RECIPES
    ]
    ratios, missed = {}, []
    table = []
    for name, plain, quantised, bar in rows:
        ratio = ratios[name] = round(quantised / plain, 3)
        table.append([name, f"{plain:.2f}", f"{quantised:.2f}", f"{ratio:.2f}", str(bar)])
        if ratio > bar:
            missed.append(f"{name}: {ratio} > {bar}")
    show("FP8 values over 16-bit values", ["", "16 bits, µs", "FP8, µs", "ratio", "bar"], table)
    figures: dict[str, object] = {
        "handover": handover,
        "permutation": permutation,
        "ratios": ratios,
    }
    write("quantized_values", arguments, figures)
    if arguments.device.type == "cuda" and missed:
        print("\n".join(missed))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
