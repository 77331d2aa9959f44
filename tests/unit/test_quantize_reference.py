"""Quantised bytes and scales of the host backend against torch references, bit for bit."""

import itertools

import pytest
import torch

import reference
from te_fast import dispatch
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The sizes straddle a vector of 8, a tile of 128, the alignment of 16, and the size from which rayon is used.
SHAPES = [(1, 1), (7, 33), (128, 128), (129, 136), (300, 520)]
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-10, 464.0, 61440.0, -3e38, float("inf"), float("nan")]
ROLES = {"input": "e4m3", "weight": "e4m3", "grad": "e5m2"}


def data(rows, cols, dtype, *, special=True):
    generator = torch.Generator().manual_seed(rows * 7919 + cols)
    x = torch.randn(rows * cols, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, x.shape, generator=generator).float())
    if special and x.numel() > 64:
        x[torch.randint(0, x.numel(), (len(SPECIAL),), generator=generator)] = torch.tensor(SPECIAL)
    return x.to(dtype).view(rows, cols)


def same(got, expected):
    """Compare bits, whatever the dtype."""
    assert got.shape == expected.shape
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def transposed(rowwise):
    out = rowwise.new_zeros(rowwise.shape[1], -(-rowwise.shape[0] // 16) * 16)
    out[:, : rowwise.shape[0]] = rowwise.t()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("role", ROLES)
class TestShapes:
    def test_delayed(self, shape, dtype, role):
        x, scale, amax = data(*shape, dtype), torch.tensor([0.3]), torch.tensor([0.25])
        q = dispatch.quantize(
            x, DelayedScaling(), role=role, columnwise=True, scale=scale, amax=amax
        )
        expected = reference.quantize_per_tensor(x, scale, ROLES[role])
        same(q.rowwise_data, expected)
        same(q.columnwise_data, transposed(expected))
        same(q.rowwise_scale_inv, reference.reciprocal(scale))
        same(amax, torch.maximum(reference.amax_of(x), torch.tensor([0.25])))

    def test_current(self, shape, dtype, role):
        x = data(*shape, dtype, special=False)
        q = dispatch.quantize(x, Float8CurrentScaling(), role=role, columnwise=True)
        fp8_max = reference.FP8_MAX[ROLES[role]]
        scale = reference.amax_to_scale(reference.amax_of(x), fp8_max)
        expected = reference.quantize_per_tensor(x, scale, ROLES[role])
        same(q.rowwise_data, expected)
        same(q.columnwise_data, transposed(expected))
        same(q.rowwise_scale_inv, reference.reciprocal(scale).view(1))

    def test_block(self, shape, dtype, role):
        x = data(*shape, dtype)
        if shape[0] > 128:
            x[:128] = 0  # a block without a maximum
        q = dispatch.quantize(x, Float8BlockScaling(), role=role, columnwise=True)
        quantize = reference.quantize_2d if role == "weight" else reference.quantize_1d
        expected, scale_inv = quantize(x, "e4m3")
        expected_t, scale_inv_t = quantize(x.t().contiguous(), "e4m3")
        same(q.rowwise_data, expected)
        same(q.rowwise_scale_inv, scale_inv)
        same(q.columnwise_data, transposed(expected_t.t()))
        same(q.columnwise_scale_inv, scale_inv_t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 16), (300, 520), (1100, 72)], ids=str)
def test_column_sums(shape, dtype):
    x = data(*shape, dtype, special=False)
    q = dispatch.quantize(
        x, DelayedScaling(), role="grad", columnwise=True, scale=torch.ones(1), column_sums=True
    )
    same(q.column_sums, reference.column_sums(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_bit_pattern(dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 256)
    for role, value in itertools.product(["input", "grad"], [1.0, 2.0**-100, 3.7e4, 1e-6]):
        q = dispatch.quantize(x, DelayedScaling(), role=role, scale=torch.tensor([value]))
        same(q.rowwise_data, reference.quantize_per_tensor(x, value, ROLES[role]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e-7, 3e38, float("inf"), float("nan")])
def test_scale_extremes(value, dtype):
    x = torch.full((128, 128), value).to(dtype)
    q = dispatch.quantize(x, Float8CurrentScaling())
    scale = reference.amax_to_scale(reference.amax_of(x), 448.0)
    same(q.rowwise_data, reference.quantize_per_tensor(x, scale, "e4m3"))
    same(q.rowwise_scale_inv, reference.reciprocal(scale).view(1))
    for role, quantize in [("input", reference.quantize_1d), ("weight", reference.quantize_2d)]:
        q = dispatch.quantize(x, Float8BlockScaling(), role=role)
        expected, scale_inv = quantize(x, "e4m3")
        same(q.rowwise_data, expected)
        same(q.rowwise_scale_inv, scale_inv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_block_dequantize(role, columnwise, dtype):
    x = torch.randn(300, 520)
    q = dispatch.quantize(x, Float8BlockScaling(), role=role, columnwise=columnwise)
    scale_inv = q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv
    expected_data = q.columnwise_data if columnwise else q.rowwise_data
    rows, cols = expected_data.shape
    spread = (
        scale_inv[:, :rows].t() if role == "input" else scale_inv.repeat_interleave(128, 0)[:rows]
    )
    spread = spread.repeat_interleave(128, 1)[:, :cols]
    same(
        dispatch.dequantize(q, dtype, columnwise=columnwise),
        reference.dequantize(expected_data, spread, "e4m3", dtype),
    )
