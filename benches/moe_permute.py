"""MoE permutation: GPU and host time per call, with the write ceiling and the bytes as references.

    python benches/moe_permute.py [--quick] [--plot moe_permute.png]

GPU time is the median between CUDA events around one call. A read before each call flushes the L2 cache, and a sleep on
the device keeps the host ahead. Host time is the median of bursts of calls under no_grad. A permutation is compared
with `zero_()` of its output in the same run, and with a copy that reads and writes as many bytes in all. Merging is
compared with its fewest bytes at the measured copy rate. Transformer Engine runs beside te_fast where it is installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import te_fast.pytorch as te
from _harness import ROOT, attempt, commit, peer, show
from te_fast.profiling.timing import environment

if TYPE_CHECKING:
    from collections.abc import Callable

# (tokens, hidden, experts, top_k, alignment); the first four have bars.
SIZES = [
    (4096, 7168, 32, 8, 16),
    (4096, 7168, 256, 8, 16),
    (8192, 4096, 8, 2, 128),
    (8192, 7168, 256, 8, 128),
    (4096, 1280, 8, 2, 16),
    (4096, 4096, 64, 6, 16),
    (4096, 9216, 512, 8, 16),
]
FLUSH_BYTES = 1 << 28


class Clock:
    """GPU and host time of a call."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.flush = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def gpu_us(self, body: Callable[[], object]) -> float:
        """Median microseconds between events around a call."""
        samples = []
        for _ in range(self.rounds + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)  # the host gets ahead
            self.flush.amax()
            begin.record()
            body()
            end.record()
            samples.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in samples[3:])

    def host_us(self, body: Callable[[], object], calls: int = 20) -> float:
        """Median microseconds of host time per call, over bursts."""
        samples = []
        for _ in range(self.rounds):
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(calls):
                body()
            samples.append((time.perf_counter_ns() - begin) / calls / 1e3)
        torch.cuda.synchronize()
        return statistics.median(samples)


def copy_rate() -> float:
    """Bytes per microsecond of a large device copy, read and written."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    clock = Clock(10)
    return 2 * source.numel() / clock.gpu_us(lambda: target.copy_(source))


def separate(
    x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, counts: list[int], align: int
) -> torch.Tensor:
    """Permute, then pad, as the reference of a fused call."""
    out, _, _ = te.moe_permute_with_probs(x, probs, mask, sum(counts))
    padded, _ = te.Fp8Padding(len(counts), align)(out, counts)
    return padded


def plain_torch(
    x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Permute in torch operations, as Megatron-LM's unfused path does."""
    tokens = torch.arange(x.size(0), device=x.device).expand(mask.size(1), -1)
    sorted_tokens = tokens.masked_select(mask.t())
    return x.index_select(0, sorted_tokens), probs.t().masked_select(mask.t())


def of_peer(
    x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, counts: torch.Tensor, align: int
) -> dict[str, Callable[[], object]]:
    """Return the same calls of Transformer Engine, where it is installed, over maps of its own."""
    found = peer()
    if found is None:
        return {}
    their, routed = found.pytorch, int(counts.sum())
    rows, _, row_id_map = their.moe_permute_with_probs(x, probs, mask, routed)
    return {
        "TE permute": lambda: their.moe_permute_with_probs(x, probs, mask, routed),
        "TE permute+pad": lambda: their.moe_permute_and_pad_with_probs(
            x, probs, mask, counts, align
        ),
        "TE unpermute": lambda: their.moe_unpermute(rows, row_id_map, None, x.shape),
    }


