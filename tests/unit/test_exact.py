"""FP8 products on the host with the bits of Hopper's tensor cores, against their rule in exact numbers of Python."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch

import te_fast
from selection import sampled
from te_fast.dispatch import QuantizedOperand

if TYPE_CHECKING:
    from fresh import Processes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def exponent_of(byte: int, dtype: torch.dtype) -> int:
    """The exponent of an FP8 byte; subnormal numbers have the exponent of the smallest normal number."""
    bits, bias = (3, 7) if dtype == E4M3 else (2, 15)
    return max((byte & 0x7F) >> bits, 1) - bias


def cut(value: Fraction, places: int) -> Fraction:
    """A number rounded towards zero to a multiple of 2**places."""
    unit = Fraction(2) ** places
    return math.trunc(value / unit) * unit


def chain(a: torch.Tensor, b: torch.Tensor) -> Fraction:
    """A dot product as the cores sum it: 32 products at a time, 13 bits behind the point of the largest term."""
    total = Fraction(0)
    for start in range(0, len(a), 32):
        terms = []
        for x, y in zip(a[start : start + 32], b[start : start + 32], strict=True):
            exponent = exponent_of(int(x.view(torch.uint8)), a.dtype) + exponent_of(
                int(y.view(torch.uint8)), b.dtype
            )
            terms.append((Fraction(float(x)) * Fraction(float(y)), exponent))
        if total:
            terms.append((total, math.floor(math.log2(abs(total)))))
        terms = [(value, exponent) for value, exponent in terms if value]
        if not terms:
            continue
        largest = max(exponent for _, exponent in terms)
        total = sum((cut(value, largest - 13) for value, _ in terms), Fraction(0))
        if total:
            total = cut(total, math.floor(math.log2(abs(total))) - 13)
    return total


def operand(
    data: torch.Tensor, scale: torch.Tensor | None = None, block: int = 0
) -> QuantizedOperand:
    scale = torch.ones(1) if scale is None else scale
    return QuantizedOperand(
        data.view(torch.uint8), scale, None, None, data.dtype, block, data.shape[1]
    )


def values(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 3, shape, generator=make).float())
    kept = torch.rand(shape, generator=make) > 0.2
    return (torch.randn(shape, generator=make) * spread * kept).to(dtype)


@pytest.mark.parametrize(
    ("k", "x_type", "w_type", "fast"),
    sampled(
        [16, 128, 336],
        [
            pytest.param(E4M3, E4M3),
            pytest.param(E5M2, E4M3),
            pytest.param(E4M3, E5M2),
        ],
        [True, False],
    ),
)
def test_sums_are_those_of_the_tensor_cores(
    k: int, x_type: torch.dtype, w_type: torch.dtype, *, fast: bool
) -> None:
    x, w = values((5, k), x_type, 1), values((7, k), w_type, 2)
    out = te_fast.dispatch.gemm(
        operand(x), operand(w), torch.empty(5, 7), fast_accumulation=fast, exact=True
    )
    for i in range(5):
        for j in range(7):
            if fast:
                expected = torch.tensor(float(chain(x[i], w[j])))
            else:
                expected = torch.tensor(0.0)
                for block in range(0, k, 128):
                    expected = expected + float(
                        chain(x[i, block : block + 128], w[j, block : block + 128])
                    )
            assert out[i, j] == expected, (i, j)


def test_block_scales_multiply_what_leaves_the_cores() -> None:
    x, w = values((4, 256), E4M3, 3), values((8, 256), E4M3, 4)
    make = torch.Generator().manual_seed(5)
    x_scale, w_scale = torch.rand(2, 4, generator=make), torch.rand(1, 4, generator=make)
    out = te_fast.dispatch.gemm(
        operand(x, x_scale, 1), operand(w, w_scale, 2), torch.empty(4, 8), exact=True
    )
    for i in range(4):
        for j in range(8):
            expected = 0.0
            for block in range(2):
                columns = slice(128 * block, 128 * block + 128)
                scale = float(x_scale[block, i] * w_scale[0, block])
                fused = Fraction(float(chain(x[i, columns], w[j, columns]))) * Fraction(
                    scale
                ) + Fraction(expected)
                # This is the float32 nearest to the exact value: FP64 holds the exact value, so only one step rounds.
                expected = float(torch.tensor(float(fused), dtype=torch.float64).float())
            assert out[i, j] == expected, (i, j)


def test_what_is_no_number() -> None:
    x = torch.ones(4, 32).to(E5M2)
    x[0, 3], x[1, 3], x[2, 3] = float("inf"), float("-inf"), float("nan")
    w = torch.ones(2, 32).to(E4M3)
    w[1, 3] = 0.0
    out = te_fast.dispatch.gemm(
        operand(x), operand(w), torch.empty(4, 2), fast_accumulation=True, exact=True
    )
    assert out[0, 0] == float("inf")
    assert out[1, 0] == float("-inf")
    assert out[2].isnan().all()
    assert out[:2, 1].isnan().all()
    assert out[3].equal(torch.tensor([32.0, 31.0]))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_has_the_bits_of_the_gpu(dtype: torch.dtype, fast: bool) -> None:
    # Infinities of both signs, in different sums of split accumulation.
    x = torch.ones(1, 256).to(E5M2)
    x[0, 3], x[0, 200] = float("inf"), float("-inf")
    out = torch.empty(1, 16, dtype=dtype)
    w = operand(torch.ones(16, 256).to(E4M3))
    te_fast.dispatch.gemm(operand(x), w, out, fast_accumulation=fast, exact=True)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert out.view(bits).eq(torch.iinfo(bits).max).all()


def test_exact_is_for_fp8_on_the_host() -> None:
    with pytest.raises(te_fast.UnsupportedError, match="exact=True"):
        te_fast.dispatch.gemm(torch.ones(2, 16), torch.ones(2, 16), torch.empty(2, 2), exact=True)


def test_the_environment_asks_for_it(fresh: Processes) -> None:
    code = """
import os
os.environ["TE_FAST_EXACT"] = "%s"
import torch, te_fast.pytorch as te
from te_fast.common.recipe import Float8CurrentScaling
torch.manual_seed(0)
layer = te.Linear(256, 32, bias=False, device="cpu")
with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
    print(layer(torch.randn(16, 256)).double().sum().item())
"""
    asked, not_asked = fresh.together(code % "1", code % "0")
    assert asked != not_asked
