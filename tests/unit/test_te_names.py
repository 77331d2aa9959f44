"""Modules where code for Transformer Engine looks for names, and the errors for missing names."""

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.errors import MissingError, UnsupportedError
from te_fast.layers.base import TransformerEngineBaseModule
from te_fast.runtime.main_grad import get_dummy_wgrad

RECORDED = json.loads(
    (Path(__file__).parents[1] / "api" / "te_signatures.json").read_text(encoding="utf-8")
)

PATHS = [
    ("module", "Linear", te.Linear),
    ("module", "LayerNormLinear", te.LayerNormLinear),
    ("module", "LayerNormMLP", te.LayerNormMLP),
    ("module", "LayerNorm", te.LayerNorm),
    ("module", "RMSNorm", te.RMSNorm),
    ("module", "Fp8Padding", te.Fp8Padding),
    ("module", "Fp8Unpadding", te.Fp8Unpadding),
    ("attention", "DotProductAttention", te.DotProductAttention),
    ("attention", "RotaryPositionEmbedding", te.RotaryPositionEmbedding),
    ("attention.dot_product_attention", "DotProductAttention", te.DotProductAttention),
    (
        "attention.dot_product_attention.dot_product_attention",
        "DotProductAttention",
        te.DotProductAttention,
    ),
    ("attention.multi_head_attention", "MultiheadAttention", te.MultiheadAttention),
    ("attention.inference", "InferenceParams", te.InferenceParams),
    ("attention.rope", "RotaryPositionEmbedding", te.RotaryPositionEmbedding),
    ("transformer", "TransformerLayer", te.TransformerLayer),
    ("module.base", "TransformerEngineBaseModule", TransformerEngineBaseModule),
    ("module.base", "get_dummy_wgrad", get_dummy_wgrad),
    ("graph", "make_graphed_callables", te.make_graphed_callables),
    ("distributed", "CudaRNGStatesTracker", te.CudaRNGStatesTracker),
    ("module.linear", "Linear", te.Linear),
    ("module.layernorm_linear", "LayerNormLinear", te.LayerNormLinear),
    ("module.layernorm_mlp", "LayerNormMLP", te.LayerNormMLP),
    ("module.layernorm", "LayerNorm", te.LayerNorm),
    ("module.rmsnorm", "RMSNorm", te.RMSNorm),
    ("module.fp8_padding", "Fp8Padding", te.Fp8Padding),
    ("module.fp8_unpadding", "Fp8Unpadding", te.Fp8Unpadding),
    ("attention", "apply_rotary_pos_emb", te.attention.rope.apply_rotary_pos_emb),
    ("attention", "_SplitAlongDim", te.utils.SplitAlongDim),
    ("utils", "get_cudnn_version", te.get_cudnn_version),
    ("fp8", "get_fp8_te_dtype", te.quantization.get_fp8_te_dtype),
]


@pytest.mark.parametrize(("path", "name", "thing"), PATHS)
def test_layers_are_where_transformer_engine_has_them(path, name, thing):
    assert getattr(importlib.import_module(f"te_fast.pytorch.{path}"), name) is thing


