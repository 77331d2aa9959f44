"""Differentiable formulas of the ops in plain torch, for FP64; nothing here uses te_fast."""

from __future__ import annotations

import torch

# Tolerances of chains, relative to the largest magnitude of a result: one rounding at every edge.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def qgelu(x):
    return x / (1 + torch.exp(-1.702 * x))


def relu(x):
    return torch.where(x > 0, x, torch.zeros_like(x))


def srelu(x):
    return relu(x) ** 2


def silu(x):
    return x / (1 + torch.exp(-x))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def halves(x, interleave=None):
    if interleave is None:
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    columns = torch.arange(x.shape[-1])
    linear = (columns // interleave) % 2 == 1
    return x[..., ~linear], x[..., linear]


def gated(gate):
    return lambda x, interleave=None: (lambda a, b: gate(a) * b)(*halves(x, interleave))


def clamped_swiglu(x, interleave=None, limit=7.0, alpha=1.702, offset=1.0):
    a, b = halves(x, interleave)
    a = torch.where(a > limit, torch.full_like(a, limit), a)
    b = torch.where(b > limit, torch.full_like(b, limit), b)
    b = torch.where(b < -limit, torch.full_like(b, -limit), b)
    return a * sigmoid(alpha * a) * (b + offset)


def situ_glu(x, interleave=None, beta1=4.0, beta2=25.0):
    a, b = halves(x, interleave)
    return beta1 * torch.tanh(a / beta1) * sigmoid(a) * beta2 * torch.tanh(b / beta2)


def layer_norm(x, weight, bias, eps=1e-5, zero_centered=False):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    gamma = weight + 1 if zero_centered else weight
    return centred / torch.sqrt(variance + eps) * gamma + bias


def rms_norm(x, weight, eps=1e-5, zero_centered=False):
    gamma = weight + 1 if zero_centered else weight
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * gamma


def l2_normalization(x, eps=1e-6):
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + eps)


def leaf(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()


def randomise(module):
    for seed, parameter in enumerate(module.parameters()):
        values = leaf(*parameter.shape, seed=seed + 50).detach() / 4
        parameter.data.copy_(values)
    return module


def compare(module, formula, inputs, *, count=1):
    """Compare outputs and gradients of ``module(*inputs)`` with those of the formula of inputs and parameters."""
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert len(outputs) == count
    tensors = [*inputs, *module.parameters()]
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    expected = formula(*wide)
    expected = expected if isinstance(expected, tuple) else (expected,)
    grads = []
    for seed, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        close(got, want)
        grads.append(leaf(*got.shape, dtype=got.dtype, seed=seed + 90).detach())
    torch.autograd.backward(outputs, [grad.clone() for grad in grads])
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for got, want in zip(tensors, wide, strict=True):
        if want.grad is None:
            assert got.grad is None
        else:
            close(got.grad, want.grad)


def close(got, expected):
    bound = ROUNDING[got.dtype] * max(float(expected.detach().abs().max()), 1.0)
    assert got.shape == expected.shape
    assert (got.detach().double() - expected.detach()).abs().max() <= bound
