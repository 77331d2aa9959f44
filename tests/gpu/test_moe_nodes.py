"""A block's router and its balancing loss on the GPU: against FP64, the same bits in poisoned memory and in a graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
from te_fast.experts.balancing_loss import balancing_loss  # noqa: E402
from te_fast.experts.route_tokens import route_tokens  # noqa: E402
from te_fast.moe.choice import Choice  # noqa: E402

pytestmark = pytest.mark.gpu

HIDDEN, TOPK = 512, 4


def poison():
    torch.cuda.synchronize()
    kept = [torch.full((1 << 23,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    kept += [torch.full((1 << 12,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del kept


def step(tokens, weight, grad):
    """Probabilities, map, loss, and gradients of tokens and weight."""
    choice = Choice(TOPK, 0, 0, "softmax", "chosen", 1.0)
    probs, chosen, logits = route_tokens(tokens, weight, None, choice)
    loss = balancing_loss(logits, TOPK, "softmax", 0.1)
    found = torch.autograd.grad([probs, loss], [tokens, weight], [grad, torch.ones_like(loss)])
    return [probs.detach(), chosen, loss.detach(), *found]


def tensors(tokens, experts):
    torch.manual_seed(1)
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(experts, HIDDEN, device="cuda") / 16
    return x, weight.requires_grad_(), torch.randn(tokens, experts, device="cuda")


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (257, 33), (1000, 256)])
def test_values_gradients_and_bits(tokens, experts):
    x, weight, grad = tensors(tokens, experts)
    mine = step(x, weight, grad)
    for _ in range(5):
        poison()
        assert all(map(torch.equal, step(x, weight, grad), mine))
    probs, chosen, loss, dx, dweight = mine
    own, leaf = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    logits = own @ leaf.t()
    expected = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    scores = logits.softmax(-1)
    wanted = 0.1 * experts / (TOPK * tokens**2) * (scores.sum(0) * chosen.sum(0)).sum()
    torch.testing.assert_close(probs.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-4, atol=0)
    torch.autograd.backward([expected, wanted], [grad.double(), torch.ones_like(wanted)])
    for got, theirs in ((dx, own.grad), (dweight, leaf.grad)):
        error = (got.double() - theirs).norm() / theirs.norm()
        assert error < (2**-8 if got.dtype == torch.bfloat16 else 1e-4)


def test_captured():
    x, weight, grad = tensors(300, 64)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(x, weight, grad)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, weight, grad)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, step(x, weight, grad)))
