"""GPU time of the cast kernels over their byte floor at the copy rate of the same run.

Run ``python benches/kernels_cast.py [out.json]`` on a machine with a GPU; ``_kernels.py`` says how it measures.
"current" is a maximum and a cast, "current_dispatched" what the dispatcher makes of them: one launch up to 64 MiB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from _kernels import Case, Shape, measure
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
import cast_kernels as kernels

BARS = {
    "cast": 1.08,
    "cast_transpose": 1.15,
    "current": 1.15,
    "block_1d_row": 1.12,
    "block_1d_both": 1.25,
    "block_2d_both": 1.15,
}
SHAPES = [(8192, 8192), (4096, 4096), (256, 1024)]


class Tensors:
    """Inputs and outputs of one shape."""

    def __init__(self, rows: int, cols: int) -> None:
        byte = {"dtype": torch.uint8, "device": "cuda"}
        single = {"dtype": torch.float32, "device": "cuda"}
        self.x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        self.out, self.out_t = torch.empty(rows, cols, **byte), torch.empty(cols, rows, **byte)
        self.scale, self.scale_inv, self.amax = (
            torch.ones(1, **single),
            torch.ones(1, **single),
            torch.zeros(1, **single),
        )
        self.workspace = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.scales, self.scales_t = (
            torch.empty(rows * cols // 128, **single),
            torch.empty(rows * cols // 128, **single),
        )
        self.dbias = torch.empty(cols, device="cuda", dtype=torch.bfloat16)
        self.partial = torch.empty(rows // 128 + 1, cols, **single)
        self.counters = torch.zeros(cols // 128 + 1, dtype=torch.int32, device="cuda")


def launches(t: Tensors) -> dict[str, tuple[list[Callable[[], None]], float]]:
    """Return launches and fewest bytes of each case."""
    n, name, fmt = t.x.numel(), "bf16", "e4m3"
    delayed = {"name": name, "scale_inv": t.scale_inv, "amax": t.amax}
    current = {"name": name, "scale": t.scale, "scale_inv": t.scale_inv}
    dbias = {"dbias": t.dbias, "partial": t.partial, "counters": t.counters}
    ld_t = t.x.shape[0]
    amax = kernels.amax(t.x, t.workspace, fmt, **current)
    cast_transpose = kernels.cast_transpose(t.x, t.out, t.out_t, t.scale, fmt, ld_t=ld_t, **delayed)
    # Blocks hand sums over strip by strip: with the dispatcher's strips, and with six strips, one wave of blocks.
    strip = kernels.ceil_div(kernels.ceil_div(ld_t, 128), 6)
    sums = kernels.cast_transpose(t.x, None, None, None, fmt, name=name, strip=strip, **dbias)
    recipe, current_recipe = DelayedScaling(), Float8CurrentScaling()

    def fused() -> None:
        dispatch.quantize(
            *(t.x, recipe),
            role="grad",
            columnwise=True,
            scale=t.scale,
            amax=t.amax,
            column_sums=True,
        )

    backwards = kernels.cast_transpose(
        t.x, t.out, t.out_t, t.scale, fmt, ld_t=ld_t, name=name, reverse=True
    )
    block = [t.scales, t.scales_t, fmt]
    return {
        "cast": ([kernels.cast(t.x, t.out, t.scale, fmt, **delayed)], 3 * n),
        "cast_transpose": ([cast_transpose], 4 * n),
        "column": (
            [kernels.cast_transpose(t.x, None, t.out_t, t.scale, fmt, ld_t=ld_t, **delayed)],
            3 * n,
        ),
        "cast_transpose_dbias": ([fused], 4 * n),
        "dbias": ([sums], 2 * n),
        "amax": ([amax], 2 * n),
        "current": ([amax, backwards], 6 * n),
        "current_dispatched": (
            [lambda: dispatch.quantize(t.x, current_recipe, columnwise=True)],
            4 * n,
        ),
        "current_row": (
            [amax, kernels.cast(t.x, t.out, t.scale, fmt, name=name, reverse=True)],
            5 * n,
        ),
        "block_1d_row": (
            [kernels.cast_block(t.x, t.out, None, *block, name=name, dims=1)],
            3 * n + n / 32,
        ),
        "block_1d_both": (
            [kernels.cast_block(t.x, t.out, t.out_t, *block, name=name, dims=1)],
            4 * n + n / 16,
        ),
        "block_1d_column": (
            [kernels.cast_block(t.x, None, t.out_t, *block, name=name, dims=1)],
            3 * n + n / 32,
        ),
        "block_2d_row": ([kernels.cast_block(t.x, t.out, None, *block, name=name, dims=2)], 3 * n),
        "block_2d_both": (
            [kernels.cast_block(t.x, t.out, t.out_t, *block, name=name, dims=2)],
            4 * n,
        ),
        "dequantize": (
            [kernels.dequantize(t.out, t.x, t.scale_inv, *t.x.shape, t.x.shape[1], fmt, name=name)],
            3 * n,
        ),
    }


def cases(shape: Shape) -> Iterator[Case]:
    """Every cast, its launches one after the other."""
    rows, cols = shape
    for name, (calls, size) in launches(Tensors(rows, cols)).items():

        def run(calls: list[Callable[[], None]] = calls) -> None:
            for call in calls:
                call()

        yield Case(name, run, size, BARS.get(name))


if __name__ == "__main__":
    measure("kernels_cast", SHAPES, cases)