@pytest.mark.parametrize(
    "use",
    [
        "import te_fast as te; te.common.recipe.DelayedScaling(); te.pytorch.Linear",
        "import te_fast.pytorch as te; te.fp8.check_fp8_support(); te.fp8.FP8GlobalStateManager",
        "import te_fast.pytorch as te; te.module.base.TransformerEngineBaseModule; te.module.Linear",
        "import te_fast.pytorch as te; te.distributed.checkpoint; te.quantization.autocast",
        "import te_fast.pytorch as te; te.permutation.moe_permute; te.ops.Linear",
    ],
)
def test_one_import_reaches_the_submodules(use, fresh):
    assert fresh(use) == ""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (te, "MXFP8Tensor"),
        (te.cpu_offload, "start_offload"),
        (te.optimizers, "multi_tensor_adam_fp8"),
        (te.attention, "FusedMLAQUpProjRopeQuant"),
        (te.cpp_extensions, "fused_attn_fwd"),
        (te.utils, "mark_grouped_tensor"),
        (te.distributed, "symmetric_all_reduce"),
        (te.fp8, "RecipeState"),
        (te.module.base, "initialize_ub"),
        (te.quantization, "CustomRecipeState"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_missing_says_so(module, name):
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None
    with pytest.raises(MissingError, match=rf"{module.__name__}\.{name} is not there yet; keep"):
        getattr(module, name)
    with pytest.raises(AttributeError):
        getattr(module, name)
    with pytest.raises(UnsupportedError):
        getattr(module, name)
    with pytest.raises(ImportError):
        exec(f"from {module.__name__} import {name}", {})


@pytest.mark.parametrize(
    "module",
    [
        te,
        te.ops,
        te.ops.basic,
        te.distributed,
        te.fp8,
        te.module,
        te.module.base,
        te.quantization,
        te.utils,
    ],
    ids=lambda module: module.__name__,
)
def test_what_neither_has_is_a_plain_attribute_error(module):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'x'"):
        module.x  # noqa: B018
    assert not issubclass(AttributeError, MissingError)


@pytest.mark.parametrize("name", ["Recipe", "DelayedScaling", "Float8CurrentScaling", "Format"])
def test_older_code_finds_recipes_beside_the_region(name):
    assert getattr(te.fp8, name) is getattr(te_fast.common.recipe, name)


@pytest.mark.parametrize(
    ("thing", "module"),
    [
        (te.Linear, "te_fast.pytorch"),
        (te.LayerNorm, "te_fast.pytorch"),
        (te.autocast, "te_fast.pytorch"),
        (te.checkpoint, "te_fast.pytorch"),
        (te.moe_permute, "te_fast.pytorch"),
        (te.permutation.moe_dropped_rows, "te_fast.pytorch.permutation"),
        (te.utils.SplitAlongDim, "te_fast.pytorch.utils"),
        (te.jit.lazy_compile, "te_fast.pytorch.jit"),
        (te.quantization.get_fp8_max, "te_fast.pytorch.quantization"),
        (te.quantization.DelayedScalingRecipeState, "te_fast.pytorch.quantization"),
        (TransformerEngineBaseModule, "te_fast.pytorch.module.base"),
        (te.ops.GELU, "te_fast.pytorch.ops"),
        (te.ops.LayerNorm, "te_fast.pytorch.ops"),
        (te.ops.Sequential, "te_fast.pytorch.ops"),
        (te.ops.basic.glu.GatedActivation, "te_fast.pytorch.ops.basic.glu"),
        (Float8CurrentScaling, "te_fast.common.recipe"),
    ],
)
def test_things_say_where_users_import_them(thing, module):
    """Pickles hold these names."""
    assert thing.__module__ == module
    assert getattr(importlib.import_module(module), thing.__name__) is thing


# What Transformer Engine's modules define, apart from the names that te_fast says it lacks (version 2.20).
@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "utils",
            "SplitAlongDim all_close assert_dim_for_fp8_exec assert_viewless_tensor attention_mask_func "
            "canonicalize_device canonicalize_dtype canonicalize_process_group cast_if_needed ceil_div "
            "check_dim_for_fp8_exec clear_tensor_data combine_tensors compare_tensors deinterleave_glu_tensor "
            "devices_match divide ensure_divisibility get_cached_ones_tensor get_cudnn_version get_default_init_method "
            "get_device_compute_capability get_nvtx_range_context get_sm_count gpu_autocast_ctx init_method_constant "
            "init_method_normal interleave_glu_tensor is_bf16_available is_bf16_compatible "
            "is_non_tn_fp8_gemm_supported make_weak_ref needs_quantized_gemm nvtx_range_pop nvtx_range_push "
            "print_rank_0 requires_grad round_up_to_nearest_multiple safely_set_viewless_tensor_data "
            "scaled_init_method_normal split_tensor_along_dim torch_get_autocast_gpu_dtype validate_ctx_manager "
            "validate_rng_states_func",
        ),
        (
            "constants",
            "DType TE_DType TE_DType_To_Torch FP8FwdTensorIdx FP8BwdTensorIdx AttnMaskTypes AttnTypes AttnBiasTypes "
            "QKVLayouts LayerTypes GemmParallelModes dist_group_type MXFP8_BLOCK_SCALING_SIZE NVFP4_BLOCK_SCALING_SIZE",
        ),
        (
            "jit",
            "lazy_compile jit_fuser dropout_fuser no_torch_dynamo set_jit_fusion_options bias_gelu_fused_ gelu_fused_ "
            "bgrad_dgelu_fused_ dgelu_fused_ l2normalization_fused_ l2normalization_fwd_fused_ "
            "l2normalization_backward_fused_ bias_gelu_fused bgrad_dgelu_fused l2normalization_fused "
            "l2normalization_fwd_fused l2normalization_backward_fused bias_dropout_add get_bias_dropout_add "
            "bias_dropout_add_fused_train_ bias_dropout_add_fused_train bias_dropout_add_fused_inference_ "
            "bias_dropout_add_fused_inference warmup_jit_bias_dropout_add warmup_jit_bias_dropout_add_all_dtypes "
            "warmup_jit_bias_gelu warmup_jit_bias_gelu_all_dtypes warmup_jit_l2normalization "
            "warmup_jit_l2normalization_all_dtypes",
        ),
        (
            "quantization",
            "get_fp8_torch_dtype get_fp8_te_dtype get_fp4_te_dtype get_fp8_max split_and_copy _update_amax_history "
            "_default_get_amax_and_update_history _default_sf_compute _compute_amax_and_update_history "
            "_compute_scaling_factor _amax_and_scale_update",
        ),
    ],
    ids=lambda value: value.partition(" ")[0],
)
def test_functions_are_where_transformer_engine_has_them(module, names):
    loaded = importlib.import_module(f"te_fast.pytorch.{module}")
    assert [name for name in names.split() if not hasattr(loaded, name)] == []


def test_the_version_that_the_names_are_those_of():
    assert f"Transformer Engine {te_fast.TRANSFORMER_ENGINE_VERSION} " in RECORDED["source"]


def test_a_copy_that_is_no_package_has_no_version(monkeypatch):
    """Code that asks for a version tests for the attribute by hasattr."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert not hasattr(te_fast, "__version__")
    with pytest.raises(AttributeError, match="not from its package"):
        te_fast.__version__  # noqa: B018


@pytest.mark.parametrize("layer", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_clearing_the_workspaces_frees_the_quantised_weights(layer):
    module = layer(32, 32, device="cpu")
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))

    def run(*, first):
        with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
            return module(x, is_first_microbatch=first)

    expected = run(first=True)
    assert module._fp8_workspaces
    module._fp8_workspaces.clear()
    assert not module._fp8_workspaces
    assert torch.equal(run(first=False), expected)
    assert module._fp8_workspaces


@pytest.mark.parametrize("layer", [te.Linear, te.LayerNormLinear])
def test_layers_tell_the_name_of_their_userbuffers(layer):
    assert layer(32, 32, device="cpu").ub_name is None
