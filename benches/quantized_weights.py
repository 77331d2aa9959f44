"""Host time, GPU time and memory of chains of te_fast.pytorch.Linear with FP8 weights, beside those with BF16 weights.

    python benches/quantized_weights.py [--device cuda] [--rows 256 --features 1024] [--layers 1 8]

Rows of the table: no_grad, against torch.nn.Linear; forward + backward + cast of all master weights, against BF16
weights and a copy of the masters into them; a step of torch's fused Adam on the weights themselves. The bars are the
project's; they hold for CUDA, where the host only launches.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

import te_fast.pytorch as te
from _harness import (
    DTYPES,
    RECIPES,
    Timing,
    as_in_training,
    interleave,
    options,
    queued,
    show,
    write,
)
from te_fast.pytorch.tensor.utils import quantize_master_weights

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

# Ratios that must not be exceeded: on the host, to nn.Linear and to the same layers with BF16 weights; and on the GPU.
BARS = {"no_grad": 0.60, "forward + backward + cast": 1.0, "forward + backward + Adam": 1.5}
GPU_BARS = {"forward + backward + cast": 1.0, "forward + backward + Adam": 1.1}
MEMORY_BAR = 0.55
#: Calls of one layer that are queued at once.
QUEUED = 40


def bodies_of(
    layers: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """One call per mode; ``no_grad`` is entered by the caller."""
    leaf = x.clone().requires_grad_()
    weights = list(layers.parameters())
    masters = [weight.detach().float().view(-1) for weight in weights]
    adam = torch.optim.Adam(weights, lr=1e-3, fused=True)
    is_quantised = isinstance(weights[0], te.QuantizedTensor)
    starts = [0] * len(weights)

    def forward_and_backward() -> None:
        layers(leaf).backward(gradient)
        leaf.grad = None

    def cast() -> None:
        forward_and_backward()
        for weight in weights:
            weight.grad = None
        if is_quantised:
            quantize_master_weights(weights, masters, starts, None)
        else:
            with torch.no_grad():
                torch._foreach_copy_([weight.view(-1) for weight in weights], masters)

    def step() -> None:
        forward_and_backward()
        adam.step()
        for weight in weights:
            weight.grad = None

    names = list(BARS)
    return {names[0]: lambda: layers(x), names[1]: cast, names[2]: step}


def bytes_of(layers: torch.nn.Module) -> int:
    """Bytes of weights."""
    total = 0
    for weight in layers.parameters():
        parts: list[torch.Tensor | None] = [weight]
        if isinstance(weight, te.QuantizedTensor):
            parts = list(weight.get_data_tensors())  # type: ignore[attr-defined]
        total += sum(part.nbytes for part in parts if part is not None)
    return total


class Measured(NamedTuple):
    """Microseconds per call on the host and the GPU, by mode and layers; memory of FP8 weights over BF16's."""

    host: dict[str, dict[str, Timing]]
    gpu: dict[str, dict[str, float]]
    memory: dict[str, float]


def measure(arguments: argparse.Namespace, count: int) -> Measured:
    """Measure chains of the given numbers of layers."""
    torch.manual_seed(0)
    dtype, device, size = DTYPES[arguments.dtype], arguments.device, arguments.features
    x = torch.randn(arguments.rows, size, dtype=dtype, device=device)
    gradient = torch.randn_like(x)

    def chain(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        return make() if count == 1 else torch.nn.Sequential(*(make() for _ in range(count)))

    make = partial(te.Linear, size, size, bias=False, params_dtype=dtype, device=device)
    layers = {
        "nn.Linear": chain(
            partial(torch.nn.Linear, size, size, bias=False, dtype=dtype, device=device)
        )
    }
    regions, memory = {}, {}
    for name, kind in RECIPES.items():
        recipe = kind()
        layers[name] = chain(make)
        with te.quantized_model_init(recipe=recipe):
            layers[f"{name}, FP8 weight"] = chain(make)
            with torch.no_grad():
                memory[name] = bytes_of(chain(make)) / bytes_of(layers[name])
        for layer in (name, f"{name}, FP8 weight"):
            regions[layer] = partial(te.autocast, enabled=True, recipe=recipe)
    host, gpu = {}, {}
    for mode in BARS:
        bodies = {name: bodies_of(layer, x, gradient)[mode] for name, layer in layers.items()}
        with torch.set_grad_enabled(mode != "no_grad"):
            host[mode] = interleave(
                bodies, device, rounds=arguments.rounds, calls=arguments.calls, regions=regions
            )
            if device.type == "cuda" and mode in GPU_BARS:
                gpu[mode] = {
                    name: queued(body, regions.get(name, nullcontext), max(1, QUEUED // count))
                    for name, body in bodies.items()
                }
    return Measured(host, gpu, memory)


def report(measured: Measured) -> tuple[list[list[str]], dict[str, float], list[str]]:
    """Rows of a table, ratios, and bars that were passed."""
    rows, ratios, missed = [], {}, []

    def add(name: str, figures: list[str], ratio: float, bar: float | None) -> None:
        ratios[name] = round(ratio, 3)
        rows.append([name, *figures, f"{ratio:.2f}", "" if bar is None else str(bar)])
        if bar is not None and ratio > bar:
            missed.append(f"{name}: {ratio:.2f} > {bar}")

    for mode, timings in measured.host.items():
        for name, timing in timings.items():
            beside = "nn.Linear" if mode == "no_grad" else name.partition(",")[0]
            bar = BARS[mode] if name.endswith("FP8 weight") else None
            figures = [f"{timing.median:.2f}", f"{timing.low:.2f} - {timing.high:.2f}"]
            add(f"{mode}, {name}", figures, timing.median / timings[beside].median, bar)
    for mode, times in measured.gpu.items():
        for name, time in times.items():
            bar = GPU_BARS[mode] if name.endswith("FP8 weight") else None
            add(
                f"GPU, {mode}, {name}",
                [f"{time:.2f}", ""],
                time / times[name.partition(",")[0]],
                bar,
            )
    for name, ratio in measured.memory.items():
        add(f"memory, {name}", ["", ""], ratio, MEMORY_BAR)
    return rows, ratios, missed


def main() -> int:
    """Measure, print, write; 1 when a bar is passed on CUDA."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    as_in_training()
    figures: dict[str, object] = {}
    all_missed = []
    for count in arguments.layers:
        measured = measure(arguments, count)
        rows, ratios, missed = report(measured)
        layers = "1 layer" if count == 1 else f"{count} layers"
        shape = f"[{arguments.rows}, {arguments.features}] {arguments.dtype} on {arguments.device}"
        show(f"time per call of {layers}, {shape}", ["", "µs", "quartiles", "ratio", "bar"], rows)
        figures[layers] = {
            "host_microseconds": {
                mode: {name: timing.as_dict() for name, timing in timings.items()}
                for mode, timings in measured.host.items()
            },
            "gpu_microseconds": measured.gpu,
            "ratios": ratios,
            "memory": measured.memory,
            "missed": missed,
        }
        all_missed += [f"{layers}: {one}" for one in missed]
    write("quantized_weights", arguments, figures)
    if arguments.device.type == "cuda" and all_missed:
        print("\n".join(all_missed))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
