"""Gradients of experts are rounded once, to the type of ``main_grad``, wherever the ``main_grad`` buffers lie."""

import pytest
import torch

import te_fast.pytorch as te
from selection import sampled
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.pytorch import ops

EXPERTS, ROWS, SIZE = 3, 128, 32


def _buffers(order):
    """Return one FP32 buffer per expert: in one memory in the experts' order or reversed, or apart."""
    values = torch.arange(EXPERTS * SIZE * SIZE, dtype=torch.float32) % 7
    parts = list(values.view(EXPERTS, SIZE, SIZE))
    if order == "reversed":  # the order in Megatron-LM's buffers
        return parts[::-1]
    return [part.clone() for part in parts] if order == "apart" else parts


def _layer(kind, later):
    options = {"bias": False, "device": "cpu", "delay_wgrad_compute": later}
    if kind == "layer":
        return te.GroupedLinear(
            EXPERTS,
            SIZE,
            SIZE,
            params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=True,
            **options,
        )
    return ops.GroupedLinear(
        EXPERTS, SIZE, SIZE, dtype=torch.bfloat16, accumulate_into_main_grad=True, **options
    )


@pytest.mark.parametrize(
    ("kind", "fp8", "later", "order"),
    sampled(
        ["layer", "operation"], [False, True], [False, True], ["in_order", "reversed", "apart"]
    ),
)
def test_gradients_are_rounded_to_the_type_of_main_grad_alone(kind, fp8, later, order):
    random = torch.Generator().manual_seed(3)
    # Small integers are exact in FP8 at a scale of one; their sums over all rows are exact in FP32, not in BF16.
    x = torch.randint(-7, 8, (ROWS * EXPERTS, SIZE), generator=random).bfloat16().requires_grad_()
    dy = torch.randint(1, 4, (ROWS * EXPERTS, SIZE), generator=random).bfloat16()
    layer = _layer(kind, later)
    weights = [getattr(layer, f"weight{expert}") for expert in range(EXPERTS)]
    expected = []
    for weight, buffer, a, b in zip(
        weights, _buffers(order), x.detach().split(ROWS), dy.split(ROWS), strict=True
    ):
        weight.main_grad = buffer
        expected.append(buffer.double() + b.double().T @ a.double())
    assert any((sums != sums.bfloat16()).any() for sums in expected)
    counts = [ROWS] * EXPERTS
    with te.autocast(enabled=fp8, recipe=DelayedScaling()):
        y = layer(x, counts if kind == "layer" else torch.tensor(counts))
    y.backward(dy)
    if later:
        layer.backward_dw()
    for weight, sums in zip(weights, expected, strict=True):
        assert weight.grad is None
        assert torch.equal(weight.main_grad.double(), sums)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_frozen_experts_and_overwritten_buffers_apart(later):
    layer = _layer("layer", later)
    weights = [getattr(layer, f"weight{expert}") for expert in range(EXPERTS)]
    weights[1].requires_grad_(False)
    weights[2].overwrite_main_grad = True
    for weight, buffer in zip(weights, _buffers("reversed"), strict=True):
        if weight.requires_grad:
            weight.main_grad = buffer
    before = weights[0].main_grad.clone()
    x = torch.ones(ROWS * EXPERTS, SIZE, dtype=torch.bfloat16) * 3
    layer(x, [1, ROWS * EXPERTS - 130, 129]).sum().backward()
    if later:
        layer.backward_dw()
    assert torch.equal(weights[0].main_grad, before + 3)
    assert torch.equal(weights[2].main_grad, torch.full((SIZE, SIZE), 387.0))
    assert not hasattr(weights[1], "main_grad")


def _chain(kind, single):
    """Return operations whose weights are fused, the module of each, and their chain."""
    options = {"device": "cpu", "accumulate_into_main_grad": True}
    experts = ops.GroupedLinear(EXPERTS, SIZE, SIZE, single_grouped_weight=single, **options)
    if kind == "alone":
        return ops.Sequential(experts)
    dense = (Inherits if kind == "Python" else ops.BasicLinear)(SIZE, SIZE, **options)
    between = [ops.L2Normalization()] if kind == "Python" else []
    return ops.Sequential(experts, *between, dense)


class Inherits(ops.BasicLinear):
    """A user's operation, which runs in Python."""

    def op_backward(self, ctx, grad_output):
        return super().op_backward(ctx, grad_output)


@pytest.mark.parametrize("later", ["now", "later"])
@pytest.mark.parametrize("how", ["added", "first microbatch", "attribute"])
@pytest.mark.parametrize("rows", [0, 16])
@pytest.mark.parametrize(
    ("kind", "single", "fp8"),
    sampled(["alone", "native", "Python"], [False, True], [False, True]),
)
def test_gradients_are_added_or_overwrite_whatever_the_rows_and_neighbours(
    kind, single, fp8, rows, how, later
):
    chain = _chain(kind, single)
    chain[0].delay_wgrad_compute = chain[0]._handle.delay_wgrad_compute = later == "later"
    weights = [weight for name, weight in chain.named_parameters() if "weight" in name]
    gradients = []
    for before in (0.0, 64.0):
        for weight in weights:
            weight.main_grad = torch.full(weight.shape, before)
            weight.overwrite_main_grad = how == "attribute"
        torch.manual_seed(0)
        x = torch.randn(rows, SIZE, requires_grad=True)
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            is_first = True if how == "first microbatch" else None
            y = chain(x, torch.tensor([rows, 0, 0]), is_first_microbatch=is_first)
        y[:, ::2].sum().backward()
        chain[0].backward_dw()
        assert x.grad.shape == x.shape
        assert all(weight.grad is None for weight in weights)
        kept = before if how == "added" else 0.0
        gradients.append([weight.main_grad - kept for weight in weights])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-4)
        assert rows or not first.any()
