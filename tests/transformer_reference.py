"""Transformer layers by their formulas, in plain torch and FP64; a layer is read for parameters and options only."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

import te_fast.pytorch as te
from attention_reference import attend_one, attends, rotate
from compound_reference import ACTIVATIONS
from te_fast.pytorch.ops import L2Normalization

HIDDEN, FFN, HEADS, D = 32, 48, 4, 8
S, B = 6, 2


def relative(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-6)).item()


def make(kind=te.TransformerLayer, *, dtype=torch.float32, ffn=FFN, **options):
    """A layer whose norms and biases are not identities."""
    sizes = (HIDDEN, ffn, HEADS) if kind is te.TransformerLayer else (HIDDEN, HEADS)
    options = {"attention_dropout": 0.0, "device": "cpu", "params_dtype": dtype} | options
    if kind is te.TransformerLayer:
        options.setdefault("hidden_dropout", 0.0)
    layer = kind(*sizes, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else 0.2
            base = parameter if name.endswith("norm_weight") else 0.0
            parameter.copy_(base + scale * torch.randn(parameter.shape))
    return layer


class Plain:
    """A layer by its formulas in FP64: tokens in ``(s, b, hidden)``."""

    def __init__(self, layer):
        self.layer = layer
        self.own = {
            name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()
        }

    def norm(self, x, prefix, eps=1e-5):
        names = (
            ("layer_norm_weight", "layer_norm_bias")
            if f"{prefix}.layer_norm_weight" in self.own
            else ("weight", "bias")
        )
        weight, bias = (self.own.get(f"{prefix}.{name}") for name in names)
        module = self.layer.get_submodule(prefix)
        weight = weight + float(module.zero_centered_gamma)
        if bias is not None:
            return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def linear(self, x, prefix, parts=("",), weight="weight", bias="bias"):
        weights = torch.cat([self.own[f"{prefix}.{part}{weight}"] for part in parts])
        biases = [self.own.get(f"{prefix}.{part}{bias}") for part in parts]
        return functional.linear(x, weights, None if biases[0] is None else torch.cat(biases))

    def heads(self, mixed, groups, interleaved):
        """Queries, keys and values of a product."""
        per_group = HEADS // groups
        if interleaved:
            shaped = mixed.unflatten(-1, (groups, per_group + 2, D))
            q = shaped[..., :per_group, :].flatten(-3, -2)
            return q, shaped[..., per_group, :], shaped[..., per_group + 1, :]
        shaped = mixed.unflatten(-1, (HEADS + 2 * groups, D))
        return shaped[..., :HEADS, :], shaped[..., HEADS:-groups, :], shaped[..., -groups:, :]

    def head_norm(self, t, attention, name, prefix):
        module = getattr(attention, name)
        if module is None:
            return t
        if isinstance(module, L2Normalization):
            return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + module.eps)
        return self.norm(t, f"{prefix}.{name}", module.eps)

    def core(self, heads, attention, prefix, kind, rope):
        q, k, v = heads

        def normed(q, k):
            return (
                self.head_norm(q, attention, "q_norm", prefix),
                self.head_norm(k, attention, "k_norm", prefix),
            )

        if attention.qk_norm_before_rope:
            q, k = normed(q, k)
        if rope is not None:
            pair = rope if isinstance(rope, tuple) else (rope, rope)
            q, k = (
                rotate(t, f[: t.shape[0]].double(), attention.rotary_pos_interleaved)
                for t, f in zip((q, k), pair, strict=True)
            )
        if not attention.qk_norm_before_rope:
            q, k = normed(q, k)
        mask = attends(kind, q.shape[0], k.shape[0])
        outs = [
            attend_one(q[:, b], k[:, b], v[:, b], mask, 1 / math.sqrt(D)).flatten(1)
            for b in range(q.shape[1])
        ]
        return torch.stack(outs, 1)

    def attention(self, x, prefix, kind, rope=None, encoder=None):
        """The result without residual, and the norm's result."""
        module = self.layer.get_submodule(prefix) if prefix else self.layer
        at = f"{prefix}." if prefix else ""
        name = {
            (True, True): "layernorm_qkv",
            (True, False): "qkv",
            (False, True): "layernorm_query",
            (False, False): "query_layer",
        }[encoder is None, module.input_layernorm]
        split = f"{at}{name}.weight" not in self.own
        normed = self.norm(x, f"{at}{name}") if module.input_layernorm else x
        groups = module.num_gqa_groups
        if encoder is None:
            parts = ("query_", "key_", "value_") if split else ("",)
            mixed = self.linear(normed, f"{at}{name}", parts)
            heads = self.heads(mixed, groups, module.qkv_weight_interleaved)
        else:
            own = f"{at}{name}.query_weight" in self.own
            q = self.linear(normed, f"{at}{name}", ("query_",) if own else ("",))
            parts = ("key_", "value_") if f"{at}key_value.key_weight" in self.own else ("",)
            mixed = self.linear(encoder, f"{at}key_value", parts)
            if module.qkv_weight_interleaved:
                k, v = mixed.unflatten(-1, (groups, 2, D)).unbind(-2)
            else:
                k, v = mixed.unflatten(-1, (2, groups, D)).unbind(-3)
            heads = q.unflatten(-1, (HEADS, D)), k, v
        context = self.core(heads, module, prefix or "", kind, rope)
        return self.linear(context, f"{at}proj"), normed

    def mlp(self, x):
        normed = self.norm(x, "layernorm_mlp")
        y = self.linear(normed, "layernorm_mlp", weight="fc1_weight", bias="fc1_bias")
        y = ACTIVATIONS[self.layer.layernorm_mlp.activation](y)
        return self.linear(y, "layernorm_mlp", weight="fc2_weight", bias="fc2_bias"), normed

    def __call__(self, x, kind="causal", rope=None, encoder=None):
        layer = self.layer
        post = layer.apply_residual_connection_post_layernorm
        y, normed = self.attention(x, "self_attention", kind, rope)
        if layer.parallel_attention_mlp:
            return x + y + self.mlp(x)[0]
        x = y + (normed if post and not layer.output_layernorm else x)
        if encoder is not None:
            y, normed = self.attention(x, "inter_attention", "no_mask", rope, encoder)
            x = y + (normed if post else x)
        y, normed = self.mlp(x)
        x = y + (normed if post else x)
        return self.norm(x, "layernorm") if layer.output_layernorm else x


def compare(layer, x, out, plain, wanted, bound=2e-5):
    """Compare results and gradients; for keys' biases, which change nothing, compare sizes alone."""
    assert relative(out, wanted) < bound
    grad = torch.randn(out.shape)
    out.backward(grad.to(out.dtype))
    names = list(plain.own)
    found = torch.autograd.grad(wanted, [x, *plain.own.values()], grad.double(), allow_unused=True)
    assert relative(x.grad, found[0]) < bound
    for name, theirs in zip(names, found[1:], strict=True):
        mine = layer.get_parameter(name).grad
        if theirs is None or theirs.norm() < 1e-9:
            assert mine is None or mine.norm() < 1e-4
        else:
            assert relative(mine, theirs) < bound, name
