"""Training steps of Llama-like blocks (ms; memory in GiB): torch, te_fast, Transformer Engine; eager, compiled, graphs.

    python benches/llama_blocks.py [--tokens 2048 512] [--recipes delayed current block] [--only eager graphed]

Blocks have hidden size 2048, feed-forward size 5632 and heads of 128: a norm with the QKV product, attention by torch,
a product, and an MLP with SwiGLU. Parameters are BF16, the optimizer is fused AdamW. Transformer Engine runs where it
can be imported.

"Step" is the median between two synchronisations, "host" the host's time for forward and for backward, "GPU" the time
per step of two that are queued behind a pause. Memory is the allocator's, after a step and at its peak.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

import te_fast.pytorch as te
from _harness import RECIPES, attempt, forget, options, peer, show, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

HIDDEN, FFN, HEAD = 2048, 5632, 128
WARM_UP, STEPS = 5, 10
#: The driver queues 1,024 launches: with more, the GPU would wait for the host.
QUEUED = 2
GIB = 2.0**30


def attention(qkv: torch.Tensor) -> torch.Tensor:
    """Attend causally to ``(batch, tokens, 3 * HIDDEN)``."""
    batch, tokens, _ = qkv.shape
    q, k, v = qkv.view(batch, tokens, 3, HIDDEN // HEAD, HEAD).permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, tokens, HIDDEN)


class TorchBlock(torch.nn.Module):
    """A block of torch's own layers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.norm1 = torch.nn.RMSNorm(HIDDEN, **kind)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False, **kind)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, **kind)
        self.norm2 = torch.nn.RMSNorm(HIDDEN, **kind)
        self.up = torch.nn.Linear(HIDDEN, 2 * FFN, bias=False, **kind)
        self.down = torch.nn.Linear(FFN, HIDDEN, bias=False, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attention(self.qkv(self.norm1(x))))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        result: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return result


class FusedBlock(torch.nn.Module):
    """The same block of a library's fused layers."""

    def __init__(self, library: Any, device: torch.device) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": False, "device": device, "params_dtype": torch.bfloat16}
        norm = {"normalization": "RMSNorm"}
        self.qkv = library.LayerNormLinear(HIDDEN, 3 * HIDDEN, **norm, **kind)
        self.out = library.Linear(HIDDEN, HIDDEN, **kind)
        self.mlp = library.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **norm, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attention(self.qkv(x)))
        result: torch.Tensor = x + self.mlp(x)
        return result


class PeerBlock(FusedBlock):
    """Transformer Engine's block: its graphs replace ``__call__`` of the class, and leave theirs there after errors."""


@dataclass
class Case:
    """One way to train the blocks."""

    name: str
    block: Callable[[], torch.nn.Module]
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    #: Options of ``torch.compile``; None for eager.
    compile: dict[str, Any] | None = None
    #: ``make_graphed_callables`` of a library, with its recipe.
    graph: Callable[..., Any] | None = None


@dataclass
class Figures:
    """Milliseconds, and GiB."""

    step: float
    host_forward: float
    host_backward: float
    gpu: float
    held: float
    peak: float


class Training:
    """A model, its optimizer and its input."""

    def __init__(self, case: Case, blocks: int, tokens: int, device: torch.device) -> None:
        model: Any = torch.nn.Sequential(*(case.block() for _ in range(blocks)))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        # A graph that is replayed has to enter the region itself: it updates the scales.
        def forward(x: torch.Tensor) -> torch.Tensor:
            with case.region():
                result: torch.Tensor = model(x)
            return result

        self.forward: Any = forward
        if case.compile is not None:
            self.forward = torch.compile(forward, fullgraph=True, **case.compile)
        self.x = torch.randn(1, tokens, HIDDEN, device=device, dtype=torch.bfloat16)
        if case.graph is not None:
            inputs = [
                torch.randn_like(self.x).requires_grad_(number > 0) for number in range(blocks)
            ]
            case.graph(tuple(model), tuple((x,) for x in inputs))

    def step(self) -> tuple[float, float, float]:
        """Make a step; return when forward began, when backward began, and when the optimizer did."""
        torch.compiler.cudagraph_mark_step_begin()
        begin = time.perf_counter()
        y = self.forward(self.x)
        middle = time.perf_counter()
        y.float().square().mean().backward()
        end = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return begin, middle, end


