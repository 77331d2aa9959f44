"""The update of scales by functions, and the number types of recipes, beside plain Python."""

import math

import pytest
import torch

from te_fast.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    NVFP4BlockScaling,
)
from te_fast.errors import ArgumentError
from te_fast.pytorch import constants, fp8, quantization
from te_fast.pytorch.constants import DType

F32_MAX = torch.finfo(torch.float32).max


def scale_of(amax, scale, fp8_max, margin):
    """The rule in FP64, for one tensor. A quotient that overflows FP32 is not divided by the margin any more."""
    if not (0.0 < amax < math.inf):
        return scale
    quotient = fp8_max / amax
    return F32_MAX if quotient > F32_MAX else min(quotient / 2**margin, F32_MAX)


AMAXES = [0.0, 448.0 / F32_MAX / 2, 1e-30, 0.37, 448.0, 3e38, math.inf, math.nan]


@pytest.mark.parametrize("margin", [0, 3, -1])
@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
def test_scales_follow_from_maxima(margin, fp8_max):
    amax, scale = torch.tensor(AMAXES), torch.full((len(AMAXES),), 7.0)
    made = quantization._default_sf_compute(amax, scale, fp8_max, margin)
    assert made is scale
    amaxes = amax.tolist()  # rounded to FP32
    expected = torch.tensor([scale_of(a, 7.0, fp8_max, margin) for a in amaxes])
    assert torch.allclose(scale, expected, rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["max", "most_recent", lambda history: history[-1].clone()])
@pytest.mark.parametrize("length", [1, 4])
def test_histories_move_by_a_row(algorithm, length):
    history = torch.rand(length, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    history[0, 2] = torch.nan
    rows = history.tolist()
    expected = rows[1:] + rows[:1]
    expected[0] = [0.0] * 3
    largest = {"max": history.amax(0), "most_recent": history[0].clone()}
    wanted = history[-1].clone() if callable(algorithm) else largest[algorithm]
    copy = history.clone()
    moved, amax = quantization._compute_amax_and_update_history(history, algorithm)
    assert moved is history
    assert torch.equal(history.nan_to_num(-1.0), torch.tensor(expected).nan_to_num(-1.0))
    assert torch.equal(amax.nan_to_num(-1.0), wanted.nan_to_num(-1.0))
    assert quantization._update_amax_history(copy) is copy
    assert torch.equal(copy.nan_to_num(-1.0), history.nan_to_num(-1.0))


@pytest.mark.parametrize("own", [False, True])
def test_an_update_of_both(own):
    def algorithm(amax, scale, fp8_max, recipe):
        return fp8_max / (2 * amax + recipe.margin)

    recipe = DelayedScaling(margin=1, scaling_factor_compute_algo=algorithm if own else None)
    history = torch.tensor([[0.5, 0.0], [2.0, 0.0]])
    scale = torch.tensor([3.0, 5.0])
    quantization._amax_and_scale_update(history, scale, 448.0, recipe)
    assert scale.tolist() == pytest.approx([448 / 5, 448.0] if own else [112.0, 5.0])
    assert history.tolist() == [[0.0, 0.0], [0.5, 0.0]]


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
@pytest.mark.parametrize("number_format", [Format.E4M3, Format.HYBRID])
def test_number_types(recipe, number_format):
    made = recipe(fp8_format=number_format)
    e4m3 = (DType.kFloat8E4M3, torch.float8_e4m3fn, 448)
    e5m2 = (DType.kFloat8E5M2, torch.float8_e5m2, 57344)
    for forward in (True, False):
        found = (
            quantization.get_fp8_te_dtype(made, forward),
            quantization.get_fp8_torch_dtype(made, forward),
            fp8.get_fp8_max(made, forward),
        )
        assert found == (e4m3 if forward or number_format is Format.E4M3 else e5m2)


def test_types_of_four_bits():
    assert quantization.get_fp4_te_dtype(NVFP4BlockScaling()) is DType.kFloat4E2M1
    with pytest.raises(ArgumentError, match="fp4_format is Format.E2M1, got None"):
        quantization.get_fp4_te_dtype(DelayedScaling())


def test_a_buffer_is_copied_to_tensors():
    buffer = torch.arange(6.0)
    outputs = [torch.zeros(2), torch.zeros(0), torch.zeros(4, dtype=torch.bfloat16)]
    quantization.split_and_copy(buffer, outputs, [2, 0, 4])
    assert [each.tolist() for each in outputs] == [[0.0, 1.0], [], [2.0, 3.0, 4.0, 5.0]]


def test_constants():
    assert constants.MXFP8_BLOCK_SCALING_SIZE == 32
    assert constants.NVFP4_BLOCK_SCALING_SIZE == 16
    assert constants.AttnTypes == ("self", "cross")
    assert constants.LayerTypes == ("encoder", "decoder")
    assert constants.GemmParallelModes == ("row", "column", None)
    assert len(constants.AttnMaskTypes) == 7
    assert set(constants.AttnBiasTypes) == {"pre_scale_bias", "post_scale_bias", "no_bias", "alibi"}
    layouts = constants.QKVLayouts
    assert len(layouts) == len(set(layouts)) == 25
    assert layouts[:5] == ("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd")
    assert layouts[5:6] + layouts[10:11] == ("bs3hd", "t3hd")
    assert layouts[14:20] == (
        "thd_thd_thd",
        "sbhd_bshd_bshd",
        "bshd_sbhd_sbhd",
        "thd_bshd_bshd",
        "thd_sbhd_sbhd",
        "paged_kv_bshd_bshd_bshd",
    )
    assert layouts[-1] == "paged_kv_thd_sbhd_sbhd"
