"""Launches of permutations: the launch that moves the rows makes the map of a mask."""

from __future__ import annotations

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from permutation_reference import make_case
from quantized_tensors import quantizer

CASE = make_case(20, 6, 2, 32)
FP8 = quantizer("1d")(CASE.x)
IDS = torch.arange(40, dtype=torch.int32).view(20, 2) % 6


def pad(rows):
    return te.moe_permute_and_pad_with_probs(
        CASE.x, CASE.probs, CASE.mask, None, 16, num_out_tokens=rows
    )


def into_fp8(rows):
    return te.moe_permute_and_quantize(CASE.x, CASE.probs, CASE.mask, rows, align_size=16)


@pytest.mark.parametrize(
    ("call", "kernels"),
    [
        (lambda: te.moe_permute(CASE.x, CASE.mask, 40), ["permute_fwd"]),
        (lambda: te.moe_permute_with_probs(CASE.x, CASE.probs, CASE.mask, 40), ["permute_fwd"]),
        (lambda: pad(128), ["permute_fwd"]),
        (lambda: into_fp8(128), ["permute_cast_f32_e4m3"]),
        (lambda: te.moe_permute(CASE.x, IDS, 40, map_type="index"), ["permute_map", "permute_fwd"]),
        (lambda: te.moe_permute(FP8, CASE.mask, 40), ["permute_fwd", "permute_scales"]),
    ],
)
def test_launches(call, kernels):
    with te_fast.dispatch.record() as launches:
        call()
    assert [launch.name for launch in launches] == kernels
