"""Independent references of chains of norm, linear and activation, in torch alone: exact, and with quantised operands.

Nothing here uses te_fast; a layer is read for its parameters and options only.
"""

from __future__ import annotations

import torch
from torch.nn import functional

import reference as ref
from activation_reference import clamped


def _gate(activate, x):
    left, right = x.chunk(2, -1)
    return activate(left) * right


def _gelu(x):
    return functional.gelu(x, approximate="tanh")


def _qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def _srelu(x):
    return functional.relu(x) ** 2


def _clamped_swiglu(x, limit=7.0, alpha=1.702, glu_linear_offset=1.0):
    left, right = x.chunk(2, -1)
    left, right = clamped(left, -torch.inf, limit), clamped(right, -limit, limit)
    return left * torch.sigmoid(alpha * left) * (right + glu_linear_offset)


ACTIVATIONS = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": functional.relu,
    "srelu": _srelu,
    "silu": functional.silu,
    "glu": lambda x: _gate(torch.sigmoid, x),
    "geglu": lambda x: _gate(_gelu, x),
    "qgeglu": lambda x: _gate(_qgelu, x),
    "reglu": lambda x: _gate(functional.relu, x),
    "sreglu": lambda x: _gate(_srelu, x),
    "swiglu": lambda x: _gate(functional.silu, x),
    "clamped_swiglu": _clamped_swiglu,
}


def relative(got, wanted):
    """Relative error in the Frobenius norm; of zeros, the norm itself."""
    wanted = wanted.double()
    size = wanted.norm().clamp_min(1e-30) if wanted.norm() > 0 else 1.0
    return ((got.detach().double() - wanted).norm() / size).item()


def linears(layer):
    """Names of weight and bias of each linear op."""
    if hasattr(layer, "fc1_weight"):
        return [("fc1_weight", "fc1_bias"), ("fc2_weight", "fc2_bias")]
    return [("weight", "bias")]


def _activation(layer):
    activate = ACTIVATIONS.get(getattr(layer, "activation", None))
    given = getattr(layer, "activation_params", None) or {}
    return lambda x: activate(x, **given)


def norm(layer, parameters, x):
    """The layer's norm in the precision of its arguments."""
    if layer.normalization is None:
        return x
    weight = parameters["layer_norm_weight"] + float(layer.zero_centered_gamma)
    if layer.normalization == "LayerNorm":
        bias = parameters["layer_norm_bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, layer.eps)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + layer.eps) * weight


def exact(layer, x, grad, ln_grad=None):
    """Results and gradients in FP64, by name; zeros for parameters that the layer does not apply."""
    x = x.detach().double().requires_grad_()
    own = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    ln = norm(layer, own, x)
    y = ln
    names = linears(layer)
    for index, (weight, bias) in enumerate(names):
        applies = layer.use_bias and (layer.apply_bias or index + 1 < len(names))
        y = functional.linear(y, own[weight], own[bias] if applies else None)
        if index + 1 < len(names):
            y = _activation(layer)(y)
    total = (y * grad.double()).sum()
    if ln_grad is not None:
        total = total + (ln * ln_grad.double()).sum()
    leaves = {"x": x, **own}
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    found = dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    return {"y": y.detach(), "ln": ln.detach(), **found}


def _quantiser(name):
    """``q(t, is_weight, is_grad, transposed)``: ``t`` rounded to FP8, in FP64; delayed scaling has scale 1."""
    one = torch.tensor(1.0)

    def quantise(t, *, is_weight=False, is_grad=False, transposed=False):
        if name == "block":
            kind = "2d" if is_weight else "1d"
            return ref.quantized_values(t, "e4m3", kind, transposed=transposed)
        fmt = "e5m2" if is_grad else "e4m3"
        scale = one if name == "delayed" else None
        return ref.quantized_values(t, fmt, "t", transposed=transposed, scale=scale)

    return quantise


def quantized(layer, x, grad, name):
    """Results and gradients of an FP8 step: operands quantised from FP32, products in FP64, results rounded."""
    q, dtype = _quantiser(name), x.dtype
    own = {key: p.detach() for key, p in layer.named_parameters()}
    wide = {key: p.double().requires_grad_() for key, p in own.items()}
    leaf = x.detach().double().requires_grad_()
    ln = norm(layer, wide, leaf)
    found = {"ln": ln.detach()}
    operands, outputs = [], []
    step = ln.detach()
    names = linears(layer)
    for index, (weight, bias) in enumerate(names):
        operands.append(step.float())
        applies = layer.use_bias and (layer.apply_bias or index + 1 < len(names))
        y = q(operands[-1]) @ q(own[weight], is_weight=True).t()
        y = (y + (own[bias].double() if applies else 0)).to(dtype)
        outputs.append(y.double().requires_grad_())
        step = _activation(layer)(outputs[-1]).detach() if index + 1 < len(names) else y
    found["y"] = step
    g = grad.double()
    for index, (weight, bias) in reversed(list(enumerate(names))):
        if index + 1 < len(names):
            (g,) = torch.autograd.grad(_activation(layer)(outputs[index]), outputs[index], g)
        found[f"d{bias}"] = g.sum(0)
        gt = q(g.float(), is_grad=True, transposed=True)
        found[f"d{weight}"] = gt @ q(operands[index], transposed=True).t()
        g = q(g.float(), is_grad=True) @ q(own[weight], is_weight=True)
        g = g.to(dtype).double()
    leaves = {"x": leaf}
    leaves |= {key: wide[key] for key in wide if key.startswith("layer_norm")}
    if layer.normalization is None:
        return found | {"dx": g}
    gradients = torch.autograd.grad(ln, list(leaves.values()), g)
    return found | dict(zip((f"d{key}" for key in leaves), gradients, strict=True))
