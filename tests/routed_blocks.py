"""Whole blocks of experts with their routers: an FP64 reference, and the parts of a program with a router."""

import torch

import te_fast.pytorch as te
from recipes import RECIPES
from te_fast.runtime import native

HIDDEN, FFN, EXPERTS, TOPK = 32, 48, 8, 2
ALL = {"high": lambda: None, **RECIPES}

#: Ways to choose experts.
WAYS = {
    "softmax": {},
    "softmax before": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "groups": {"num_groups": 4, "group_topk": 2},
    "sigmoid": {"score_function": "sigmoid"},
    "biased": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 1.5},
    "biased groups": {
        "score_function": "sqrtsoftplus",
        "expert_bias": True,
        "num_groups": 4,
        "group_topk": 1,
    },
}


def make(device="cpu", dtype=torch.float32, sizes=(HIDDEN, FFN, EXPERTS, TOPK), **options):
    torch.default_generator.manual_seed(3)
    block = te.MoE(*sizes, device="cpu", dtype=dtype, **options)
    if block.expert_bias is not None:
        block.expert_bias.copy_(torch.linspace(0.4, -0.4, sizes[2]))
    return block.to(device)


def tensors(shape=(3, 13), dtype=torch.float32, device="cpu", hidden=HIDDEN):
    torch.default_generator.manual_seed(4)
    x, grad = (torch.randn(*shape, hidden, dtype=dtype).to(device) for _ in range(2))
    return x.requires_grad_(), grad


def scores_of(block, logits):
    if block.score_function == "sigmoid":
        return logits.sigmoid()
    if block.score_function == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return logits.softmax(-1) if block.use_pre_softmax else logits


def best(values, count):
    return torch.zeros_like(values, dtype=torch.bool).scatter(
        -1, values.topk(count, -1).indices, True
    )


def chosen_of(block, logits):
    """The mask of the chosen experts."""
    scores, topk = scores_of(block, logits.detach()), block.topk
    if block.expert_bias is not None:
        scores = scores + block.expert_bias.double()
    if block.num_groups:
        groups = scores.view(len(scores), block.num_groups, -1)
        sums = groups.topk(topk // block.group_topk, -1).values.sum(-1)
        inside = best(sums, block.group_topk).unsqueeze(-1).expand_as(groups)
        scores = groups.masked_fill(~inside, -torch.inf).view_as(scores)
    return best(scores, topk)


def probs_of(block, logits, chosen):
    scores = scores_of(block, logits)
    if block.score_function == "softmax":
        probs = (
            scores * chosen
            if block.use_pre_softmax
            else logits.masked_fill(~chosen, -torch.inf).softmax(-1)
        )
    else:
        probs = scores * chosen
        probs = probs / probs.sum(-1, keepdim=True)
    return probs * (block.scaling_factor or 1.0)


def loss_of(block, logits):
    tokens, experts = logits.shape
    scores = logits.softmax(-1)
    if block.score_function != "softmax":
        scores = scores_of(block, logits)
        scores = scores / scores.sum(-1, keepdim=True)
    counts = best(scores.detach(), block.topk).sum(0)
    factor = block.aux_loss_coeff * experts / (block.topk * tokens**2)
    return factor * (scores.sum(0) * counts).sum()


def reference(block, x):
    """Result, loss and counts of tokens in FP64, and the leaves that collect gradients."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in block.named_parameters()}
    leaves["x"] = x.detach().double().requires_grad_()
    tokens = leaves["x"].reshape(-1, x.shape[-1])
    logits = tokens @ leaves["router"].t()
    chosen = chosen_of(block, logits)
    probs = probs_of(block, logits, chosen)
    total = torch.zeros_like(tokens)
    for expert in range(logits.shape[-1]):
        a, b = (tokens @ leaves[f"experts.0.weight{expert}"].t()).chunk(2, -1)
        out = (torch.nn.functional.silu(a) * b) @ leaves[f"experts.2.weight{expert}"].t()
        total = total + torch.where(chosen[:, expert, None], out * probs[:, expert, None], 0.0)
    return total.view(x.shape), loss_of(block, logits), chosen.sum(0), leaves


def loss_and_gradients(block, x, grad, recipe=None):
    """Result, loss or None, and gradients by name."""
    block.zero_grad()
    own = x.detach().requires_grad_(x.requires_grad)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        made = block(own)
    y, loss = made if isinstance(made, tuple) else (made, None)
    roots = [y] if loss is None else [y, loss]
    torch.autograd.backward(roots, [grad] if loss is None else [grad, torch.ones_like(loss)])
    grads = {name: p.grad for name, p in block.named_parameters()} | {"x": own.grad}
    return y.detach(), None if loss is None else loss.detach(), grads


def logits_and_gradients(block, x, grad, recipe=None):
    """Result, logits and gradients of a block with a balancing loss, and a gradient of its logits."""
    block.zero_grad()
    own = x.detach().requires_grad_()
    grad_logits = torch.randn(*x.shape[:-1], block.num_experts, device=x.device)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        program = block._program(block.experts, own)
        y, logits = block._in_one(program, own, None)
    assert logits.dtype == torch.float32
    torch.autograd.backward([y, logits], [grad, grad_logits])
    grads = {name: p.grad for name, p in block.named_parameters()} | {"x": own.grad}
    return y.detach(), logits.detach(), grads, grad_logits


def parts(block, logits, x, grad, grad_logits, recipe=None):
    """Result and gradients of a block by the program without a router, for the logits of the program with one.

    The gradients of the router and its part of the tokens' gradients are sums in FP64.
    """
    (_, router) = block._router
    bias = None if block.expert_bias is None else block.expert_bias.float()
    rows = logits.view(-1, logits.shape[-1])
    probs, scores, chosen, _ = native.router_forward(
        rows, bias, router.choice, None, (True, True, False)
    )
    own, factors = x.detach().requires_grad_(), probs.requires_grad_()
    block.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = block._mixture.program_of(block.experts, block.topk)(own, (chosen, factors), None)
    y.backward(grad)
    dlogits = torch.empty_like(rows)
    native.router_backward(factors.grad, scores, chosen, router.choice, dlogits)
    dlogits = (dlogits + grad_logits.view_as(dlogits)).double()
    tokens = x.detach().double().view(-1, x.shape[-1])
    grads = {f"experts.{name}": p.grad for name, p in block.experts.named_parameters()}
    grads["router"] = dlogits.t() @ tokens
    grads["x"] = own.grad.double() + (dlogits @ block.router.detach().double()).view(x.shape)
    return y.detach(), grads
