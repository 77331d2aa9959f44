"""Compiled blocks of several programs on a GPU train as eager ones do, also where CUDA graphs replay them."""

from __future__ import annotations

import copy

import pytest
import torch

import te_fast.pytorch as te
from graphs import needs_compile
from recipes import RECIPES

pytestmark = [
    pytest.mark.gpu,
    needs_compile,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS = {"dtype": torch.bfloat16, "device": "cuda"}
HOW = {
    "aot_eager": {"backend": "aot_eager"},
    "any rows": {"backend": "aot_eager", "dynamic": True},
    "inductor": {},
    "replayed": {"mode": "reduce-overhead"},
}

BLOCKS = {
    "MoE": lambda: te.MoE(256, 512, 4, topk=2, **OPTIONS),
    "TransformerLayer": lambda: te.TransformerLayer(
        256,
        512,
        4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.bfloat16,
        device="cuda",
    ),
}


@pytest.mark.parametrize("kind", ["none", *RECIPES])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_trains_as_eager_does(name, how, kind):
    """Torch's kernels around the programs differ, so FP8 rounds other numbers."""
    recipe = RECIPES[kind]() if kind != "none" else None
    eager = BLOCKS[name]()
    graphed = copy.deepcopy(eager)

    def forward(model, x):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return model(x)

    run = torch.compile(forward, fullgraph=True, **HOW[how])
    for rows in (64, 96, 96, 96):
        x = torch.randn(rows, *((2, 256) if name == "TransformerLayer" else (256,)), **OPTIONS)
        results = []
        for function, model in ((forward, eager), (run, graphed)):
            torch.compiler.cudagraph_mark_step_begin()
            given = x.clone().requires_grad_()
            y = function(model, given)
            y.float().square().mean().backward()
            # Together: the gradient of the keys' bias is nothing but rounding.
            grads = torch.cat([p.grad.flatten() for p in model.parameters()])
            results.append([y.detach().clone(), given.grad.clone(), grads])
            model.zero_grad()
        for one, two in zip(*results, strict=True):
            error = (one.double() - two.double()).norm() / one.double().norm().clamp_min(1e-12)
            assert error < 0.1
