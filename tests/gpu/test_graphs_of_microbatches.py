"""Graphs of single layers in one pool, as Megatron-LM's own CUDA graphs are: later microbatches replay them, too."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fast.pytorch as te
from recipes import RECIPES
from te_fast.pytorch.fp8 import FP8GlobalStateManager
from te_fast.pytorch.graph import set_capture_end, set_capture_start

pytestmark = [pytest.mark.gpu]
#: Weights are as large as memory that a call frees, so that torch's allocator gives them such memory.
ROWS, COLS, FFN, LAYERS = 1024, 1024, 4096, 3


@pytest.fixture
def flag():
    """The flag that tells graphs to quantise no weights; other tests have none."""
    state = FP8GlobalStateManager.quantization_state
    former = state.skip_fp8_weight_update_tensor
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
    yield FP8GlobalStateManager.set_skip_fp8_weight_update_tensor
    set_capture_end()
    state.skip_fp8_weight_update_tensor = former


def make():
    return te.LayerNormMLP(COLS, FFN, params_dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("kind", ["current", "block"])
def test_a_later_microbatch_reads_the_weights_that_the_first_has_quantised(flag, kind):
    recipe = RECIPES[kind]()
    layers = [make() for _ in range(LAYERS)]
    eager = copy.deepcopy(layers)
    x = torch.randn(ROWS, COLS, dtype=torch.bfloat16, device="cuda")
    set_capture_start()
    for layer in layers:  # the warm-up
        with te.autocast(recipe=recipe):
            layer(x.detach().requires_grad_(), is_first_microbatch=False).sum().backward()
        layer.zero_grad()
    torch.cuda.synchronize()

    pool, graphs, inputs, outputs = torch.cuda.graph_pool_handle(), [], [], []
    whole = x
    for layer in layers:
        inputs.append(whole.detach().requires_grad_())
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool), te.autocast(recipe=recipe):
            outputs.append(layer(inputs[-1], is_first_microbatch=False))
        whole = outputs[-1]
    backwards, gradients = [], [torch.randn_like(x)]
    for layer, given, result in zip(layers[::-1], inputs[::-1], outputs[::-1], strict=True):
        backwards.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(backwards[-1], pool=pool):
            found = torch.autograd.grad(result, [given, *layer.parameters()], gradients[-1])
        gradients.append(found[0])
    set_capture_end()

    for step in range(3):
        for layer, other in zip(layers, eager, strict=True):
            for one, two in zip(layer.parameters(), other.parameters(), strict=True):
                with torch.no_grad():
                    one.add_(torch.randn_like(one) * 0.02)
                    two.copy_(one)
        for microbatch in range(3):
            flag(microbatch > 0)
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                gradients[0].copy_(torch.randn_like(x))
            for graph in (*graphs, *backwards):
                graph.replay()
            given = x.clone().requires_grad_()
            expected = given
            with te.autocast(recipe=recipe):
                for layer in eager:
                    expected = layer(expected)
            expected.backward(gradients[0])
            assert torch.equal(outputs[-1], expected), (step, microbatch)
            assert torch.equal(gradients[-1], given.grad), (step, microbatch)
