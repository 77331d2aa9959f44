"""Train a small GPT on the letters of a text, as nanoGPT does, in FP8 by one line.

    python examples/nanogpt.py [--recipe delayed|current|block|none] [--steps 200] [--text FILE] [--device cpu|cuda]

The model is nanoGPT's: layers of torch, learnt positions, a head that shares the embedding's weight. te_fast
needs `te_fast.convert(model)` after the model's construction and `te.autocast` around its forward. `--recipe none`
leaves out both.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

import te_fast
import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}


class SelfAttention(nn.Module):
    """Causal self attention with one product for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(width, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return out


class Block(nn.Module):
    """Attention and feed-forward block, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """The model; it returns its loss."""

    def __init__(self, letters: int, tokens: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(letters, width), nn.Embedding(tokens, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, letters, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_last = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if is_last else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    """Train, and print the loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=(*RECIPES, "none"), default="current")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=Path, default=ROOT / "README.md")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(1337)
    text = args.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    tokens, batch = 64, 8
    model = GPT(len(letters), tokens, width=128, layers=2, heads=4).to(args.device, dtype)

    region: Any = nullcontext
    if args.recipe != "none":
        print(te_fast.convert(model))
        recipe = RECIPES[args.recipe]()

        def region() -> AbstractContextManager[Any]:
            return te.autocast(recipe=recipe)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        starts = torch.randint(len(data) - tokens - 1, (batch,))
        rows = torch.stack([data[start : start + tokens + 1] for start in starts]).to(args.device)
        with region():
            loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
