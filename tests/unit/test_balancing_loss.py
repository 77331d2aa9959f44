"""The node of a block's balancing loss against torch in FP64."""

import pytest
import torch

import te_fast
from te_fast.experts.balancing_loss import balancing_loss

TOKENS, TOPK, COEFF = 37, 3, 0.2


def scores_of(logits, score_function):
    if score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    if score_function == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(logits).sqrt()
    return scores / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("experts", [4, 10, 256])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_value_and_gradient(score_function, experts):
    torch.default_generator.manual_seed(1)
    logits = torch.randn(TOKENS, experts, requires_grad=True)
    loss = balancing_loss(logits, TOPK, score_function, COEFF)
    (3 * loss).backward()
    theirs = logits.detach().double().requires_grad_()
    scores = scores_of(theirs, score_function)
    counts = torch.zeros(experts, dtype=torch.float64)
    for row in scores.detach():
        counts[row.topk(TOPK).indices] += 1
    expected = COEFF * experts / (TOPK * TOKENS**2) * (scores.sum(0) * counts).sum()
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    # The terms that cancel are as large as a score's gradient, and FP32 has seven digits of each term.
    largest = COEFF * experts / (TOPK * TOKENS**2) * counts.max().item()
    torch.testing.assert_close(logits.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6 * largest)


def test_one_token_and_nan():
    logits = torch.zeros(1, 4, requires_grad=True)
    loss = balancing_loss(logits, 4, "softmax", 1.0)
    assert loss.item() == pytest.approx(1.0)
    loss.backward()
    assert not logits.grad.any()
    assert balancing_loss(torch.full((2, 4), torch.nan), 1, "sigmoid", 1.0).isnan()


def test_no_second_gradient():
    logits = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(te_fast.UnsupportedError, match="create_graph"):
        torch.autograd.grad(balancing_loss(logits, 1, "softmax", 1.0), logits, create_graph=True)
