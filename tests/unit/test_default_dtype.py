"""Numbers do not depend on ``torch.set_default_dtype``, which programs set while they make models in BF16."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast.pytorch.optimizers import FusedAdam, multi_tensor_adam, multi_tensor_l2norm


def under(dtype, function):
    """Call a function under another default type."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return function()
    finally:
        torch.set_default_dtype(former)


def check(function):
    """Compare what a function returns under three default types, bit for bit."""
    expected = under(torch.float32, function)
    for dtype in (torch.bfloat16, torch.float64):
        for got, wanted in zip(under(dtype, function), expected, strict=True):
            assert got.dtype is wanted.dtype
            assert torch.equal(got, wanted)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias_correction": False},
        {"capturable": True},
        {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
        {"master_weights": True, "master_weight_dtype": torch.float16},
    ],
    ids=str,
)
def test_steps_of_fused_adam(options):
    def steps():
        weight = torch.nn.Parameter(numbers(64))
        nothing = torch.nn.Parameter(weight.new_empty(0))
        optimizer = FusedAdam([weight, nothing], lr=0.01, **options)
        for seed in range(2):
            weight.grad, nothing.grad = numbers(64, seed=seed), nothing.detach()
            optimizer.step()
            optimizer.param_groups[0]["step"] += 255  # 257 is no BF16 number
        return [weight.detach(), *optimizer.state_dict()["state"][0].values()]

    check(steps)


def test_functions_over_lists():
    flag = torch.zeros(1, dtype=torch.int)

    def step():
        lists = [[numbers(9, seed=seed)] for seed in range(3)] + [[numbers(9, seed=3).abs()]]
        multi_tensor_adam(0, flag, lists, 0.01, 0.9, 0.999, 1e-8, 257, 1, 1, 0.01)
        return [each[0] for each in lists] + list(multi_tensor_l2norm(0, flag, [[]], True))

    check(step)


def test_default_slopes_of_alibi():
    layer = te.DotProductAttention(
        12, 16, attention_dropout=0.0
    )  # slopes of 12 heads are no powers of 2
    q = numbers(8, 2, 12, 16)
    check(lambda: [layer(q, q, q, core_attention_bias_type="alibi")])
