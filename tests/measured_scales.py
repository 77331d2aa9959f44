"""Linear layers behind norms and activations under current scaling, fused and apart; a launch finds each scale."""

from __future__ import annotations

import functools

import torch

import te_fast.pytorch as te
from te_fast import dispatch
from te_fast.common.recipe import Float8CurrentScaling
from te_fast.pytorch import ops

NORMS = {"LayerNorm": ops.LayerNorm, "RMSNorm": ops.RMSNorm}
ACTIVATIONS = {"gelu": ops.GELU, "relu": ops.ReLU, "swiglu": ops.SwiGLU, "srelu": ops.SReLU}
#: Factors of the input's first rows.
SPECIAL = {
    "plain": [],
    "zero": [0.0] * 1000,
    "infinite": [float("inf"), 1.0],
    "not a number": [float("nan"), 1.0, 0.0],
    "overflow": [3e4, 1e4],
    "small": [1e-7] * 1000,
}


def pair(kind, cols, dtype, device):
    """A chain, and the same op and linear apart, with equal parameters."""
    options = {"device": device, "dtype": dtype}
    made = NORMS[kind](cols, **options) if kind in NORMS else ACTIVATIONS[kind]()
    width = cols // 2 if kind == "swiglu" else cols
    linear = ops.Linear(width, 48, bias=True, **options)
    with torch.no_grad():
        for parameter in (*made.parameters(), *linear.parameters()):
            parameter.normal_()
    return te.ops.Sequential(made, linear), made, linear


def values(rows, cols, dtype, device, special):
    generator = torch.Generator().manual_seed(rows + cols)
    x = torch.randn(rows, cols, generator=generator)
    for row, factor in zip(x, SPECIAL[special], strict=False):
        row *= factor
    return x.to(dtype).to(device)


def launches(function):
    with dispatch.record() as noted:
        result = function()
    return [launch.name for launch in noted], result


def searches(names):
    """The launches that read a tensor for its maximum."""
    return [name for name in names if name.startswith(("amax", "cast_current"))]


def check(kind, dtype, device, rows, cols, special):
    """The fused chain has the bits of the separate ops, and no launch that reads a tensor for its maximum."""
    torch.default_generator.manual_seed(0)
    chain, first, linear = pair(kind, cols, dtype, device)
    x = values(rows, cols, dtype, device, special)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        chain(x)  # the weight is kept from here on
        for _ in range(3):  # graphs are replayed, and counters are zero again
            got = chain(x)
        names, noted = launches(lambda: chain(x))
        apart, wanted = launches(lambda: linear(first(x)))
    assert not searches(names), names
    assert searches(apart)
    assert torch.equal(got.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))
    assert torch.equal(noted.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


def check_backward(kind, dtype, device, rows):
    """Check gradients likewise: the activation's gradient finds the scale for the linear op before it."""
    torch.default_generator.manual_seed(0)
    options = {"device": device, "dtype": dtype}
    width = 96 if kind == "swiglu" else 48
    parts = [
        ops.Linear(64, width, bias=True, **options),
        ACTIVATIONS[kind](),
        ops.Linear(48, 32, bias=True, **options),
    ]
    chain = ops.Sequential(*parts)
    x = values(rows, 64, dtype, device, "plain")
    gradient = values(rows, 32, dtype, device, "overflow")
    results = []
    for modules in ([chain], parts):
        for _ in range(3):  # graphs are replayed, and counters are zero again
            chain.zero_grad()
            y = leaf = x.clone().requires_grad_()
            with te.autocast(recipe=Float8CurrentScaling()):
                for module in modules:
                    y = module(y)
            noted, _ = launches(functools.partial(y.backward, gradient, retain_graph=True))
            chain.zero_grad()
            leaf.grad = None
            y.backward(gradient)
        grads = [leaf.grad, *(parameter.grad for parameter in chain.parameters())]
        results.append((searches(noted), grads))
    (fused, found), (apart, wanted) = results
    assert (len(fused), len(apart)) == (1, 2)
    assert all(map(torch.equal, found, wanted))