def measure(case: Case, blocks: int, tokens: int, device: torch.device) -> Figures:
    """Train for a few steps."""
    forget()
    torch.compiler.reset()
    torch.cuda.reset_peak_memory_stats()
    training = Training(case, blocks, tokens, device)
    steps, forwards, backwards = [], [], []
    for number in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        begin, middle, end = training.step()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            steps.append(time.perf_counter() - begin)
            forwards.append(middle - begin)
            backwards.append(end - middle)
    held, peak = torch.cuda.memory_allocated() / GIB, torch.cuda.max_memory_allocated() / GIB
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2e9))
    first.record()
    for _ in range(QUEUED):
        training.step()
    last.record()
    torch.cuda.synchronize()
    host = [1e3 * statistics.median(times) for times in (steps, forwards, backwards)]
    return Figures(host[0], host[1], host[2], first.elapsed_time(last) / QUEUED, held, peak)


def cases(recipes: list[str], device: torch.device) -> Iterator[Case]:
    """Yield every way, torch's first."""
    for name, how in (
        ("eager", None),
        ("compiled", {}),
        ("reduce-overhead", {"mode": "reduce-overhead"}),
    ):
        yield Case(f"torch.nn, {name}", partial(TorchBlock, device), compile=how)
    theirs = peer()
    for recipe in recipes:
        region = partial(te.autocast, recipe=RECIPES[recipe]())
        block: Callable[[], torch.nn.Module] = partial(FusedBlock, te, device)
        for name, how in (
            ("eager", None),
            ("compiled", {}),
            ("reduce-overhead", {"mode": "reduce-overhead"}),
        ):
            yield Case(f"te_fast {recipe}, {name}", block, region, how)
        graph = partial(te.make_graphed_callables, enabled=True, recipe=RECIPES[recipe]())
        yield Case(f"te_fast {recipe}, graphed", block, region, graph=graph)
        if theirs is not None:
            own = getattr(theirs.recipe, RECIPES[recipe].__name__)()
            region = partial(theirs.pytorch.autocast, enabled=True, recipe=own)
            block = partial(PeerBlock, theirs.pytorch, device)
            yield Case(f"Transformer Engine {recipe}, eager", block, region)
            graph = partial(theirs.pytorch.make_graphed_callables, enabled=True, recipe=own)
            yield Case(f"Transformer Engine {recipe}, graphed", block, region, graph=graph)


def main() -> None:
    """Measure and print the table."""
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 512])
    parser.add_argument("--recipes", choices=RECIPES, nargs="+", default=list(RECIPES))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="ways whose names have one of these"
    )
    args = parser.parse_args()
    if args.device.type != "cuda":
        parser.error("training steps are measured on a GPU")
    warnings.simplefilter("ignore")
    results: dict[str, object] = {}
    failures: dict[str, str] = {}
    columns = ("way", "step, ms", "host forward", "host backward", "GPU", "held, GiB", "peak")
    for tokens in args.tokens:
        rows = []
        ways = cases(args.recipes, args.device)
        for case in (one for one in ways if any(part in one.name for part in args.only)):
            name = f"{tokens} tokens, {case.name}"
            trial = partial(measure, case, args.blocks, tokens, args.device)
            figures = attempt(name, trial, failures)
            if figures is not None:
                results[name] = asdict(figures)
                rows.append((case.name, *(f"{value:.2f}" for value in asdict(figures).values())))
            gc.collect()
            torch.cuda.empty_cache()
        show(f"{args.blocks} blocks, {tokens} tokens", columns, rows)
    write("llama_blocks", args, results, failures)


if __name__ == "__main__":
    main()
