"""Permutation straight into FP8: the bits of permuting first and quantising afterwards."""

from __future__ import annotations

import pytest
import torch

import reference
import te_fast.pytorch as te
from permutation_reference import make_case, permute_reference
from selection import sampled
from te_fast.errors import DtypeError, ShapeError

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def block_reference(rows, fmt, eps, power_2):
    """FP8 bytes and inverse scales (blocks, rows up to a multiple of 4) of 1 x 128 blocks."""
    count, cols = rows.shape
    blocks = -(-cols // 128)
    padded = torch.zeros(count, blocks * 128)
    padded[:, :cols] = rows.float()
    padded = padded.view(count, blocks, 128)
    amax = padded.abs().amax(2).clamp(min=eps)
    # For a number divided by a tensor, torch multiplies with the reciprocal, which rounds twice.
    scale = torch.where(
        amax > 0, torch.full_like(amax, reference.FP8_MAX[fmt]) / amax, torch.ones(())
    )
    if power_2:
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    data = reference.to_fp8_bytes(padded * scale[..., None], fmt).view(count, -1)[:, :cols]
    scale_inv = torch.zeros(blocks, -(-count // 4) * 4)
    scale_inv[:, :count] = (1 / scale).t()
    return data, scale_inv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("align", [0, 16])
def test_per_tensor(dtype, fmt, align):
    case = make_case(33, 5, 2, 48, dtype=dtype, zeros=True)
    scale, amax = torch.tensor([3.7]), torch.zeros(1)
    rows = permute_reference(case, max(align, 1), None)[0].size(0) + 6
    data, scale_inv, probs, row_id_map, offsets, padded = te.moe_permute_and_quantize(
        case.x,
        case.probs,
        case.mask,
        rows,
        align_size=align,
        fp8_dtype=FP8[fmt],
        scale=scale,
        amax=amax,
    )
    expected, expected_probs, expected_offsets, expected_padded = permute_reference(
        case, max(align, 1), rows
    )
    assert data.dtype == FP8[fmt]
    assert torch.equal(data.view(torch.uint8), reference.quantize_per_tensor(expected, scale, fmt))
    assert amax.item() == expected.float().abs().max().item()
    assert scale_inv is None
    assert torch.equal(probs, expected_probs)
    assert row_id_map[:, 10].tolist() == [2] * 33
    if align:
        assert torch.equal(offsets, expected_offsets)
        assert torch.equal(padded, expected_padded)
    else:
        assert offsets is None
        assert padded is None


@pytest.mark.parametrize(
    ("dtype", "fmt", "eps", "power_2", "hidden"),
    sampled(
        [torch.float32, torch.float16, torch.bfloat16],
        ["e4m3", "e5m2"],
        [pytest.param(0.0, True), pytest.param(0.5, False)],
        [128, 272],
    ),
    ids=str,
)
def test_blocks(dtype, fmt, eps, power_2, hidden):
    case = make_case(21, 4, 2, hidden, dtype=dtype, zeros=True)
    rows = permute_reference(case, 8, None)[0].size(0) + 3
    data, scale_inv, _, _, _, _ = te.moe_permute_and_quantize(
        case.x,
        case.probs,
        case.mask,
        rows,
        align_size=8,
        fp8_dtype=FP8[fmt],
        amax_epsilon=eps,
        power_2_scale=power_2,
    )
    expected, expected_scale_inv = block_reference(
        permute_reference(case, 8, rows)[0], fmt, eps, power_2
    )
    assert torch.equal(data.view(torch.uint8), expected)
    assert torch.equal(scale_inv, expected_scale_inv)


def test_without_probs():
    case = make_case(9, 3, 1, 16)
    data, _, probs, _, _, _ = te.moe_permute_and_quantize(
        case.x, None, case.mask, case.routed, scale=torch.ones(1)
    )
    case.probs.fill_(1)
    assert probs is None
    expected = permute_reference(case, 1, None)[0]
    assert torch.equal(data.view(torch.uint8), reference.quantize_per_tensor(expected, 1.0, "e4m3"))


def test_errors():
    case = make_case(4, 2, 1, 24)
    with pytest.raises(ShapeError, match="multiple of 16"):
        te.moe_permute_and_quantize(case.x, None, case.mask, 4)
    with pytest.raises(DtypeError, match="fp8_dtype"):
        te.moe_permute_and_quantize(case.x, None, case.mask, 4, fp8_dtype=torch.uint8)
    with pytest.raises(ShapeError, match="must not be negative, got -1 and 0"):
        te.moe_permute_and_quantize(case.x, None, case.mask, -1)
    with pytest.raises(ShapeError, match="must not be negative, got 4 and -16"):
        te.moe_permute_and_quantize(case.x, None, case.mask, 4, align_size=-16)
    with pytest.raises(ShapeError, match="give scale too"):
        te.moe_permute_and_quantize(case.x, None, case.mask, 4, amax=torch.zeros(1))
    with pytest.raises(DtypeError, match="scale"):
        te.moe_permute_and_quantize(
            make_case(4, 2, 1, 16).x, None, case.mask, 4, scale=torch.ones(1).double()
        )
