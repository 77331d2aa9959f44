"""GPU time of the norm kernels over their byte floor at the copy rate of the same run.

Run ``python benches/kernels_norm.py [out.json]`` on a machine with a GPU; ``_kernels.py`` says how it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from _kernels import Case, Shape, measure
from te_fast import dispatch
from te_fast.dispatch import NormFunction

SHAPES = [
    (8192, 8192),
    (8192, 4096),
    (8192, 16384),
    (16384, 1024),
    (65536, 128),
    (4096, 32768),
    (2048, 4096),
    (512, 8192),
]


def forward(
    shape: tuple[int, int],
    function: NormFunction,
    *,
    layouts: tuple[bool, bool] = (False, False),
    residual: bool = False,
) -> tuple[Callable[[], object], int]:
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


def backward(
    shape: tuple[int, int], function: NormFunction, *, add: bool = False
) -> tuple[Callable[[], object], int]:
    """Return a call and its fewest bytes."""
    dy, x = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gamma = torch.randn(shape[1], device="cuda", dtype=torch.bfloat16)
    branch = torch.randn_like(x) if add else None
    mean = x.float().mean(1) if function.normalization == "LayerNorm" else None
    rstd = x.float().std(1).reciprocal()
    out = dispatch.norm_gradients(x, gamma, function)
    size = (4 if add else 3) * 2 * x.numel()
    return lambda: dispatch.norm_backward(dy, x, gamma, mean, rstd, function, out, add=branch), size


def cases(shape: Shape) -> Iterator[Case]:
    """Every form of both norms."""
    for name in ("LayerNorm", "RMSNorm"):
        norm = NormFunction(name)  # type: ignore[arg-type]
        yield Case(f"{name} forward", *forward(shape, norm), 1.1)
        yield Case(f"{name} forward + cast", *forward(shape, norm, layouts=(True, False)), 1.12)
        both = forward(shape, norm, layouts=(True, True))
        yield Case(f"{name} forward + cast + transpose", *both, 1.25)
        yield Case(f"add + {name} forward", *forward(shape, norm, residual=True))
        yield Case(f"{name} backward", *backward(shape, norm), 1.2)
        yield Case(f"{name} backward + add", *backward(shape, norm, add=True), 1.2)


if __name__ == "__main__":
    measure("kernels_norm", SHAPES, cases)
