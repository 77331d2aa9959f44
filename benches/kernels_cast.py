"""GPU time of the cast kernels over their byte floor at the copy rate of the same run.

``python benches/kernels_cast.py [out.json]`` on a machine with a GPU. Each figure is the median of the kernel
durations that the profiler reports; before each launch a 1 GiB read fills L2 with clean lines of other data.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

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
REPEATS = 25


class Timer:
    """Median kernel time of a case, all kernels of the case summed."""

    def __init__(self) -> None:
        self.flush = torch.ones(1 << 28, dtype=torch.int32, device="cuda")

    def kernels_us(self, launches: list[Callable[[], None]], repeats: int = REPEATS) -> float:
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(repeats):
                self.flush.amax()
                for launch in launches:
                    launch()
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in trace.events():
            ours = ("cast", "amax", "scale", "dequantize", "Memcpy DtoD")
            if event.name.startswith(ours):
                times.setdefault(event.name, []).append(event.device_time)
        return sum(statistics.median(found) for found in times.values())


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
        self.counters = torch.zeros(4 * (cols // 128 + 1), dtype=torch.int32, device="cuda")


def cases(t: Tensors) -> dict[str, tuple[list[Callable[[], None]], float]]:
    """Return launches and fewest bytes of each case."""
    n, name, fmt = t.x.numel(), "bf16", "e4m3"
    delayed = {"name": name, "scale_inv": t.scale_inv, "amax": t.amax}
    current = {"name": name, "scale": t.scale, "scale_inv": t.scale_inv}
    dbias = {"dbias": t.dbias, "partial": t.partial, "counters": t.counters}
    ld_t = t.x.shape[0]
    amax = kernels.amax(t.x, t.workspace, fmt, **current)
    cast_transpose = kernels.cast_transpose(t.x, t.out, t.out_t, t.scale, fmt, ld_t=ld_t, **delayed)
    fused = kernels.cast_transpose(t.x, t.out, t.out_t, t.scale, fmt, ld_t=ld_t, **delayed, **dbias)
    sums = kernels.cast_transpose(t.x, None, None, None, fmt, name=name, **dbias)
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


def copy_rate(timer: Timer) -> float:
    """Bytes read and written per µs by a 2 GiB device-to-device copy."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / timer.kernels_us([lambda: target.copy_(source)], 8)


def main() -> None:
    timer = Timer()
    rate = copy_rate(timer)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "host": platform.release(),
        "command": "python benches/kernels_cast.py",
        "copy_tb_per_s": rate / 1e6,
        "shapes": {},
    }
    for shape in [(8192, 8192), (4096, 4096), (256, 1024)]:
        rows = {}
        for case, (launches, size) in cases(Tensors(*shape)).items():
            micros = timer.kernels_us(launches)
            rows[case] = {
                "us": round(micros, 2),
                "floor_us": round(size / rate, 2),
                "ratio": round(micros * rate / size, 3),
            }
            if shape == (8192, 8192) and case in BARS:
                rows[case]["bar"] = BARS[case]
            print(shape, f"{case:24}", rows[case])
        report["shapes"]["x".join(map(str, shape))] = rows
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
