"""Host time and memory of te_fast.pytorch.Linear with FP8 weights, beside BF16 weights and torch.nn.Linear.

    python benches/quantized_weights.py [--device cuda] [--rows 256 --features 1024]

Rows: no_grad; forward + backward + cast of master weights, against BF16 weights and a copy of the masters into them;
a step of torch's fused Adam on the weights themselves. The bars are the project's; they hold for CUDA, where the host
only launches.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import torch

import te_fast.pytorch as te
from _harness import (
    DTYPES,
    RECIPES,
    Timing,
    as_in_training,
    interleave,
    options,
    show,
    write,
)
from te_fast.pytorch.tensor.utils import quantize_master_weights

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

# Ratio that must not be passed: to nn.Linear, to the same layer with BF16 weights.
BARS = {"no_grad": 0.60, "forward + backward + cast": 1.0, "forward + backward + Adam": 1.5}
MEMORY_BAR = 0.55


def bodies_of(
    layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """One call per mode; ``no_grad`` is entered by the caller."""
    leaf = x.clone().requires_grad_()
    (weight,) = layer.parameters()
    master = weight.detach().float()
    adam = torch.optim.Adam([weight], lr=1e-3, fused=True)

    def forward_and_backward() -> None:
        layer(leaf).backward(gradient)
        leaf.grad = None

    def cast() -> None:
        forward_and_backward()
        weight.grad = None
        if isinstance(weight, te.QuantizedTensor):
            quantize_master_weights([weight], [master.view(-1)], [0], None)
        else:
            with torch.no_grad():
                weight.copy_(master)

    def step() -> None:
        forward_and_backward()
        adam.step()
        weight.grad = None

    names = list(BARS)
    return {names[0]: lambda: layer(x), names[1]: cast, names[2]: step}


def bytes_of(layer: torch.nn.Module) -> int:
    """Bytes of a layer's weight."""
    (weight,) = layer.parameters()
    if not isinstance(weight, te.QuantizedTensor):
        return weight.nbytes
    parts: list[torch.Tensor | None] = list(weight.get_data_tensors())  # type: ignore[attr-defined]
    return sum(part.nbytes for part in parts if part is not None)


def measure(
    arguments: argparse.Namespace,
) -> tuple[dict[str, dict[str, Timing]], dict[str, float]]:
    """Microseconds per call, by mode and layer; memory of FP8 weights over BF16's."""
    torch.manual_seed(0)
    dtype, device, size = DTYPES[arguments.dtype], arguments.device, arguments.features
    x = torch.randn(arguments.rows, size, dtype=dtype, device=device)
    gradient = torch.randn_like(x)
    make = partial(te.Linear, size, size, bias=False, params_dtype=dtype, device=device)
    layers: dict[str, torch.nn.Module] = {
        "nn.Linear": torch.nn.Linear(size, size, bias=False, dtype=dtype, device=device)
    }
    regions, memory = {}, {}
    for name, kind in RECIPES.items():
        recipe = kind()
        layers[name] = make()
        with te.quantized_model_init(recipe=recipe):
            layers[f"{name}, FP8 weight"] = make()
            with torch.no_grad():
                memory[name] = bytes_of(make()) / bytes_of(layers[name])
        for layer in (name, f"{name}, FP8 weight"):
            regions[layer] = partial(te.autocast, enabled=True, recipe=recipe)
    result = {}
    for mode in BARS:
        bodies = {name: bodies_of(layer, x, gradient)[mode] for name, layer in layers.items()}
        with torch.set_grad_enabled(mode != "no_grad"):
            result[mode] = interleave(
                bodies, device, rounds=arguments.rounds, calls=arguments.calls, regions=regions
            )
    return result, memory


def main() -> int:
    """Measure, print, write; 1 when a bar is passed on CUDA."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--features", type=int, default=1024)
    arguments = parser.parse_args()
    as_in_training()
    modes, memory = measure(arguments)
    rows, ratios, missed = [], {}, []
    for mode, timings in modes.items():
        for name, timing in timings.items():
            is_mine = name.endswith("FP8 weight")
            beside = "nn.Linear" if mode == "no_grad" else name.partition(",")[0]
            ratio = timing.median / timings[beside].median
            ratios[f"{mode}, {name}"] = round(ratio, 3)
            if is_mine and ratio > BARS[mode]:
                missed.append(f"{mode}, {name}: {ratio:.2f} > {BARS[mode]}")
            spread = f"{timing.low:.2f} - {timing.high:.2f}"
            bar = str(BARS[mode]) if is_mine else ""
            rows.append([f"{mode}, {name}", f"{timing.median:.2f}", spread, f"{ratio:.2f}", bar])
    for name, ratio in memory.items():
        rows.append([f"memory, {name}", "", "", f"{ratio:.2f}", str(MEMORY_BAR)])
        if ratio > MEMORY_BAR:
            missed.append(f"memory, {name}: {ratio:.2f} > {MEMORY_BAR}")
    shape = f"[{arguments.rows}, {arguments.features}] {arguments.dtype} on {arguments.device}"
    show(f"host time per call, {shape}", ["", "µs", "quartiles", "ratio", "bar"], rows)
    figures: dict[str, object] = {
        "microseconds": {
            mode: {name: timing.as_dict() for name, timing in timings.items()}
            for mode, timings in modes.items()
        },
        "ratios": ratios,
        "memory": memory,
        "missed": missed,
    }
    write("quantized_weights", arguments, figures)
    if arguments.device.type == "cuda" and missed:
        print("\n".join(missed))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
