"""FusedAdam and functions over lists on a GPU: as on the CPU, without waiting, and inside of captured graphs."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.pytorch.optimizers import (
    FusedAdam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale_tensor,
)

pytestmark = pytest.mark.gpu
SHAPES = [(513, 129), (7,), (64, 64)]
KINDS = [
    {},
    {"master_weights": True},
    {"master_weights": True, "store_param_remainders": True},
    {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.uint8},
    {"capturable": True},
]


def weights(device):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(device))
        for s in SHAPES
    ]


def grads(step):
    generator = torch.Generator().manual_seed(10 + step)
    return [torch.randn(s, generator=generator).bfloat16() for s in SHAPES]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_adam_is_that_of_the_cpu(options):
    seen = {}
    for device in ("cpu", "cuda"):
        parameters = weights(device)
        optimizer = FusedAdam(parameters, lr=0.02, weight_decay=0.1, **options)
        for step in range(4):
            for parameter, grad in zip(parameters, grads(step), strict=True):
                parameter.grad = grad.to(device)
            optimizer.step()
        seen[device] = [parameter.detach().cpu().float() for parameter in parameters]
    for cpu, gpu in zip(*seen.values(), strict=True):
        assert torch.allclose(cpu, gpu, rtol=2**-7, atol=2e-3)


# torch warns that the mode is a prototype after it has set it.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("options", KINDS[:4], ids=str)
def test_a_step_does_not_wait(options):
    parameters = weights("cuda")
    optimizer = FusedAdam(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
        flag = torch.zeros(1, dtype=torch.int, device="cuda")
        lists = [[parameter.grad for parameter in parameters]]
        norm, _ = multi_tensor_applier(multi_tensor_l2norm, flag, lists)
        multi_tensor_applier(multi_tensor_scale_tensor, flag, lists * 2, 1.0 / norm)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step():
    captured, plain = weights("cuda"), weights("cuda")
    optimizers = [FusedAdam(each, lr=0.02, capturable=True) for each in (captured, plain)]
    for each in (captured, plain):
        for parameter in each:
            parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for _ in range(3):
        graph.replay()
        optimizers[1].step()
    assert int(optimizers[0].param_groups[0]["step"]) == int(optimizers[1].param_groups[0]["step"])
    assert all(torch.equal(a, b) for a, b in zip(captured, plain, strict=True))


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling()])
def test_quantised_parameters(recipe):
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(256, 256, params_dtype=torch.bfloat16)
    optimizer = FusedAdam(layer.parameters(), lr=0.01, master_weights=True)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(20):
        with te.autocast(recipe=recipe):
            loss = layer(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(dtype, smoothing):
    logits = torch.randn(4, 3, 129, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(0, 129, (4, 3), device="cuda")
    target[1, 2] = -100
    factors = torch.rand(4, 3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = te.parallel_cross_entropy(logits, target, smoothing)
        loss.backward(factors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = logits.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(
        wide.reshape(-1, 129), target.reshape(-1), reduction="none", label_smoothing=smoothing
    )
    wanted.backward(factors.double().reshape(-1))
    assert torch.allclose(loss.double().reshape(-1), wanted, rtol=1e-5, atol=1e-5)
    assert logits.grad.dtype is dtype
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert torch.allclose(logits.grad.double(), wide.grad, rtol=rounding, atol=1e-6)
    assert not logits.grad[1, 2].any()
