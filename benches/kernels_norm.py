"""GPU time of the norm kernels over their byte floor at the copy rate of the same run.

``python benches/kernels_norm.py [out.json]`` on a machine with a GPU. Each figure is the median of the kernel
durations that the profiler reports, of all kernels of a call together; before each call a 1 GiB read fills L2 with
clean lines of other data.
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
from te_fast.dispatch import NormFunction

REPEATS = 25
BARS = {
    "forward": 1.1,
    "forward + cast": 1.12,
    "forward + cast + transpose": 1.25,
    "backward": 1.2,
}
SHAPES = [(8192, 8192), (8192, 4096), (8192, 16384), (16384, 1024), (65536, 128), (4096, 32768)]

Case = tuple[Callable[[], object], int]


class Timer:
    """Median kernel time of a call."""

    def __init__(self) -> None:
        self.flush = torch.ones(1 << 28, dtype=torch.int32, device="cuda")

    def kernel_us(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(repeats):
                self.flush.amax()
                call()
            torch.cuda.synchronize()
        names = ("norm", "Memcpy DtoD")
        times = [event.device_time for event in trace.events() if event.name.startswith(names)]
        per_call = len(times) // repeats
        return statistics.median(
            sum(times[i : i + per_call]) for i in range(0, len(times), per_call)
        )


def forward(
    shape: tuple[int, int],
    function: NormFunction,
    *,
    layouts: tuple[bool, bool] = (False, False),
    residual: bool = False,
) -> Case:
    """Return a call and its fewest bytes; with `layouts`, row and transposed, FP8 alone is written."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    gamma, beta = torch.randn(2, shape[1], device="cuda", dtype=torch.bfloat16)
    casts = any(layouts)
    out = dispatch.norm_outputs(
        x,
        function,
        high_precision=not casts,
        fp8_dtype=torch.float8_e4m3fn if casts else None,
        rowwise=layouts[0],
        columnwise=layouts[1],
        residual=residual,
        stats=True,
    )
    others = {
        "beta": beta if function.normalization == "LayerNorm" else None,
        "residual": torch.randn_like(x) if residual else None,
        "scale": torch.ones(1, device="cuda") if casts else None,
        "amax": torch.zeros(1, device="cuda") if casts else None,
    }
    size = x.numel() * (2 + (sum(layouts) if casts else 2) + (4 if residual else 0))
    return lambda: dispatch.norm(x, gamma, function, out, **others), size


def backward(shape: tuple[int, int], function: NormFunction, *, add: bool = False) -> Case:
    """Return a call and its fewest bytes."""
    dy, x = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gamma = torch.randn(shape[1], device="cuda", dtype=torch.bfloat16)
    branch = torch.randn_like(x) if add else None
    mean = x.float().mean(1) if function.normalization == "LayerNorm" else None
    rstd = x.float().std(1).reciprocal()
    out = dispatch.norm_gradients(x, gamma, function)
    size = (4 if add else 3) * 2 * x.numel()
    return lambda: dispatch.norm_backward(dy, x, gamma, mean, rstd, function, out, add=branch), size


def cases() -> dict[str, Callable[[tuple[int, int]], Case]]:
    made: dict[str, Callable[[tuple[int, int]], Case]] = {}
    for name in ("LayerNorm", "RMSNorm"):
        function = NormFunction(name)  # type: ignore[arg-type]
        made[f"{name} forward"] = lambda shape, f=function: forward(shape, f)
        made[f"{name} forward + cast"] = lambda shape, f=function: forward(
            shape, f, layouts=(True, False)
        )
        made[f"{name} forward + cast + transpose"] = lambda shape, f=function: forward(
            shape, f, layouts=(True, True)
        )
        made[f"add + {name} forward"] = lambda shape, f=function: forward(shape, f, residual=True)
        made[f"{name} backward"] = lambda shape, f=function: backward(shape, f)
        made[f"{name} backward + add"] = lambda shape, f=function: backward(shape, f, add=True)
    return made


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
        "command": "python benches/kernels_norm.py",
        "copy_tb_per_s": rate / 1e6,
        "bars": BARS,
        "shapes": {},
    }
    for shape in SHAPES:
        rows = {}
        for name, make in cases().items():
            call, size = make(shape)
            micros = timer.kernel_us(call)
            floor = size / rate
            rows[name] = {
                "us": round(micros, 2),
                "floor_us": round(floor, 2),
                "ratio": round(micros / floor, 3),
            }
            print(shape, f"{name:40}", rows[name], flush=True)
        report["shapes"]["x".join(map(str, shape))] = rows
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