def measure(clock: Clock, size: tuple[int, int, int, int, int], rate: float) -> dict[str, float]:
    """All figures of one size, in microseconds."""
    tokens, hidden, experts, top_k, align = size
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()
    probs = torch.rand(tokens, experts, device="cuda", generator=generator)
    mask = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    mask.scatter_(1, probs.topk(top_k, 1).indices, value=True)
    counts = mask.sum(0)
    listed = counts.tolist()
    routed = sum(listed)
    padded_rows = sum(-(-count // align) * align for count in listed)
    # As in training: a permutation that autograd records leaves the ends of the experts' rows with its map.
    recorded, _, row_id_map, offsets, _ = te.moe_permute_and_pad_with_probs(
        x.clone().requires_grad_(), probs, mask, listed, align, num_out_tokens=padded_rows
    )
    out = recorded.detach()
    moved = torch.empty(hidden * (tokens + padded_rows), dtype=torch.uint8, device="cuda")
    as_many = torch.empty_like(moved)
    small, _, small_map = te.moe_permute_with_probs(x, probs, mask, routed)
    dx = torch.randn_like(x)

    def merge_backward() -> Callable[[], object]:
        y, weights = out.detach().requires_grad_(), probs.clone().requires_grad_()
        merged = te.moe_unpermute(y, row_id_map, weights, x.shape, pad_offsets=offsets)
        return lambda: torch.autograd.grad(merged, [y, weights], dx, retain_graph=True)

    def permute_backward() -> Callable[[], object]:
        leaf, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
        rows, permuted, *_ = te.moe_permute_and_pad_with_probs(
            leaf, weights, mask, listed, align, num_out_tokens=padded_rows
        )
        grads = [torch.randn_like(rows), torch.randn_like(permuted)]
        return lambda: torch.autograd.grad(
            [rows, permuted], [leaf, weights], grads, retain_graph=True
        )

    from te_fast.runtime import native

    scale = torch.ones(1, device="cuda")
    no_index = (False,)
    padding, order = te.Fp8Padding(experts, align), torch.randperm(experts, device="cuda")
    bodies: dict[str, Callable[[], object]] = {
        "zero permuted": small.clone().zero_,
        "zero padded": out.clone().zero_,
        "copy as permute+pad": lambda: as_many.copy_(moved),
        "map": lambda: native.moe_map(mask, align, *no_index),
        "permute": lambda: te.moe_permute_with_probs(x, probs, mask, routed),
        "permute+pad": lambda: te.moe_permute_and_pad_with_probs(
            x, probs, mask, listed, align, num_out_tokens=padded_rows
        ),
        "permute, then pad": lambda: separate(x, probs, mask, listed, align),
        "permute+pad+fp8 tensor": lambda: te.moe_permute_and_quantize(
            x, probs, mask, padded_rows, align_size=align, scale=scale
        ),
        "permute+pad+fp8 block": lambda: te.moe_permute_and_quantize(
            x, probs, mask, padded_rows, align_size=align
        ),
        "unpermute": lambda: te.moe_unpermute(small, small_map, None, x.shape),
        "unpermute probs": lambda: te.moe_unpermute(small, small_map, probs, x.shape),
        "unpermute pad": lambda: te.moe_unpermute(
            out, row_id_map, None, x.shape, pad_offsets=offsets
        ),
        "unpermute pad probs": lambda: te.moe_unpermute(
            out, row_id_map, probs, x.shape, pad_offsets=offsets
        ),
        "Fp8Padding": lambda: padding(small, listed),
        "Fp8Padding, splits on the GPU": lambda: padding(small, counts, num_out_tokens=padded_rows),
        "sort chunks": lambda: te.moe_sort_chunks_by_index(small, counts, order),
        "plain torch permute": lambda: plain_torch(x, probs, mask),
        "permute+pad backward": permute_backward(),
        "unpermute backward": merge_backward(),
    }
    with torch.no_grad():
        theirs = attempt(f"{size}, TE", partial(of_peer, x, probs, mask, counts, align), {})
    bodies |= theirs or {}
    figures: dict[str, float] = {}
    for name, body in bodies.items():
        if "backward" in name:
            figures[name] = clock.gpu_us(body)
            continue
        with torch.no_grad():
            figures[name] = clock.gpu_us(body)
            if not name.startswith(("zero", "copy")):
                figures[f"host {name}"] = clock.host_us(body)
    row = 2 * hidden
    figures["floor unpermute"] = row * (tokens + routed) / rate
    figures["floor unpermute backward"] = row * (tokens + routed + padded_rows) / rate
    return figures


def ratios(figures: dict[str, float]) -> dict[str, float]:
    """Divide the figures that have bars by their references."""
    ratio = {
        "permute / zero_": figures["permute"] / figures["zero permuted"],
        "permute+pad / zero_": figures["permute+pad"] / figures["zero padded"],
        "permute+pad / copy": figures["permute+pad"] / figures["copy as permute+pad"],
        "fp8 tensor / permute+pad": figures["permute+pad+fp8 tensor"] / figures["permute+pad"],
        "fp8 block / permute+pad": figures["permute+pad+fp8 block"] / figures["permute+pad"],
        "unpermute bwd / floor": figures["unpermute backward"]
        / figures["floor unpermute backward"],
    }
    for name in ("unpermute", "unpermute probs", "unpermute pad", "unpermute pad probs"):
        ratio[f"{name} / floor"] = figures[name] / figures["floor unpermute"]
    return ratio


def write_results(
    path: Path, results: dict[str, dict[str, float]], rate: float, command: str
) -> None:
    """JSON with all figures, and the ratios that have bars."""
    stamp = environment(torch.device("cuda")) | {"commit": commit(), "command": command}
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "bench": "moe_permute",
        "environment": stamp,
        "copy_bytes_per_us": rate,
        "figures": {size: {**values, **ratios(values)} for size, values in results.items()},
    }
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def plot(path: Path, results: dict[str, dict[str, float]]) -> None:
    """Bars of the padded permutation against its references."""
    from matplotlib import pyplot

    names = [
        "zero padded",
        "permute+pad",
        "permute, then pad",
        "permute+pad+fp8 block",
        "TE permute+pad",
    ]
    figure, axes = pyplot.subplots(figsize=(11, 5))
    shown = [name for name in names if name in next(iter(results.values()))]
    for index, name in enumerate(shown):
        places = [at + index / (len(shown) + 1) for at in range(len(results))]
        axes.bar(
            places, [values[name] for values in results.values()], 1 / (len(shown) + 1), label=name
        )
    axes.set_xticks(
        [at + 0.4 for at in range(len(results))], list(results), rotation=15, fontsize=7
    )
    axes.set_ylabel("GPU microseconds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure all sizes and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="the four sizes with bars")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benches" / "results" / "moe_permute-nvidia-h200.json"
    )
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rate = copy_rate()
    clock = Clock(arguments.rounds)
    results: dict[str, dict[str, float]] = {}
    for size in SIZES[: 4 if arguments.quick else None]:
        results[str(size)] = measure(clock, size, rate)
        torch.cuda.empty_cache()
    names = list(next(iter(results.values())))
    columns = ["us", *results]
    show(
        f"GPU time; copy rate {rate / 1e6:.2f} TB/s",
        columns,
        [[name, *(f"{v[name]:.1f}" for v in results.values())] for name in names],
    )
    checked = {size: ratios(values) for size, values in results.items()}
    show(
        "Ratios",
        columns,
        [
            [name, *(f"{v[name]:.3f}" for v in checked.values())]
            for name in next(iter(checked.values()))
        ],
    )
    write_results(arguments.out, results, rate, "python benches/moe_permute.py")
    if arguments.plot:
        plot(arguments.plot, results)


if __name__ == "__main__":
    main()
