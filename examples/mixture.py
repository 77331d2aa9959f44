"""Train a small mixture of experts in FP8, beside the same network in high precision.

    python examples/mixture.py [--recipe delayed|current|block] [--device cpu|cuda] [--steps 200]

The task is a mixture, too: points around eight centres, each with a linear map of its own to the targets. Both networks
start from the same weights and see the same batches. The script prints the losses and how evenly the experts are used.
It fails if FP8 learns less: the last FP8 loss must be below a fifth of the first, and at most 1.5 times the last loss
in high precision.
"""

from __future__ import annotations

import argparse
import copy
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

import te_fast.pytorch as te
from te_fast.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
CENTRES, FEATURES, HIDDEN, FFN, EXPERTS, CHOSEN = 8, 16, 32, 32, 8, 2
TOKENS = 256
NEEDED, ALLOWED = 0.2, 1.5


class Network(torch.nn.Module):
    """A projection, a mixture of experts beside its input, and a projection back."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.into = torch.nn.Linear(FEATURES, HIDDEN, device=device)
        self.block = te.MoE(HIDDEN, FFN, EXPERTS, CHOSEN, aux_loss_coeff=0.01, device=device)
        self.out = torch.nn.Linear(HIDDEN, FEATURES, device=device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prediction and the loss that balances the experts."""
        hidden = functional.silu(self.into(x))
        mixed, balance = self.block(hidden)
        return self.out(hidden + mixed), balance


def batches(steps: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points and their targets."""
    make = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(CENTRES, FEATURES, generator=make)
    maps = torch.randn(CENTRES, FEATURES, FEATURES, generator=make) / FEATURES**0.5
    found = []
    for _ in range(steps):
        which = torch.randint(CENTRES, (TOKENS,), generator=make)
        offset = 0.5 * torch.randn(TOKENS, FEATURES, generator=make)
        target = torch.einsum("tf,tgf->tg", offset, maps[which]) + centres[which].roll(1, 1)
        found.append(((centres[which] + offset).to(device), target.to(device)))
    return found


def train(
    network: Network, data: list[tuple[torch.Tensor, torch.Tensor]], recipe: Any
) -> list[float]:
    """Return the losses of training with a recipe, or in high precision without."""
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for x, target in data:
        optimizer.zero_grad()
        with nullcontext() if recipe is None else te.autocast(recipe=recipe):
            y, balance = network(x)
        loss = functional.mse_loss(y, target)
        (loss + balance).backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> int:
    """Train both; 1 if FP8 learns less."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipe", choices=RECIPES, default="current")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    first = Network(arguments.device)
    data = batches(arguments.steps, arguments.device)
    networks = {"FP8": first, "high precision": copy.deepcopy(first)}
    losses = {
        name: train(network, data, RECIPES[arguments.recipe]() if name == "FP8" else None)
        for name, network in networks.items()
    }
    for name, found in losses.items():
        with torch.no_grad():
            hidden = functional.silu(networks[name].into(data[0][0]))
            router = networks[name].block.router
            chosen = functional.linear(hidden, router).topk(CHOSEN, -1).indices
        shares = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
        print(f"{name}: loss {found[0]:.3f} to {found[-1]:.3f}; shares of the experts:", end=" ")
        print(" ".join(f"{share:.2f}" for share in shares.tolist()))
    last = losses["FP8"][-1]
    learns = last <= NEEDED * losses["FP8"][0]
    return 0 if learns and last <= ALLOWED * losses["high precision"][-1] else 1


if __name__ == "__main__":
    sys.exit(main())
