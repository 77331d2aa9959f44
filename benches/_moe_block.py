"""GPU time of a mixture of experts: its experts, the whole block, and the part of the block outside its products.

Two tables compare te_fast with torch and Transformer Engine. There, the recipes take turns on one block, which keeps
FP8 weights of one recipe only. So each FP8 step quantises the weights, as Transformer Engine does in each forward.

For the other tables, each recipe has a copy of the block, and `is_first_microbatch` decides: with True a step quantises
the weights and keeps them, with False it uses the kept ones. BF16 quantises nothing.
"""

from __future__ import annotations

import copy
import importlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import te_fast.pytorch as te
from _harness import RECIPES, attempt, peer, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from te_fast.common.recipe import Recipe

#: Sizes that the bench takes by default; the floors are for them.
SIZES = {"tokens": 4096, "hidden": 7168, "ffn": 2048, "experts": 32, "topk": 8}
#: Milliseconds of the block under block scaling: floors of the launches' bytes and products at the rates of an H200 at
#: full clock: 1311 TFLOP/s for 1x128 by 128x128 products, 1045 for weight gradients, copies at 4.3 TB/s. The router and
#: casts of weights are left out. Weight gradients are counted as added to float32 `main_grad`; those of the bench are
#: BF16, which would lower the floor of backward by 0.03 ms.
FLOORS = {"forward": 2.57, "backward": 5.42, "forward + backward": 7.99}
#: Of the block under block scaling: its time over the floors. Of all recipes: the share of time outside the products.
BAR_FLOORS, BAR_SHARE = 1.20, 0.30
#: Parts of the names of kernels: grouped products (cuda/gemm), and the pause before a step.
PRODUCTS, PAUSE = ("grouped_rows", "grouped_wgrad"), "spin_kernel"
#: Steps that the profiler sees, and steps before them.
STEPS, WARM_UP = 5, 3


class TorchExperts(torch.nn.Module):
    """The experts in BF16 by torch's grouped product."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(experts[0].weight.detach().clone())
        self.last = torch.nn.Parameter(experts[2].weight.detach().clone())

    def forward(self, x: torch.Tensor, splits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Two products around SwiGLU, times the probabilities."""
        ends = splits.cumsum(0).to(torch.int32)
        product = torch._grouped_mm
        gate, up = product(x, self.first.transpose(1, 2), offs=ends).chunk(2, -1)
        hidden = (functional.silu(gate.float()) * up * probs[:, None]).to(x.dtype)
        result: torch.Tensor = product(hidden, self.last.transpose(1, 2), offs=ends)
        return result


