"""Quantised tensors of many shapes that one launch writes, and references of the same values in independent torch."""

from __future__ import annotations

import re

import torch

from quantized_tensors import layout, parts, quantizer, scales_there
from reference import amax_of
from te_fast import dispatch

KINDS = ("delayed", "current", "2d")
SHAPES = [(16, 16), (1, 1), (130, 272), (257, 24), (33, 19), (128, 128), (1, 300), (300, 1), (520, 264)]  # fmt: skip
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-10, 464.0, 61440.0, -3e38, float("inf"), float("nan")]
#: The casts of a launch, by kind.
LAUNCHES = {
    "delayed": ["cast_many"],
    "current": ["cast_current_many"],
    "2d": ["cast_block_many"],
}


def values_of(shapes, dtype, device, *, seed=0):
    """Random values of many magnitudes, in some tensors with special values; the last tensor is zero."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, shape in enumerate(shapes):
        x = torch.randn(shape, generator=generator)
        x *= torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
        if index % 2 and x.numel() > 64:
            where = torch.randint(0, x.numel(), (len(SPECIAL),), generator=generator)
            x.view(-1)[where] = torch.tensor(SPECIAL)
        made.append(x.to(dtype).to(device))
    made[-1].zero_()
    return made


def quantizers(kind, count, fmt, device, usage):
    """One quantizer for each tensor; quantizers of delayed scaling have maxima of their own."""
    rowwise, columnwise = usage
    return [
        quantizer(kind, fmt=fmt, rowwise=rowwise, columnwise=columnwise, device=device)
        for _ in range(count)
    ]


def written(tensors, values):
    """Overwrite quantised tensors with values; return the names of the launches."""
    with dispatch.record() as launches:
        torch._foreach_copy_(tensors, values)
    return names_of(launches)


def names_of(launches):
    """Names of the recorded launches, without element types."""
    return [re.sub("_many_.*", "_many", launch.name) for launch in launches]


def check(tensor, x, kind, fmt):
    """Bytes, scales and maximum of a tensor that was quantised from `x`."""
    row, row_scale, col, col_scale = parts(tensor)
    matrix = x.reshape(-1, x.shape[-1]).cpu()
    data, scales, _ = layout(matrix, kind, fmt)
    if row is not None:
        assert torch.equal(row.cpu().view(matrix.shape), data)
    if row is not None or kind != "2d":
        assert torch.equal(*scales_there(row_scale.cpu(), scales))
    if col is not None:
        data, scales, _ = layout(matrix.t().contiguous(), kind, fmt)
        assert torch.equal(col.cpu().view(data.shape), data)
        assert torch.equal(*scales_there(col_scale.cpu(), scales))
    if kind == "delayed":
        assert torch.equal(tensor._quantizer.amax.cpu().view(()), amax_of(matrix))
