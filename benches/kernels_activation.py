"""GPU time of the activation kernels over their byte floor at the copy rate of the same run.

Run ``python benches/kernels_activation.py [out.json]`` on a machine with a GPU; ``_kernels.py`` says how it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from _kernels import BARRED, Case, Shape, measure
from te_fast import dispatch
from te_fast.dispatch import ActivationFunction

BAR = 1.2
SHAPES = [(8192, 8192), (8192, 16384), (4096, 4096), (256, 1024)]
KINDS = [
    {"gradient": False},
    {"gradient": True},
    {"gradient": False, "fp8": False},
    {"gradient": True, "fp8": False},
    {"gradient": True, "row_scale": True},
]
OTHERS = ["silu", "relu", "srelu", "geglu", "glu", "reglu", "clamped_swiglu", "situ_glu"]


def launch_of(
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


def cases(shape: Shape) -> Iterator[Case]:
    """GELU and SwiGLU in every form; the other functions at the shape of the bars, as FP8 layers use them."""
    for name in ["gelu", "swiglu", *(OTHERS if shape == BARRED else ())]:
        for kind in KINDS if name in ("gelu", "swiglu") else KINDS[:2]:
            what = "backward" if kind["gradient"] else "forward"
            if kind["gradient"]:
                what += " + dscale" if kind.get("row_scale") else " + dbias"
            if kind.get("fp8", True):
                what += " + cast + transpose"
            bar = BAR if kind in KINDS[:2] else None
            yield Case(f"{name} {what}", *launch_of(name, shape, **kind), bar)


if __name__ == "__main__":
    measure("kernels_activation", SHAPES, cases)
