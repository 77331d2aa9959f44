"""Quantizers of every kind, and the expected contents of their tensors by the independent formulas of reference.py."""

import torch

import te_fast.pytorch as te
from reference import (
    FP8_MAX,
    amax_of,
    amax_to_scale,
    dequantize,
    quantize_1d,
    quantize_2d,
    quantize_per_tensor,
    reciprocal,
)
from te_fast.tensor import operations

KINDS = ("delayed", "current", "2d", "1d")
FP8 = {"e4m3": te.DType.kFloat8E4M3, "e5m2": te.DType.kFloat8E5M2}
SCALE = 3.0


def quantizer(kind, *, fmt="e4m3", rowwise=True, columnwise=True, device="cpu"):
    usage = {"rowwise": rowwise, "columnwise": columnwise}
    if kind == "delayed":
        scale = torch.tensor([SCALE], device=device)
        return te.Float8Quantizer(scale, torch.zeros(1, device=device), FP8[fmt], **usage)
    if kind == "current":
        return te.Float8CurrentScalingQuantizer(FP8[fmt], device, **usage)
    return te.Float8BlockQuantizer(FP8[fmt], block_scaling_dim=int(kind[0]), **usage)


def layout(x, kind, fmt="e4m3"):
    """Bytes, stored scales, and each element's scale, for a matrix in row layout; ``x.t()`` gives the column layout."""
    rows, cols = x.shape
    if kind == "1d":
        data, scales = quantize_1d(x, fmt)
        return data, scales, scales[:, :rows].t().repeat_interleave(128, 1)[:, :cols]
    if kind == "2d":
        data, scales = quantize_2d(x, fmt)
        spread = scales[:, : -(-cols // 128)].repeat_interleave(128, 0)[:rows]
        return data, scales, spread.repeat_interleave(128, 1)[:, :cols]
    scale = torch.tensor(SCALE)
    if kind == "current":
        scale = amax_to_scale(amax_of(x), FP8_MAX[fmt])
    inverse = reciprocal(scale).reshape(1)
    return quantize_per_tensor(x, scale, fmt), inverse, inverse.expand(rows, cols)


def values(x, kind, fmt="e4m3"):
    """Return the values of a tensor after it was quantised and dequantised."""
    matrix = x.detach().reshape(-1, x.shape[-1])
    data, _, spread = layout(matrix, kind, fmt)
    return dequantize(data, spread, fmt, x.dtype).reshape(x.shape)


def scales_there(scales, expected):
    """The parts of the stored scales and of `expected` without padding, as a pair."""
    there = expected != 0
    return scales.reshape(expected.shape)[there], expected[there]


def parts(tensor):
    """Row bytes and scales, column bytes and scales."""
    value = tensor._value
    return value.row, value.row_scale, value.col, value.col_scale


def forbid_dispatch(monkeypatch):
    """Fail where a call enters torch's dispatch of quantised tensors."""

    def refuse(func, *_):
        raise AssertionError(func)

    monkeypatch.setattr(operations, "dispatch", refuse)
    monkeypatch.setattr("te_fast.tensor.tensor.dispatch", refuse)
