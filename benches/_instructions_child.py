"""The calls that benches/instructions.py counts, each between two marks; runs under the emulator."""

from __future__ import annotations

import ctypes
import gc
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import te_fast
import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

CALLS = 100
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}
EXPERTS = (8, 256)
MARK = 0x7E4A
GETPPID = {"x86_64": 110, "aarch64": 173}[platform.machine()]


def native_range() -> tuple[int, int]:
    """Addresses of te_fast's native module."""
    lines = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "_native" in line and "te_fast" in line
    ]
    return min(int(low, 16) for low, _ in lines), max(int(high, 16) for _, high in lines)


def counted(body: Callable[[], object], mark: Callable[[], object]) -> None:
    """Run a call many times between two marks."""
    for _ in range(20):
        body()
    gc.collect()
    gc.disable()
    calls = range(CALLS)
    mark()
    for _ in calls:
        body()
    mark()
    gc.enable()


def step_of_experts(experts: int) -> dict[str, Callable[[], None]]:
    """Forward and backward of a layer of experts, and of a whole block with its router, on few tokens."""
    options: dict[str, Any] = {"device": "cpu", "single_grouped_weight": True}
    layer = te.GroupedLinear(experts, 32, 32, bias=False, params_dtype=torch.bfloat16, **options)
    block = te.MoE(32, 32, experts, 8, dtype=torch.bfloat16, **options)
    counts = torch.full((experts,), 8 // experts)
    counts[0] += 8 - counts.sum()

    def step(module: torch.nn.Module, *extras: torch.Tensor) -> None:
        tokens = torch.ones(8, 32, dtype=torch.bfloat16, requires_grad=True)
        y = module(tokens, *extras)
        y.backward(torch.ones_like(y))
        for parameter in module.parameters():
            parameter.grad = None

    return {"GroupedLinear": partial(step, layer, counts), "MoE": partial(step, block)}


def enter_and_leave(recipe: DelayedScaling) -> None:
    """Run an empty region."""
    with te.autocast(recipe=recipe):
        pass


def main() -> None:
    """Run all bodies and print their names."""
    torch.set_num_threads(1)
    low, high = native_range()
    library = ctypes.CDLL(None)
    mark = partial(library.syscall, *map(ctypes.c_long, (GETPPID, low, high, MARK)))
    names: list[str] = []
    x = torch.randn(256, 1024, dtype=torch.bfloat16)
    for name, recipe in RECIPES.items():
        layer = te.Linear(1024, 1024, bias=False, params_dtype=torch.bfloat16, device="cpu")
        with torch.no_grad(), te.autocast(recipe=recipe()), dispatch.record(execute=False):
            counted(partial(layer, x), mark)
        names.append(f"Linear, {name}")
    for experts in EXPERTS:
        for name, body in step_of_experts(experts).items():
            with te.autocast(recipe=Float8BlockScaling()), dispatch.record(execute=False):
                counted(body, mark)
            names.append(f"{name}, {experts} experts")
    counted(partial(enter_and_leave, DelayedScaling()), mark)
    names.append("enter and leave autocast")
    plain, row = torch.nn.Linear(16, 16), torch.ones(1, 16)
    with torch.no_grad():
        counted(partial(plain, row), mark)
    names.append("nn.Linear 16 to 16, FP32")
    counted(partial(torch.empty, 256, 1024, dtype=torch.bfloat16), mark)
    names.append("torch.empty")
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "te_fast": te_fast.__version__,
    }
    print(json.dumps({"names": names, "calls": CALLS, "versions": versions}))


if __name__ == "__main__":
    main()
