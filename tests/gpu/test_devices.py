"""Several GPUs: tensors on a device that is not the current one, in processes that have used no other device."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# To return to a device without a context, torch only notes the device, and allocates by its note; CUDA's current device
# is then another device. So nothing here may touch cuda:0 before te_fast has run.
STEPS = """
import sys
import torch
import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

current, device = sys.argv[1:]
if current != "none":
    torch.cuda.set_device(current) if current == device else torch.cuda.device(current).__enter__()
wanted = torch.cuda.current_device()
layers = [
    te.Linear(256, 128, device=device, params_dtype=torch.bfloat16),
    te.LayerNormMLP(128, 256, device=device, params_dtype=torch.bfloat16),
    te.ops.Sequential(te.ops.RMSNorm(128, device=device, dtype=torch.bfloat16),
                      te.ops.Linear(128, 256, device=device, dtype=torch.bfloat16), te.ops.GELU()),
]
x = torch.randn(64, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
for recipe in (DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()):
    for _ in range(3):
        x.grad = None
        y = x
        with te.autocast(recipe=recipe):
            for layer in layers:
                y = layer(y)
        y.float().sum().backward()
        assert y.device == x.grad.device == torch.device(device), (y.device, x.grad.device)
        assert torch.cuda.current_device() == wanted
    with torch.no_grad(), te.autocast(recipe=recipe):
        kept = layers[0](x)
    exact = x.detach().double() @ layers[0].weight.double().t() + layers[0].bias.double()
    assert ((kept.double() - exact).norm() / exact.norm()).item() < 0.045
mask = torch.rand(64, 8, device=device) < 0.4
probs = torch.rand(64, 8, device=device)
rows = int(mask.sum())
permuted, _, row_id_map = te.moe_permute_with_probs(x, probs, mask, rows)
order = mask.t().nonzero()[:, 1]
assert permuted.device == torch.device(device) and torch.equal(permuted, x[order])
merged = te.moe_unpermute(permuted, row_id_map, restore_shape=x.shape)
merged.float().sum().backward()
assert merged.device == torch.device(device)
assert te.moe_permute_and_quantize(x.detach(), probs, mask, rows)[1].device == torch.device(device)
assert torch.cuda.current_device() == wanted
torch.cuda.synchronize(device)
print("as wanted")
"""


@pytest.mark.parametrize(
    ("current", "device"),
    [("none", "cuda:1"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:1", "cuda:1")],
)
def test_a_process_that_touches_one_device_alone(current, device):
    run = subprocess.run(
        [sys.executable, "-c", STEPS, current, device],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.endswith("as wanted\n")
