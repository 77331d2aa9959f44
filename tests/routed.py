"""Blocks of experts by their program and by calls of its parts, on tokens that a test routes as it needs."""

import torch

import te_fast.pytorch as te
from recipes import RECIPES

HIDDEN, FFN, EXPERTS, TOPK = 272, 144, 6, 2
ALL = {"high": lambda: None, **RECIPES}


def make(device, dtype=torch.bfloat16, ffn=FFN, interleave=None, **options):
    torch.default_generator.manual_seed(3)
    block = te.MoE(HIDDEN, ffn, EXPERTS, TOPK, device="cpu", dtype=dtype, **options)
    if interleave is not None:
        block.experts[1] = te.ops.ScaledSwiGLU(glu_interleave_size=interleave)
    for name, parameter in block.named_parameters():
        if "bias" in name:  # Biases are zero when they are made.
            torch.nn.init.normal_(parameter)
    return block.to(device)


def routing(kind, tokens):
    """A mask and probabilities, float32 on the host; tokens of `few` go to one expert, or to none."""
    torch.default_generator.manual_seed(5)
    mask = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
    for token in range(tokens):
        among = {"empty": [1, 3, 4], "one": [1, 3]}.get(kind, range(EXPERTS))
        some = torch.tensor(list(among))[torch.randperm(len(among))]
        count = token % 3 if kind == "few" else TOPK
        mask[token, some[:count]] = True
    probs = torch.rand(tokens, EXPERTS) * mask
    if kind == "zeros":
        probs[::3] = 0.0
    if kind == "nan":
        probs[5] = torch.where(mask[5], float("nan"), 0.0)
    return mask, probs


KINDS = ("even", "empty", "one", "few", "zeros", "nan")


def tensors(tokens, device, dtype=torch.bfloat16, kind="even"):
    """Tokens, one of them far larger than the others, with their gradient, mask and probabilities."""
    mask, probs = routing(kind, tokens)
    x = torch.randn(tokens, HIDDEN, dtype=dtype)
    x[tokens // 2, 3] = 1000.0
    grad = torch.randn(tokens, HIDDEN, dtype=dtype)
    return [tensor.to(device) for tensor in (x, grad, mask, probs)]


def step(block, given, recipe, *, as_program, is_first=None):
    """Result and gradients of one step."""
    x, grad, mask, probs = given
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    block.zero_grad()
    experts, topk, mixture = block.experts, block.topk, block._mixture
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        if as_program:
            y = mixture.program_of(experts, topk)(x, (mask, probs), is_first)
        else:
            y = mixture.one_by_one(experts, x, mask, probs, topk, is_first)
    y.backward(grad)
    if block.experts[0].delay_wgrad_compute:
        block.backward_dw()
    grads = [parameter.grad for parameter in block.experts.parameters()]
    return [y.detach(), x.grad, probs.grad, *grads]


def same_bits(mine, theirs):
    """Whether tensors have the same bytes, NaN too."""
    pairs = zip(mine, theirs, strict=True)
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )
