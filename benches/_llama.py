"""A Llama to measure: Hugging Face's where it can be imported, else a model of the same modules, names and sizes."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, HEAD = 32000, 128


class RMSNorm(nn.Module):
    """Llama's norm."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def _turned(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class Attention(nn.Module):
    """Llama's attention, by torch's scaled dot product attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.head_dim, self.scaling, self.attention_dropout = HEAD, HEAD**-0.5, 0.0
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            part(x).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (wave.unsqueeze(1) for wave in position_embeddings)
        q, k = (t * cos + _turned(t) * sin for t in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        out: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Llama's feed-forward block."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Llama's layer."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(hidden), MLP(hidden, ffn)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Any = None,
    ) -> torch.Tensor:
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Llama with its head, which returns its loss."""

    def __init__(self, hidden: int, ffn: int, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, ffn) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.embed_tokens(input_ids)
        places = torch.arange(input_ids.shape[1], device=x.device, dtype=torch.float32)
        steps = torch.arange(0, HEAD, 2, device=x.device, dtype=torch.float32) / HEAD
        angles = places.outer(10000.0**-steps).repeat(1, 2)[None]
        waves = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for layer in self.layers:
            x = layer(x, position_embeddings=waves)
        logits = self.lm_head(self.norm(x))[:, :-1].float()
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


def source() -> str:
    """Return whose model is measured."""
    known = importlib.util.find_spec("transformers") is not None
    return "transformers" if known else "benches/_llama.py"


def llama(hidden: int, layers: int, tokens: int, device: torch.device) -> nn.Module:
    """Return a model in BF16, from one seed."""
    torch.manual_seed(0)
    ffn = hidden * 11 // 4 // 256 * 256
    with torch.device(device):
        if source() == "transformers":
            transformers: Any = importlib.import_module("transformers")
            config = transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=hidden,
                intermediate_size=ffn,
                num_hidden_layers=layers,
                num_attention_heads=hidden // HEAD,
                num_key_value_heads=hidden // HEAD,
                max_position_embeddings=tokens,
                use_cache=False,
            )
            made: nn.Module = transformers.LlamaForCausalLM(config)
        else:
            made = Llama(hidden, ffn, layers)
    return made.to(torch.bfloat16).train()
