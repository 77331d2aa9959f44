"""GPU time of the activation kernels over their byte floor at the copy rate of the same run.

``python benches/kernels_activation.py [out.json]`` on a machine with a GPU. Each figure is the median of the kernel
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

from te_fast import dispatch
from te_fast.dispatch import ActivationFunction

REPEATS = 25
BAR = 1.2


class Timer:
    """Median kernel time of a launch."""

    def __init__(self) -> None:
        self.flush = torch.ones(1 << 28, dtype=torch.int32, device="cuda")

    def kernel_us(self, launch: Callable[[], object], repeats: int = REPEATS) -> float:
        launch()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(repeats):
                self.flush.amax()
                launch()
            torch.cuda.synchronize()
        times = [
            event.device_time
            for event in trace.events()
            if event.name.startswith(("activation", "Memcpy DtoD"))
        ]
        return statistics.median(times)


def case(
    name: str, shape: tuple[int, int], *, gradient: bool, fp8: bool = True, row_scale: bool = False
) -> tuple[Callable[[], object], int]:
    """Return a launch and its fewest bytes."""
    function = ActivationFunction(name)
    rows, cols = shape
    x = torch.randn(rows, function.halves * cols, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    out = dispatch.activation_outputs(
        x,
        function,
        gradient=gradient,
        high_precision=not fp8,
        fp8_dtype=torch.float8_e4m3fn if fp8 else None,
        columnwise=True,
    )
    one = torch.ones(1, device="cuda")
    options = {"scale": one, "amax": torch.zeros(1, device="cuda")} if fp8 else {}
    if row_scale:
        options["row_scale"] = torch.rand(rows, device="cuda")
    n = rows * cols
    if not gradient:
        size = 2 * n * function.halves + 2 * n
        return lambda: dispatch.activation(x, function, out, **options), size
    if row_scale:
        out = out._replace(row_scale_grad=torch.empty(rows, device="cuda"))
    else:
        out = out._replace(column_sums=x.new_empty(x.shape[1]))
    size = 2 * n + 4 * n * function.halves
    return lambda: dispatch.activation_backward(dy, x, function, out, **options), size


def copy_rate(timer: Timer) -> float:
    """Bytes read and written per µs by a 2 GiB device-to-device copy."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / timer.kernel_us(lambda: target.copy_(source), 8)


def main() -> None:
    timer = Timer()
    rate = copy_rate(timer)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "host": platform.release(),
        "command": "python benches/kernels_activation.py",
        "copy_tb_per_s": rate / 1e6,
        "bar": BAR,
        "shapes": {},
    }
    kinds = [
        {"gradient": False},
        {"gradient": True},
        {"gradient": False, "fp8": False},
        {"gradient": True, "fp8": False},
        {"gradient": True, "row_scale": True},
    ]
    for shape in [(8192, 8192), (8192, 16384), (4096, 4096), (256, 1024)]:
        rows = {}
        names = ["gelu", "swiglu"]
        if shape == (8192, 8192):
            names += [
                "silu",
                "relu",
                "srelu",
                "geglu",
                "glu",
                "reglu",
                "clamped_swiglu",
                "situ_glu",
            ]
        for name in names:
            for kind in kinds if name in ("gelu", "swiglu") else kinds[:2]:
                launch, size = case(name, shape, **kind)
                micros = timer.kernel_us(launch)
                what = "backward" if kind["gradient"] else "forward"
                what += (
                    " + dscale" if kind.get("row_scale") else " + dbias" if kind["gradient"] else ""
                )
                what += " + cast + transpose" if kind.get("fp8", True) else ""
                rows[f"{name} {what}"] = {
                    "us": round(micros, 2),
                    "floor_us": round(size / rate, 2),
                    "ratio": round(micros * rate / size, 3),
                }
                print(shape, f"{name} {what:40}", rows[f"{name} {what}"], flush=True)
                del launch
        report["shapes"]["x".join(map(str, shape))] = rows
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
