"""The rotation's kernel on the GPU: the bits of the formula, which torch computes on the CPU."""

from __future__ import annotations

import pytest
import torch

import te_fast.pytorch as te
from rope_cases import DTYPES, SIZES, check, check_unrotated
from te_fast.attention.rope import Heads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("heads", "width"), [*SIZES, (Heads(16, 4, 128), 128)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_product_of_queries_keys_and_values(heads, width, dtype, interleaved, in_place):
    for grouped in (False, True):
        own = heads._replace(is_grouped=grouped)
        for rows, fmt in (((37, 3), "sbhd"), ((2, 130), "bshd"), ((0, 3), "sbhd")):
            check(
                own, width, rows, dtype, "cuda", interleaved=interleaved, in_place=in_place, fmt=fmt
            )


@pytest.mark.parametrize("heads", [*(heads for heads, _ in SIZES), Heads(16, 4, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_without_angles(heads, dtype):
    for grouped in (False, True):
        own = heads._replace(is_grouped=grouped)
        for rows, order in (((37, 3), (1, 2, 0, 3)), ((2, 130), (0, 2, 1, 3))):
            check_unrotated(own, rows, dtype, "cuda", order)


def test_a_layer_in_a_graph_of_the_users():
    torch.manual_seed(0)
    options = {"attention_dropout": 0.0, "fuse_qkv_params": True, "qkv_weight_interleaved": False}
    layer = te.MultiheadAttention(256, 4, params_dtype=torch.bfloat16, **options)
    x = torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16)
    freqs = te.RotaryPositionEmbedding(64)(64)
    with torch.no_grad():
        wanted = layer(x, rotary_pos_emb=freqs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, rotary_pos_emb=freqs)
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, wanted)
