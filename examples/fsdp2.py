"""Train a Llama-like model under FSDP2 as torchtitan does: convert, compile each layer, shard, train.

    torchrun --nproc-per-node 2 examples/fsdp2.py [--recipe current] [--steps 20] [--compile]

The order matters: `te_fast.convert` needs plain parameters, the compiler sees te_fast's layers as operators, and
`fully_shard` gathers a layer's parameters around its call. The script runs on GPUs with NCCL, else on CPUs with gloo.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import te_fast
import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
VOCABULARY, WIDTH, FFN, HEADS, LAYERS, TOKENS = 256, 128, 352, 4, 2, 32


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return the pairs ``(a, b)`` of channels as ``(-b, a)``."""
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class Attention(nn.Module):
    """Attention with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.head_dim = WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            part(x).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (wave.unsqueeze(1) for wave in position_embeddings)
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Feed-forward block with SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(FFN, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer with Llama's names, by which `te_fast.convert` knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), FeedForward()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2)
        )

    def forward(
        self, x: torch.Tensor, attention_mask: Any = None, position_embeddings: Any = None
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Model(nn.Module):
    """The model; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1], device=x.device, dtype=torch.float32)
        channels = WIDTH // HEADS
        steps = torch.arange(0, channels, 2, device=x.device) / channels
        angles = places.outer(1e4**-steps).repeat(1, 2)[None]
        waves = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for layer in self.layers:
            x = layer(x, position_embeddings=waves)
        logits = self.lm_head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def shard(model: Model, device: torch.device, *, is_compiled: bool) -> None:
    """Compile and shard layer by layer."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
    for layer in model.layers:
        if is_compiled:
            layer.forward = torch.compile(layer.forward)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def main() -> None:
    """Train, and print the loss on the first rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=RECIPES, default="current")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    args = parser.parse_args()

    is_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same parameters on every rank
    model = Model().to(device)
    report = te_fast.convert(model)
    if dist.get_rank() == 0:
        print(report)
    shard(model, device, is_compiled=args.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    recipe = RECIPES[args.recipe]()
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(args.steps):
        first = torch.randint(VOCABULARY, (8, 1), generator=data)
        ids = ((first + 7 * torch.arange(TOKENS)) % VOCABULARY).to(device)
        with te.autocast(recipe=recipe):
            loss = model(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
