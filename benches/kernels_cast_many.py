"""GPU time of the casts of many weights in one launch, over their byte floor at the copy rate of the same run.

Run ``python benches/kernels_cast_many.py [out.json]`` on a machine with a GPU; ``_kernels.py`` says how it measures.
Shapes are (weights, rows, columns); each case writes both layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from _kernels import Case, measure
from te_fast.tensor.quantizer import update_many

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from many_tensors import KINDS, quantizers

#: Tiny weights, as many as a launch takes; models of hidden size 768, 1024 and 2048.
SHAPES = [(544, 128, 128), (48, 768, 3072), (128, 1024, 1024), (32, 2048, 6144)]


def cases(shape: tuple[int, ...]) -> Iterator[Case]:
    """All recipes."""
    count, *sizes = shape
    values = [torch.randn(sizes, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    elements = sum(x.numel() for x in values)
    for kind in KINDS:
        made = zip(quantizers(kind, count, "e4m3", "cuda", (True, True)), values, strict=True)
        weights = [one(x) for one, x in made]
        yield Case(kind, partial(update_many, weights, values), 4 * elements)


if __name__ == "__main__":
    measure("kernels_cast_many", SHAPES, cases)
