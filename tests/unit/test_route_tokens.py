"""The router's node of a block against torch in FP64."""

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from te_fast.experts.route_tokens import route_tokens
from te_fast.moe.choice import Choice
from te_fast.runtime.compiling import is_unseen

TOKENS, HIDDEN, EXPERTS, TOPK = 12, 24, 10, 3
CHOICES = {
    "softmax": Choice(TOPK, 0, 0, "softmax", "chosen", 1.0),
    "softmax before": Choice(TOPK, 0, 0, "softmax", "before", 2.5),
    "sigmoid": Choice(TOPK, 5, 3, "sigmoid", "chosen", 1.0),
}


def given(dtype, weight_dtype, shape=(3, 4)):
    torch.default_generator.manual_seed(1)
    tokens = torch.randn(*shape, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(EXPERTS, HIDDEN).to(weight_dtype).requires_grad_()
    return tokens, weight, torch.randn(TOKENS, EXPERTS), torch.randn(TOKENS, EXPERTS)


def reference(tokens, weight, chosen, choice):
    """Probabilities and logits of the experts that were chosen."""
    logits = tokens.reshape(-1, HIDDEN) @ weight.t()
    if choice.score_function == "sigmoid":
        scores = logits.sigmoid() * chosen
        scores = scores / scores.sum(-1, keepdim=True)
    elif choice.over == "before":
        scores = logits.softmax(-1) * chosen
    else:
        scores = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    return scores * choice.factor, logits


@pytest.mark.parametrize("wanted", ["probs", "logits", "both"])
@pytest.mark.parametrize(
    "types",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2],
    ids=str,
)
@pytest.mark.parametrize("name", CHOICES)
def test_values_and_gradients(name, types, wanted):
    tokens, weight, grad, grad_logits = given(*types)
    choice = CHOICES[name]
    probs, chosen, logits = route_tokens(tokens, weight, None, choice)
    assert (chosen.sum(-1) == TOPK).all()
    theirs = [tensor.detach().double().requires_grad_() for tensor in (tokens, weight)]
    expected, expected_logits = reference(*theirs, chosen, choice)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.double(), expected_logits, rtol=1e-5, atol=1e-5)
    terms = {
        "probs": [(probs, expected, grad)],
        "logits": [(logits, expected_logits, grad_logits)],
        "both": [(probs, expected, grad), (logits, expected_logits, grad_logits)],
    }[wanted]
    torch.autograd.backward([mine for mine, _, _ in terms], [grad for _, _, grad in terms])
    torch.autograd.backward([theirs for _, theirs, _ in terms], [g.double() for _, _, g in terms])
    for mine, other in zip((tokens, weight), theirs, strict=True):
        assert mine.grad.shape == mine.shape
        # A gradient is a sum in FP32, which is rounded once to the tensor's type.
        close = 2**-8 if mine.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=close, atol=close / 100)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_wants_no_gradient_gets_none(frozen):
    tensors = given(torch.float32, torch.float32)
    tensors[frozen].requires_grad_(False)
    probs, *_ = route_tokens(*tensors[:2], None, CHOICES["softmax"])
    probs.backward(tensors[2])
    assert tensors[frozen].grad is None
    assert tensors[1 - frozen].grad is not None


def test_biases_choose_and_do_not_weigh():
    tokens, weight, *_ = given(torch.float32, torch.float32)
    bias = torch.zeros(EXPERTS)
    bias[4] = 10.0
    probs, chosen, logits = route_tokens(
        tokens, weight, bias, Choice(1, 0, 0, "sigmoid", "chosen", 1.0)
    )
    assert chosen[:, 4].all()
    torch.testing.assert_close(probs[:, 4], logits[:, 4].sigmoid(), rtol=1e-5, atol=1e-6)


def test_strided_tokens_and_none():
    tokens, weight, *_ = given(torch.float32, torch.float32, shape=(4, 3))
    whole = route_tokens(tokens.transpose(0, 1), weight, None, CHOICES["softmax"])
    plain = route_tokens(tokens.transpose(0, 1).contiguous(), weight, None, CHOICES["softmax"])
    assert all(map(torch.equal, whole, plain))
    probs, *_ = route_tokens(tokens[:0], weight, None, CHOICES["softmax"])
    assert probs.shape == (0, EXPERTS)
    probs.sum().backward()
    assert not weight.grad.any()


def test_no_second_gradient():
    tokens, weight, *_ = given(torch.float32, torch.float32)
    probs, *_ = route_tokens(tokens, weight, None, CHOICES["softmax"])
    with pytest.raises(te_fast.UnsupportedError, match="create_graph"):
        torch.autograd.grad(probs.sum(), tokens, create_graph=True)


def test_those_who_look_see_torchs_operators():
    class Own(torch.Tensor):
        pass

    x = torch.ones(2)
    assert is_unseen(x, torch.nn.Parameter(x))
    assert not is_unseen(x, x.as_subclass(Own))
    assert not torch.func.vmap(lambda row: torch.tensor(is_unseen(row)))(torch.ones(3, 2)).any()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert not is_unseen(x)


def test_loss_alone_trains_the_router():
    torch.default_generator.manual_seed(2)
    block = te.MoE(32, 48, 6, 2, device="cpu", dtype=torch.float32, aux_loss_coeff=0.1)
    x = torch.randn(9, 32, requires_grad=True)
    _, loss = block(x)
    loss.backward()
    mine = block.router.grad.clone(), x.grad.clone()
    leaf = block.router.detach().double().requires_grad_()
    own = x.detach().double().requires_grad_()
    logits = own @ leaf.t()
    scores = logits.softmax(-1)
    counts = torch.zeros(6, dtype=torch.float64)
    for row in scores.detach():
        counts[row.topk(2).indices] += 1
    (0.1 * 6 / (2 * 9**2) * (scores.sum(0) * counts).sum()).backward()
    torch.testing.assert_close(mine[0].double(), leaf.grad, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(mine[1].double(), own.grad, rtol=1e-4, atol=1e-8)
    assert all(p.grad is None for p in block.experts.parameters())
