"""Training steps of a Hugging Face Llama: BF16 eager and compiled, te_fast.convert, Transformer Engine, torchao.

    python benches/hf_llama.py [--shapes 8x2048x1x2048 4x4096x2x4096] [--recipes current ...] [--steps 12] [--out FILE]

A shape is layers x hidden x batch x tokens. Without `transformers` a model of the same modules takes Llama's place; the
result says which model ran. Transformer Engine and torchao run where they can be imported.

"Step" is the median between two synchronisations, with fused AdamW; "host" is the host's time for forward and backward;
"peak" is the allocator's. Ratios are over BF16 eager of the same shape.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

from _harness import RECIPES, options, show, write
from _llama import VOCABULARY, llama, source
from _llama_ways import Way, ways

WARM_UP = 10


@dataclass
class Figures:
    """Milliseconds, GiB, and the last loss."""

    step: float
    host: float
    peak: float
    loss: float


def shape_of(text: str) -> tuple[int, int, int, int]:
    """Read layers, hidden size, batch and tokens."""
    layers, hidden, batch, tokens = (int(part) for part in text.split("x"))
    return layers, hidden, batch, tokens


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    way: Way, shape: tuple[int, int, int, int], steps: int, device: torch.device
) -> Figures:
    """Train a model for a few steps."""
    layers, hidden, batch, tokens = shape
    torch.compiler.reset()
    model: Any = llama(hidden, layers, tokens, device)
    way.change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if way.is_compiled else model
    ids = torch.randint(0, VOCABULARY, (batch, tokens), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    whole, host, loss = [], [], torch.zeros(())
    for number in range(WARM_UP + steps):
        wait(device)
        begin = time.perf_counter()
        with way.region():
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(device)
        if number >= WARM_UP:
            whole.append(time.perf_counter() - begin)
            host.append(middle - begin)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    step, both = (1e3 * statistics.median(taken) for taken in (whole, host))
    return Figures(step, both, peak, loss.item())


def main() -> None:
    """Measure and print a table for each shape."""
    parser = options(__doc__)
    parser.add_argument(
        "--shapes", type=shape_of, nargs="+", default=[(8, 2048, 1, 2048), (4, 4096, 2, 4096)]
    )
    parser.add_argument("--recipes", choices=RECIPES, nargs="+", default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[str, object] = {}
    columns = ("way", "step, ms", "over BF16", "host, ms", "peak, GiB", "over BF16", "loss")
    for shape in args.shapes:
        rows: list[tuple[str, ...]] = []
        first: Figures | None = None
        shown = "x".join(map(str, shape))
        for way in ways(args.recipes):
            found = measure(way, shape, args.steps, args.device)
            first = first or found
            results[f"{source()}, {shown}: {way.name}"] = asdict(found)
            memory = f"{found.peak / first.peak:.2f}" if first.peak else "-"
            step = (f"{found.step:.2f}", f"{found.step / first.step:.2f}")
            end = (f"{found.peak:.2f}", memory, f"{found.loss:.4f}")
            rows.append((way.name, *step, f"{found.host:.2f}", *end))
            gc.collect()
            torch.cuda.empty_cache()
        show(f"Llama ({source()}), layers x hidden x batch x tokens {shown}", columns, rows)
        write("hf_llama", args, results)


if __name__ == "__main__":
    main()
