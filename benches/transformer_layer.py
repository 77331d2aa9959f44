"""Training steps of whole transformer layers, times in ms: te_fast, torch eager and compiled, Transformer Engine.

    python benches/transformer_layer.py [--tokens 2048 512] [--recipes delayed current] [--layers 8] [--rope]

Layers have hidden size 2048, feed-forward size 5632 and heads of 128, RMSNorm, SwiGLU and no biases; parameters are
BF16, the optimizer is fused AdamW. All ways are built first and make their steps in turn, in one process. Transformer
Engine runs where it can be imported.

"Step" is the median between two synchronisations, "host" the host's time for forward and backward, "GPU" the time per
step of two that are queued behind a pause. Every figure is also given as a ratio to eager torch's.
"""

from __future__ import annotations

import statistics
import time
import warnings
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

import te_fast.pytorch as te
from _harness import RECIPES, attempt, options, peer, show, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

HIDDEN, FFN, HEAD = 2048, 5632, 128
# The launches of attention are learned at the 64th call, in the eighth step of eight layers.
WARM_UP, STEPS = 12, 15
#: The driver queues 1,024 launches: with more, the GPU would wait for the host.
QUEUED = 2


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotate by a quarter: ``(-right half, left half)``."""
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class TorchLayer(torch.nn.Module):
    """A layer of torch's own modules, as users write it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.norm1 = torch.nn.RMSNorm(HIDDEN, **kind)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False, **kind)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, **kind)
        self.norm2 = torch.nn.RMSNorm(HIDDEN, **kind)
        self.up = torch.nn.Linear(HIDDEN, 2 * FFN, bias=False, **kind)
        self.down = torch.nn.Linear(FFN, HIDDEN, bias=False, **kind)

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None = None) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HIDDEN // HEAD, HEAD)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if angles is not None:
            flat = angles.view(angles.shape[0], -1)
            cos, sin = flat.cos().to(q.dtype), flat.sin().to(q.dtype)
            q, k = (t * cos + turned(t) * sin for t in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        result: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return result


def fused_layer(library: Any, device: torch.device) -> torch.nn.Module:
    """Return the same layer of a library that has ``TransformerLayer``."""
    layer: torch.nn.Module = library.TransformerLayer(
        HIDDEN,
        FFN,
        HIDDEN // HEAD,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        attn_input_format="bshd",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        params_dtype=torch.bfloat16,
        device=device,
    )
    return layer


class Way:
    """One way to train the layers."""

    def __init__(
        self,
        name: str,
        make: Callable[[], torch.nn.Module],
        layers: int,
        region: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.name, self.region = name, region
        self.layers = torch.nn.ModuleList(make() for _ in range(layers))
        parameters = list(self.layers.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        self.run: Any = self.forward
        if name.endswith("compiled"):
            self.run = torch.compile(self.forward)
        self.times: list[tuple[float, float, float]] = []

    def forward(self, x: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
        keywords: dict[str, Any] = {}
        if angles is not None:
            own = isinstance(self.layers[0], TorchLayer)
            keywords = {"angles" if own else "rotary_pos_emb": angles}
        for layer in self.layers:
            x = layer(x, **keywords)
        return x

    def step(self, x: torch.Tensor, angles: torch.Tensor | None) -> tuple[float, float, float]:
        """Make a step; return when forward began, when backward began, and when the optimizer did."""
        begin = time.perf_counter()
        with self.region():
            y = self.run(x, angles)
        middle = time.perf_counter()
        y.float().square().mean().backward()
        end = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return begin, middle, end

    def queued(self, x: torch.Tensor, angles: torch.Tensor | None) -> float:
        """Return the GPU's milliseconds per step."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e9))
        first.record()
        for _ in range(QUEUED):
            self.step(x, angles)
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / QUEUED


def ways(recipes: list[str], layers: int, device: torch.device) -> Iterator[partial[Way]]:
    """Yield what makes every way, torch's first."""
    for name in ("torch, eager", "torch, compiled"):
        yield partial(Way, name, partial(TorchLayer, device), layers)
    yield partial(Way, "te_fast, BF16", partial(fused_layer, te, device), layers)
    theirs = peer()
    if theirs is not None:
        make = partial(fused_layer, theirs.pytorch, device)
        yield partial(Way, "Transformer Engine, BF16", make, layers)
    for recipe in recipes:
        region = partial(te.autocast, recipe=RECIPES[recipe]())
        yield partial(Way, f"te_fast, {recipe}", partial(fused_layer, te, device), layers, region)
        if theirs is not None:
            own = getattr(theirs.recipe, RECIPES[recipe].__name__)()
            region = partial(theirs.pytorch.autocast, enabled=True, recipe=own)
            make = partial(fused_layer, theirs.pytorch, device)
            yield partial(Way, f"Transformer Engine, {recipe}", make, layers, region)


def started(make: partial[Way], device: torch.device, *, rope: bool) -> Way:
    """Make a way and let it take a step, so that a way that raises does so here."""
    way = make()
    x = torch.randn(1, HEAD, HIDDEN, device=device, dtype=torch.bfloat16)
    way.step(x, te.RotaryPositionEmbedding(HEAD)(HEAD).to(device) if rope else None)
    torch.cuda.synchronize()
    return way


def measure(
    found: list[Way], tokens: int, device: torch.device, *, rope: bool
) -> dict[str, dict[str, float]]:
    """Let all ways make steps in turn."""
    x = torch.randn(1, tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    angles = te.RotaryPositionEmbedding(HEAD)(tokens).to(device) if rope else None
    peaks: dict[str, float] = {}
    for number in range(WARM_UP + STEPS):
        for way in found:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            begin, middle, end = way.step(x, angles)
            torch.cuda.synchronize()
            if number >= WARM_UP:
                way.times.append((time.perf_counter() - begin, middle - begin, end - middle))
                peaks[way.name] = torch.cuda.max_memory_allocated() - held
    results = {}
    for way in found:
        step, forward, backward = (1e3 * statistics.median(t) for t in zip(*way.times, strict=True))
        way.times.clear()
        results[way.name] = {
            "step": step,
            "host forward": forward,
            "host backward": backward,
            "GPU": way.queued(x, angles),
            "activations, GiB": peaks[way.name] / 2**30,
        }
    return results


def main() -> None:
    """Measure and print the tables."""
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 512])
    parser.add_argument("--recipes", choices=RECIPES, nargs="*", default=list(RECIPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rope", action="store_true")
    args = parser.parse_args()
    if args.device.type != "cuda":
        parser.error("training steps are measured on a GPU")
    warnings.simplefilter("ignore")
    failures: dict[str, str] = {}
    found = []
    for make in ways(args.recipes, args.layers, args.device):
        trial = partial(started, make, args.device, rope=args.rope)
        way = attempt(str(make.args[0]), trial, failures)
        found += [] if way is None else [way]
    results: dict[str, object] = {}
    for tokens in args.tokens:
        figures = measure(found, tokens, args.device, rope=args.rope)
        torch.compiler.reset()
        base = figures["torch, eager"]
        rows = []
        for name, values in figures.items():
            results[f"{tokens} tokens, {name}"] = values
            rows.append((name, *(f"{v:.2f} ({v / base[key]:.2f})" for key, v in values.items())))
        columns = ("way", *base)
        show(f"{args.layers} layers, {tokens} tokens; over torch eager in brackets", columns, rows)
        write("transformer_layer", args, results, failures)


if __name__ == "__main__":
    main()
