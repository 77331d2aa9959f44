"""Fields and constructor order of the recipes, and the names of the legacy modules."""

import inspect

import pytest

from te_fast.common import recipe
from te_fast.pytorch import fp8, quantization

SIGNATURES = {
    "DelayedScaling": "margin, fp8_format, amax_history_len, amax_compute_algo, "
    "scaling_factor_compute_algo, reduce_amax, fp8_dpa, fp8_mha, backward_override",
    "Float8CurrentScaling": "use_power_2_scales, fp8_format, fp8_gemm_fprop, fp8_gemm_dgrad, "
    "fp8_gemm_wgrad, fp8_dpa, fp8_mha, backward_override",
    "Float8BlockScaling": "use_f32_scales, fp8_format, x_block_scaling_dim, w_block_scaling_dim, "
    "grad_block_scaling_dim, fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad, fp8_dpa, fp8_mha, "
    "backward_override",
    "MXFP8BlockScaling": "margin, fp8_format, fp8_dpa, fp8_mha, backward_override, "
    "enable_2d_quantization",
    "NVFP4BlockScaling": "disable_rht, disable_stochastic_rounding, disable_2d_quantization, "
    "row_scaled_activation, nvfp4_4over6, nvfp4_4over6_e4m3_use_256, nvfp4_4over6_err_mode, "
    "fp4_format, fp8_format, fp8_dpa, fp8_mha, backward_override",
    "CustomRecipe": "qfactory, fp8_format, fp8_dpa, fp8_mha, backward_override, "
    "quantization_alignment",
    "MMParams": "use_split_accumulator",
    "QParams": "power_2_scale, amax_epsilon, random_hadamard_transform, stochastic_rounding, "
    "fp4_2d_quantization",
}

MANAGER = [
    "add_fp8_tensors_to_global_buffer",
    "copy_forward_fp8_meta_tensors_for_recompute",
    "fp8_graph_capturing",
    "get_autocast_state",
    "get_buffer_info",
    "get_fp8_group",
    "get_fp8_recipe",
    "get_fwd_bwd_key",
    "get_key_in_buffer",
    "get_meta_tensor_key",
    "get_old_fp8_meta_tensors_for_recompute",
    "get_skip_fp8_weight_update_tensor",
    "get_unique_autocast_key",
    "is_first_fp8_module",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_fp8_calibration",
    "is_fp8_enabled",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantization_state",
    "reduce_and_update_fp8_tensors",
    "reduce_tensor_across_group_op_max",
    "reset",
    "restore_fp8_meta_tensors",
    "set_autocast_state",
    "set_skip_fp8_weight_update_tensor",
    "split_key_in_buffer",
    "with_fp8_parameters",
    "with_high_precision_init_val",
]

STATE = [
    "fp8_enabled",
    "fp8_calibration",
    "fp8_recipe",
    "fp8_distributed_group",
    "fp8_parameters",
    "high_precision_init_val",
    "is_first_fp8_module",
    "fp8_graph_capturing",
    "autocast_depth",
    "global_amax_buffer",
    "global_amax_history_buffer",
    "global_scale_buffer",
    "fp8_tensors_recompute_buffer",
    "autocast_arguments",
    "skip_fp8_weight_update_tensor",
]


@pytest.mark.parametrize("name", SIGNATURES)
def test_fields(name):
    signature = inspect.signature(getattr(recipe, name))
    assert ", ".join(signature.parameters) == SIGNATURES[name]


def test_autocast_shows_its_signature():
    shown = str(inspect.signature(quantization.autocast))
    assert shown == (
        "(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False)"
    )


@pytest.mark.parametrize("name", MANAGER)
def test_manager_has(name):
    assert hasattr(quantization.FP8GlobalStateManager, name)


@pytest.mark.parametrize("name", STATE)
def test_state_has(name):
    assert hasattr(quantization.FP8GlobalStateManager.quantization_state, name)


def test_state_takes_no_other_attribute():
    with pytest.raises(AttributeError):
        quantization.FP8GlobalStateManager.quantization_state.fp8_enable = True


@pytest.mark.parametrize("name", fp8.__all__)
def test_legacy_module(name):
    assert getattr(fp8, name) is getattr(recipe if hasattr(recipe, name) else quantization, name)
