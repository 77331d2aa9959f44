"""The calls that benches/instructions.py counts, each between two marks; runs under the emulator."""

from __future__ import annotations

import ctypes
import gc
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import te_fast
import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

CALLS = 100
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "block": Float8BlockScaling}
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
    """Call often, between two marks."""
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


def enter_and_leave(recipe: DelayedScaling) -> None:
    """Run an empty region."""
    with te.autocast(recipe=recipe):
        pass


def main() -> None:
    """Run all bodies; tell their names."""
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
