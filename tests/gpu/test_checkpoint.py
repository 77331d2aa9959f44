"""``te.checkpoint`` on the GPU, where backward runs on one of autograd's threads."""

import pytest
import torch
from torch import nn

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
OPTIONS = {"device": "cuda", "params_dtype": torch.bfloat16}


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        te.Linear(256, 256, **OPTIONS),
        te.LayerNormMLP(256, 512, normalization=None, **OPTIONS),
        te.Linear(256, 256, **OPTIONS),
    )


def train(net, recipe, *, remade, reentrant):
    seen = []
    torch.manual_seed(5)
    for i in range(4):
        x = (torch.randn(64, 256, device="cuda") * 3**i).bfloat16().requires_grad_()
        with te.autocast(recipe=recipe):
            y = te.checkpoint(net, x, use_reentrant=reentrant) if remade else net(x)
        y.backward(torch.randn(64, 256, device="cuda").bfloat16())
        seen += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in net.parameters())]
        net.zero_grad()
    return seen


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_differs(name, reentrant):
    recipe = RECIPES[name]()
    wanted = train(make(0), recipe, remade=False, reentrant=reentrant)
    got = train(make(0), recipe, remade=True, reentrant=reentrant)
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(one, other), index
