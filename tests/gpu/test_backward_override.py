"""Recipes with ``backward_override`` on the GPU: against FP64 and the host backend."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import Float8BlockScaling, Float8CurrentScaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

RECIPES = {"current": Float8CurrentScaling, "block": Float8BlockScaling}
# One GEMM, its result rounded to the type.
BOUNDS = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def gradients(layer, x, dy, recipe):
    layer.zero_grad()
    x.grad = None
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


def relative(got, wanted):
    return ((got.double().cpu() - wanted.double().cpu()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_against_fp64_and_host(name, override, dtype):
    torch.manual_seed(1)
    layer = te.Linear(272, 144, device="cuda", params_dtype=dtype)
    torch.nn.init.normal_(layer.weight, std=0.1)
    x = torch.randn(200, 272, dtype=dtype, device="cuda", requires_grad=True)
    dy = torch.randn(200, 144, dtype=dtype, device="cuda")
    recipe = RECIPES[name](backward_override=override)
    host = te.Linear(272, 144, device="cpu", params_dtype=dtype)
    host.load_state_dict({key: value.cpu() for key, value in layer.state_dict().items()})
    wanted = gradients(host, x.detach().cpu().requires_grad_(), dy.cpu(), recipe)
    for _ in range(3):  # the third call is a replayed graph
        got = gradients(layer, x, dy, recipe)
        assert torch.equal(got["y"], gradients(layer, x, dy, RECIPES[name]())["y"])
        for key, value in gradients(layer, x, dy, recipe).items():
            # The FP8 product is summed in fewer bits than FP32 has.
            bound = 2e-3 if key == "y" else 0
            assert relative(value, wanted[key]) < max(2 * BOUNDS[dtype], bound), key
    if override == "high_precision":
        exact = {"dx": dy.double() @ layer.weight.double(), "dw": dy.double().t() @ x.double()}
        for key, value in exact.items():
            assert relative(got[key], value.detach()) < BOUNDS[dtype], key
