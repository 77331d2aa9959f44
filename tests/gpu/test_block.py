"""Layers as one autograd node on a GPU: the numbers of their layers one by one, by torch's kernels for attention."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_fast.pytorch as te
from recipes import RECIPES
from te_fast.attention.block import Block
from transformer_reference import HIDDEN, Plain, relative
from transformer_reference import make as made

pytestmark = pytest.mark.gpu

REGIONS = {None: nullcontext} | {
    name: partial(te.autocast, recipe=recipe()) for name, recipe in RECIPES.items()
}
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "chosen": None}
FAMILIES = {
    "gpt": {"fuse_qkv_params": True, "attn_input_format": "sbhd"},
    "llama": {
        "num_gqa_groups": 2,
        "bias": False,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
        "attn_input_format": "bshd",
    },
    "parts": {"num_gqa_groups": 2, "attn_input_format": "bshd", "self_attn_mask_type": "no_mask"},
}


def make(family, channels, dtype, **options):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0} | FAMILIES[family] | options
    sizes = (4 * channels, 8 * channels, 4)
    return te.TransformerLayer(*sizes, params_dtype=dtype, device="cuda", **options)


def poison():
    """Fill freed memory with NaN: an element that no kernel writes is one."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), float("nan"), device="cuda")


def trained(layer, x, region, angles, steps=2):
    """Node, and by name: results, gradients of the input and of parameters of each step."""
    found = {}
    for step in range(steps):
        layer.zero_grad()
        x.grad = None
        poison()
        with region():
            y = layer(x, rotary_pos_emb=angles)
        generator = torch.Generator("cuda").manual_seed(step)
        y.backward(torch.randn(y.shape, dtype=y.dtype, device="cuda", generator=generator))
        found |= {(step, name): p.grad for name, p in layer.named_parameters()}
        found |= {(step, "y"): y.detach(), (step, "dx"): x.grad}
    return y.grad_fn, found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("recipe", REGIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("rope", [False, True])
def test_the_numbers_of_layers_one_by_one(monkeypatch, kernel, recipe, family, channels, rope):
    layer = make(family, channels, torch.bfloat16)
    other = copy.deepcopy(layer)
    x = torch.randn(2, 136, 4 * channels, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    length = 2 if family == "gpt" else 136
    angles = te.RotaryPositionEmbedding(channels)(length) if rope else None
    allowed = nullcontext() if KERNELS[kernel] is None else sdpa_kernel([KERNELS[kernel]])
    with allowed:
        node, found = trained(layer, x, REGIONS[recipe], angles)
        monkeypatch.setattr(Block, "takes", staticmethod(lambda *_: False))
        _, wanted = trained(other, x, REGIONS[recipe], angles)
    assert type(node).__name__ == "CutBackward"
    for (step, name), got in found.items():
        want = wanted[step, name]
        assert got.isfinite().all()
        if name == "y" or name.startswith(("layernorm_mlp", "self_attention.proj")):
            assert torch.equal(got, want), (step, name)
        else:  # attention's backward adds in any order, and the input's gradient is rounded once instead of twice
            assert relative(got, want) < 2e-2, (step, name)


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_formulas(kernel, dtype):
    """A layer whose product is split without angles, beside plain torch in FP64."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        layer = made(dtype=dtype, device="cuda", fuse_qkv_params=True)
    x = torch.randn(24, 3, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    plain = Plain(layer)
    wide = x.detach().double().requires_grad_()
    with torch.device("cuda"), sdpa_kernel([KERNELS[kernel]]):
        y = layer(x)
        wanted = plain(wide, "causal")
        grad = torch.randn_like(y)
    assert type(y.grad_fn).__name__ == "CutBackward"
    y.backward(grad)
    wanted.backward(grad.double())
    tolerance = 3e-2 if dtype is torch.bfloat16 else 4e-3
    assert relative(y, wanted) < tolerance
    assert relative(x.grad, wide.grad) < tolerance
    for name, parameter in layer.named_parameters():
        theirs = plain.own[name].grad
        assert theirs.norm() < 1e-9 or relative(parameter.grad, theirs) < tolerance, name


@pytest.mark.parametrize("recipe", REGIONS)
def test_a_step_in_a_graph_of_the_users(recipe):
    layer = make("llama", 64, torch.bfloat16)
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        with REGIONS[recipe]():
            y = layer(x)
        y.float().square().mean().backward()
        return y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    for p in (x, *layer.parameters()):
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    found = [t.detach().clone() for t in (y, x.grad, *(p.grad for p in layer.parameters()))]
    assert all(t.isfinite().all() for t in found)
    for p in (x, *layer.parameters()):
        p.grad = None
    assert type(y.grad_fn).__name__ == "CutBackward"
    del y  # its graph keeps autograd's nodes, which remember the capture's stream
    if recipe == "delayed":
        return  # its scales have changed with the replay
    wanted = step()
    for got, want in zip(
        found, (wanted, x.grad, *(p.grad for p in layer.parameters())), strict=True
    ):
        assert relative(got, want) < 1e-2
