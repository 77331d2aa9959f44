"""GPU time of the kernels of cross entropy over their byte floor at the copy rate of the same run.

Run ``python benches/kernels_loss.py [out.json]`` on a machine with a GPU; ``_kernels.py`` says how it measures. Shapes
are rows and columns of the logits: tokens of a step, and the vocabularies of GPT-2, Llama 2 and Llama 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from _kernels import Case, Shape, measure
from te_fast.runtime import native

SHAPES = [(2048, 32000), (8192, 32000), (2048, 50257), (4096, 128256)]
IGNORED = -100
SMOOTHING = 0.0
#: Losses leave what their gradient needs.
KEEPS = True


def cases(shape: Shape) -> Iterator[Case]:
    """Losses, a rank's sums, and the gradient, beside the logits and in their place."""
    rows, columns = shape
    target = torch.randint(0, columns, (rows,), device="cuda")
    grad = torch.rand(rows, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(shape, device="cuda", dtype=dtype)
        _, statistics = native.cross_entropy_forward(logits, target, IGNORED, SMOOTHING, KEEPS)
        result = torch.empty_like(logits)
        name = str(dtype).removeprefix("torch.")
        size = logits.numel() * logits.element_size()
        yield Case(
            f"{name} losses",
            lambda x=logits: native.cross_entropy_forward(x, target, IGNORED, SMOOTHING, KEEPS),
            size,
        )
        yield Case(
            f"{name} part of a row", lambda x=logits: native.cross_entropy_part(x, SMOOTHING), size
        )
        for place, out in (("", result), (" in place", logits)):
            yield Case(
                f"{name} gradient{place}",
                lambda x=logits, s=statistics, out=out: native.cross_entropy_backward(
                    x, target, s, grad, None, out, IGNORED, SMOOTHING
                ),
                2 * size,
            )


if __name__ == "__main__":
    measure("kernels_loss", SHAPES, cases)