class TorchBlock(torch.nn.Module):
    """A whole block in BF16: torch's router, permutation and sum around those experts."""

    def __init__(self, block: te.MoE) -> None:
        super().__init__()
        self.topk, self.count = block.topk, block.num_experts
        self.router = torch.nn.Parameter(block.router.detach().clone())
        self.experts = TorchExperts(block.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Choose, gather, multiply, and add."""
        best, chosen = (x.float() @ self.router.t()).topk(self.topk)
        probs = torch.softmax(best, -1).flatten()
        order = chosen.flatten().argsort(stable=True)
        splits = torch.zeros(self.count, dtype=torch.int64, device=x.device)
        splits = splits.index_add(0, chosen.flatten(), torch.ones_like(order))
        tokens = order // self.topk
        y = self.experts(x[tokens], splits, probs[order])
        return torch.zeros_like(x).index_add(0, tokens, y)


class PeerBlock(torch.nn.Module):
    """A whole block of Transformer Engine's router, permutation and operations, with parameters of its own."""

    def __init__(self, library: Any, block: te.MoE) -> None:
        super().__init__()
        self.library, self.topk = library, block.topk
        self.score = importlib.import_module(f"{library.__name__}.router")
        self.router = torch.nn.Parameter(block.router.detach().clone())
        options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
        options["device"] = block.router.device
        first, last = (block.experts[at].weight.shape for at in (0, 2))
        self.experts = library.ops.Sequential(
            library.ops.GroupedLinear(first[0], first[2], first[1], **options),
            library.ops.ScaledSwiGLU(),
            library.ops.GroupedLinear(last[0], last[2], last[1], **options),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Choose, permute and pad, multiply, and merge."""
        logits = x.float() @ self.router.t()
        choice = self.score.fused_topk_with_score_function
        groups = {"num_groups": None, "group_topk": None, "scaling_factor": None}
        rule = {"use_pre_softmax": False, "score_function": "softmax", "expert_bias": None}
        probs, mask = choice(logits, self.topk, **groups, **rule)
        permute = self.library.moe_permute_and_pad_with_probs
        rows, weights, row_id_map, pads, splits = permute(x, probs, mask, mask.sum(0), 16)
        y = self.experts(rows, splits, weights, splits)
        shape = x.shape
        result: torch.Tensor = self.library.moe_unpermute(
            y, row_id_map, restore_shape=shape, pad_offsets=pads
        )
        return result


def of_peer(
    block: te.MoE, x: torch.Tensor, gradient: torch.Tensor, failures: dict[str, str]
) -> tuple[dict[str, Callable[[], object]], list[torch.Tensor]]:
    """Return the steps of Transformer Engine's block by recipe, and its parameters."""
    found = peer()
    if found is None:
        return {}, []
    bodies: dict[str, Callable[[], object]] = {}
    theirs = PeerBlock(found.pytorch, block)
    recipes = {name: getattr(found.recipe, kind.__name__)() for name, kind in RECIPES.items()}
    for name, recipe in {"bf16": None, **recipes}.items():

        def step(recipe: Any = recipe) -> None:
            with found.pytorch.autocast(enabled=recipe is not None, recipe=recipe):
                y = theirs(x)
            y.backward(gradient)

        def trial(step: Callable[[], None] = step) -> Callable[[], None]:
            step()
            torch.cuda.synchronize()
            return step

        body = attempt(f"block, Transformer Engine {name}", trial, failures)
        if body is not None:
            bodies[f"Transformer Engine {name}"] = body
    return bodies, list(theirs.parameters())


def ready(tensors: Iterable[torch.Tensor]) -> None:
    """Clear gradients, and let the GPU pause, so that the host gets ahead."""
    for tensor in tensors:
        tensor.grad = None
    torch.cuda._sleep(20_000_000)


def events(
    bodies: dict[str, Callable[[], object]], tensors: list[torch.Tensor], rounds: int
) -> dict[str, float]:
    """Median milliseconds between CUDA events around bodies in turns; gradients are cleared before each."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for turn in range(WARM_UP + rounds):
        for name, body in bodies.items():
            ready(tensors)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            body()
            end.record()
            torch.cuda.synchronize()
            if turn >= WARM_UP:
                times[name].append(start.elapsed_time(end))
    return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


def expert_times(arguments: argparse.Namespace, block: te.MoE) -> dict[str, float]:
    """Return the milliseconds of the experts of a block; FP8 steps quantise the weights."""
    dtype, device = torch.bfloat16, arguments.device
    rows = arguments.tokens * arguments.topk
    chosen = torch.randint(arguments.experts, (rows,), device=device)
    splits = torch.bincount(chosen, minlength=arguments.experts)
    x = torch.randn(rows, arguments.hidden, dtype=dtype, device=device, requires_grad=True)
    probs = torch.rand(rows, device=device, requires_grad=True)
    gradient = torch.randn_like(x)
    theirs = TorchExperts(block.experts)
    region = {name: recipe() for name, recipe in RECIPES.items()}

    def ours(name: str) -> None:
        with te.autocast(enabled=name != "bf16", recipe=region.get(name)):
            y = block.experts(x, splits, probs, splits)
        y.backward(gradient)

    bodies: dict[str, Callable[[], object]] = {
        "torch._grouped_mm": lambda: theirs(x, splits, probs).backward(gradient),
        "te_fast bf16": lambda: ours("bf16"),
    }
    bodies |= {f"te_fast {name}": lambda name=name: ours(name) for name in RECIPES}  # type: ignore[misc]
    tensors = [x, probs, *block.parameters(), *theirs.parameters()]
    return events(bodies, tensors, arguments.rounds)


def tokens_of(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the tokens of a block, and the gradient of its result."""
    x = torch.randn(
        arguments.tokens, arguments.hidden, dtype=torch.bfloat16, device=arguments.device
    ).requires_grad_()
    return x, torch.randn_like(x)


def block_times(
    arguments: argparse.Namespace, block: te.MoE, failures: dict[str, str]
) -> dict[str, float]:
    """Return the milliseconds of a whole block; FP8 steps quantise the weights."""
    x, gradient = tokens_of(arguments)
    theirs = TorchBlock(block)
    region = {name: recipe() for name, recipe in RECIPES.items()}

    def ours(name: str) -> None:
        with te.autocast(enabled=name != "bf16", recipe=region.get(name)):
            y: Any = block(x)
        y.backward(gradient)

    bodies: dict[str, Callable[[], object]] = {
        "torch._grouped_mm": lambda: theirs(x).backward(gradient),
        "te_fast bf16": lambda: ours("bf16"),
    }
    bodies |= {f"te_fast {name}": lambda name=name: ours(name) for name in RECIPES}  # type: ignore[misc]
    others, parameters = of_peer(block, x, gradient, failures)
    tensors = [x, *block.parameters(), *theirs.parameters(), *parameters]
    return events(bodies | others, tensors, arguments.rounds)


class OwnBlock:
    """A copy of a block that runs under one recipe, so that it can keep its FP8 weights."""

    def __init__(self, block: te.MoE, recipe: Recipe | None) -> None:
        self.block = copy.deepcopy(block)
        self.region = partial(te.autocast, enabled=recipe is not None, recipe=recipe)

    def forward(self, x: torch.Tensor, *, is_first: bool) -> Any:
        """Return the block's result. The first microbatch quantises the weights; others use the kept ones."""
        with self.region():
            return self.block(x, is_first_microbatch=is_first)

    def step(self, x: torch.Tensor, gradient: torch.Tensor, *, is_first: bool) -> None:
        """Forward and backward."""
        self.forward(x, is_first=is_first).backward(gradient)


class Times(NamedTuple):
    """Milliseconds of a block: parts of a step that uses kept weights, and a step that quantises FP8 weights."""

    kept: dict[str, float]
    quantising: float | None


def own_times(
    blocks: dict[str, OwnBlock], x: torch.Tensor, gradient: torch.Tensor, rounds: int
) -> dict[str, Times]:
    """Return the times of blocks by recipe. Forward is timed alone, and backward is the rest of a step."""
    bodies: dict[str, Callable[[], object]] = {}
    tensors = [x]
    for name, own in blocks.items():
        tensors += own.block.parameters()
        bodies[f"{name}, forward"] = partial(own.forward, x, is_first=False)
        bodies[f"{name}, step"] = partial(own.step, x, gradient, is_first=False)
        if name in RECIPES:
            bodies[f"{name}, first step"] = partial(own.step, x, gradient, is_first=True)
    found = events(bodies, tensors, rounds)
    result = {}
    for name in blocks:
        forward, step = found[f"{name}, forward"], found[f"{name}, step"]
        parts = dict(zip(FLOORS, (forward, step - forward, step), strict=True))
        result[name] = Times(parts, found.get(f"{name}, first step"))
    return result


def over_floors(times: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return times over their floors."""
    return {
        part: {
            "ms": round(times[part], 3),
            "floor_ms": floor,
            "ratio": round(times[part] / floor, 3),
            "bar": BAR_FLOORS,
        }
        for part, floor in FLOORS.items()
    }


class Share(NamedTuple):
    """Microseconds of a step in grouped products and outside them, and how many kernels, copies and fills it has."""

    products: float
    others: float
    kernels: float

    @property
    def outside(self) -> float:
        """The share of time outside the products."""
        return self.others / (self.products + self.others)


def share_of(kernels: Iterable[tuple[str, float]], steps: int) -> Share:
    """Sum kernels of so many steps, given by name and microseconds; the pauses do not count."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for name, time in kernels:
        if PAUSE not in name:
            times[any(part in name for part in PRODUCTS)].append(time)
    count = len(times[True]) + len(times[False])
    if not times[True]:
        message = f"no grouped product among {count} kernels"
        raise RuntimeError(message)
    return Share(sum(times[True]) / steps, sum(times[False]) / steps, count / steps)


def profiled(step: Callable[[], object], tensors: list[torch.Tensor]) -> Share:
    """Return the sums of a step's kernels, after a warm-up."""
    for _ in range(WARM_UP):
        ready(tensors)
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            ready(tensors)
            step()
            torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    return share_of([(event.name, event.device_time) for event in kernels], STEPS)


def shares(
    blocks: dict[str, OwnBlock],
    x: torch.Tensor,
    gradient: torch.Tensor,
    failures: dict[str, str],
) -> dict[str, Share]:
    """Return the sums of blocks' steps, by recipe and by whether a step quantises the weights."""
    result = {}
    for name, own in blocks.items():
        tensors = [x, *own.block.parameters()]
        for is_first in (False, True) if name in RECIPES else (False,):
            case = f"{name}, weights {'' if is_first else 'not '}quantised"
            step = partial(own.step, x, gradient, is_first=is_first)
            share = attempt(
                f"kernels of the block, {case}", partial(profiled, step, tensors), failures
            )
            if share is not None:
                result[case] = share
    return result


def report_times(times: dict[str, Times]) -> dict[str, object]:
    """Print and return the times of blocks that each have one recipe."""
    show(
        "GPU time of the block, ms; the first columns: weights not quantised in the step",
        ["", *FLOORS, "both, weights quantised"],
        [
            [
                name,
                *(f"{time:.3f}" for time in found.kept.values()),
                "" if found.quantising is None else f"{found.quantising:.3f}",
            ]
            for name, found in times.items()
        ],
    )
    quantising = {name: found.quantising for name, found in times.items() if found.quantising}
    return {
        "gpu_milliseconds_weights_not_quantised": {
            name: found.kept for name, found in times.items()
        },
        "gpu_milliseconds_weights_quantised": quantising,
    }


def report_floors(times: dict[str, float]) -> dict[str, object]:
    """Print and return the times under block scaling, with kept weights, over their floors."""
    ratios = over_floors(times)
    show(
        "GPU time of the block over floors: block scaling, weights not quantised in the step",
        ["", "ms", "floor, ms", "ratio", "bar"],
        [
            [
                part,
                *(f"{found[key]:.3f}" for key in ("ms", "floor_ms")),
                *(f"{found[key]:.2f}" for key in ("ratio", "bar")),
            ]
            for part, found in ratios.items()
        ],
    )
    named = {f"{part}, weights not quantised": found for part, found in ratios.items()}
    return {"gpu_over_floors": named}


def report_shares(found: dict[str, Share]) -> dict[str, object]:
    """Print and return the shares of time outside the products."""
    show(
        "GPU time of the block outside its grouped products; weights quantised in the step or not",
        ["", "products, µs", "others, µs", "kernels", "share of others", "bar"],
        [
            [
                case,
                f"{share.products:.0f}",
                f"{share.others:.0f}",
                f"{share.kernels:g}",
                f"{share.outside:.3f}",
                f"{BAR_SHARE:.2f}",
            ]
            for case, share in found.items()
        ],
    )
    figures = {
        case: {
            "products_us": round(share.products, 1),
            "others_us": round(share.others, 1),
            "kernels": share.kernels,
            "share": round(share.outside, 4),
            "bar": BAR_SHARE,
        }
        for case, share in found.items()
    }
    return {"gpu_share_outside_products": figures}


def measure(arguments: argparse.Namespace, failures: dict[str, str]) -> dict[str, object]:
    """Print all tables and return their figures."""
    torch.manual_seed(0)
    block = te.MoE(
        *(arguments.hidden, arguments.ffn, arguments.experts, arguments.topk),
        device=arguments.device,
        dtype=torch.bfloat16,
        single_grouped_weight=True,
    )
    figures: dict[str, object] = {}
    both = {
        "experts": expert_times(arguments, block),
        "block": block_times(arguments, block, failures),
    }
    for what, found in both.items():
        reference = found["torch._grouped_mm"]
        show(
            f"GPU time of the {what}, forward + backward, {arguments.tokens} tokens x {arguments.topk}; "
            "FP8 weights quantised in each step",
            ["", "ms", "/ torch._grouped_mm"],
            [[name, f"{time:.3f}", f"{time / reference:.2f}"] for name, time in found.items()],
        )
        figures[f"gpu_milliseconds_{what}"] = found
    recipes = {name: recipe() for name, recipe in RECIPES.items()}
    blocks = {name: OwnBlock(block, recipes.get(name)) for name in ("bf16", *recipes)}
    x, gradient = tokens_of(arguments)
    times = own_times(blocks, x, gradient, arguments.rounds)
    figures |= report_times(times)
    if all(getattr(arguments, name) == size for name, size in SIZES.items()):
        figures |= report_floors(times["block"].kept)
    return figures | report_shares(shares(blocks, x, gradient, failures))
