"""A small model of decoder layers like those of Hugging Face's Llama, with the variations of related models."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6, centred=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) * 0.2 + float(not centred))
        self.variance_epsilon, self.centred = eps, centred

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (self.weight.float() + float(self.centred))).to(x.dtype)


def turned(x):
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class DynamicCache:
    """Keys and values of earlier calls, as Transformers keeps them; a forward without a cache makes one."""

    def __init__(self):
        self.layers = {}

    def get_seq_length(self, layer=0):
        return self.layers[layer][0].shape[2] if layer in self.layers else 0

    def update(self, k, v, layer_idx):
        former = self.layers.get(layer_idx)
        if former is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(former, (k, v), strict=True))
        self.layers[layer_idx] = k, v
        return k, v


class StaticCache(DynamicCache):
    """Another kind of cache, which te_fast does not know."""

    def update(self, k, v, layer_idx):
        return k, v


class Attention(nn.Module):
    def __init__(
        self,
        hidden,
        heads,
        groups,
        d,
        *,
        bias=False,
        head_norms=False,
        whole_norms=False,
        how="sdpa",
    ):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation=how)
        self.head_dim, self.scaling, self.attention_dropout = d, d**-0.5, 0.0
        self.q_proj = nn.Linear(hidden, heads * d, bias=bias)
        self.k_proj = nn.Linear(hidden, groups * d, bias=bias)
        self.v_proj = nn.Linear(hidden, groups * d, bias=bias)
        self.o_proj = nn.Linear(heads * d, hidden, bias=False)
        if head_norms:
            self.q_norm, self.k_norm = RMSNorm(d), RMSNorm(d)
        if whole_norms:  # as OLMoE's, over all heads at once
            self.q_norm, self.k_norm = RMSNorm(heads * d), RMSNorm(groups * d)
        self.whole_norms = whole_norms

    def forward(self, x, position_embeddings, attention_mask=None, past_key_values=None):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (part(x) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self.whole_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(shape) for t in (q, k, v))
        if hasattr(self, "q_norm") and not self.whole_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        cos, sin = (wave.unsqueeze(1) for wave in position_embeddings)
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.scaling
        if attention_mask is None and self.config._attn_implementation != "eager":
            size = x.shape[1]
            attention_mask = torch.ones(1, 1, size, size, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            if attention_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attention_mask, -math.inf)
            else:
                scores = scores + attention_mask
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None


class MLP(nn.Module):
    def __init__(self, hidden, ffn, act=None, *, bias=False, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.gate_proj = nn.Linear(hidden, ffn, bias=bias)
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return functional.dropout(y, self.dropout, self.training)


class Experts(nn.Module):
    """Experts like Mixtral's: a stack of weights for each product, and a loop over the chosen experts."""

    def __init__(self, count, hidden, ffn, act=None):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * ffn, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, ffn) * ffn**-0.5)
        self.act_fn, self.ways = act or nn.SiLU(), 0

    def forward(self, x, numbers, weights):
        self.ways += 1
        out = torch.zeros_like(x)
        for expert in range(len(self.gate_up_proj)):
            rows, place = torch.where(numbers == expert)
            gate, up = functional.linear(x[rows], self.gate_up_proj[expert]).chunk(2, -1)
            y = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out = out.index_add(0, rows, (y * weights[rows, place, None]).to(x.dtype))
        return out


class MixtureOfExperts(nn.Module):
    def __init__(self, hidden=64, ffn=48, count=4, topk=2, act=None):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(count, hidden) * hidden**-0.5)
        self.experts, self.topk = Experts(count, hidden, ffn, act), topk

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        scores = functional.linear(tokens, self.gate).float().softmax(-1)
        weights, numbers = scores.topk(self.topk, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return self.experts(tokens, numbers, weights).view(x.shape)


class Layer(nn.Module):
    def __init__(self, *, centred=False, multiplier=1.0, as_tuple=False, mlp=None, **options):
        super().__init__()
        hidden = 64
        self.self_attn = Attention(hidden, 4, 2, 16, **options)
        self.mlp = mlp() if mlp else MLP(hidden, 96)
        self.input_layernorm = RMSNorm(hidden, centred=centred)
        self.post_attention_layernorm = RMSNorm(hidden, centred=centred)
        self.multiplier, self.as_tuple, self.ways = multiplier, as_tuple, 0

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_embeddings=None,
        past_key_values=None,
        output_attentions=False,
        **kwargs,
    ):
        self.ways += 1
        x = hidden_states
        normed = self.input_layernorm(x)
        y, _ = self.self_attn(normed, position_embeddings, attention_mask, past_key_values)
        x = x + self.multiplier * y
        x = x + self.multiplier * self.mlp(self.post_attention_layernorm(x))
        return (x,) if self.as_tuple else x


class Model(nn.Module):
    def __init__(self, layers=2, **options):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(96, 64)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(layers))
        for index, layer in enumerate(self.layers):
            layer.self_attn.layer_idx = index
        self.norm = RMSNorm(64)
        self.lm_head = nn.Linear(64, 96, bias=False)

    def forward(self, tokens, attention_mask=None, **kwargs):
        x = self.embed(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        angles = places.outer(10.0 ** -torch.linspace(0, 3, 8, device=tokens.device)).repeat(1, 2)
        waves = (angles.cos()[None].to(x), angles.sin()[None].to(x))
        for layer in self.layers:
            x = layer(x, attention_mask=attention_mask, position_embeddings=waves, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return self.lm_head(self.norm(x))


def loss_of(model, tokens, **options):
    logits = model(tokens, **options)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def make():
    """What the command line is given."""
    return Model()
