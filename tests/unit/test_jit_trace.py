"""torch.jit.trace sees no native launch: it would take results for constants, and so every call under it raises."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.errors import UnsupportedError
from te_fast.pytorch import ops
from te_fast.recipe import Float8CurrentScaling

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

MODULES = {
    "linear": lambda: te.Linear(32, 32, device="cpu"),
    "norm": lambda: te.LayerNorm(32, device="cpu"),
    "mlp": lambda: te.LayerNormMLP(32, 64, device="cpu"),
    "operations": lambda: ops.Sequential(ops.Linear(32, 32, device="cpu"), ops.GELU()),
    "experts": lambda: te.MoE(32, 64, num_experts=2, topk=1, device="cpu"),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_traced_modules_raise(name, fp8, grad):
    module, x = MODULES[name](), torch.randn(16, 32)
    with (
        torch.set_grad_enabled(grad),
        te.autocast(enabled=fp8),
        pytest.raises(UnsupportedError, match=r"torch\.jit\.trace .* use torch\.export"),
    ):
        torch.jit.trace(module, (x,), check_trace=False)
    assert module(x).shape == x.shape  # nothing is left behind


def test_traced_functions_raise():
    def double(x):
        return dispatch.dequantize(dispatch.quantize(x, Float8CurrentScaling())) * 2

    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(double, (torch.ones(16, 32),), check_trace=False)
