"""Experts: host time of `GroupedLinear` for many counts of them, and a whole mixture beside torch's grouped product.

    python benches/grouped.py [--device cuda] [--tokens 4096 --hidden 7168 --ffn 2048 --experts 32 --topk 8]

Host time: forward and backward of `GroupedLinear` under block scaling with 8, 64 and 256 experts of 16 rows, whose
counts are on the device. The weights are one stack, one parameter for each expert, and the latter with `main_grad`,
without and with dummy gradients (`grad_added_to_main_grad`, as Megatron-LM sets it). On CUDA the host only launches; on
the CPU nothing is launched. Transformer Engine runs beside te_fast where it is installed.

The stacks of all three counts take turns, and nothing else runs between their bursts: drift of the machine, or the
caches that a slow body leaves behind, would look like a difference between the counts. The other bodies of a count
take turns among themselves.

Beside them stands what torch's autograd takes by itself: a function of as many parameters that returns the pieces of
one gradient, or no gradients ("autograd alone", "autograd, no gradients"). A step of `nn.Linear` in BF16 shows how fast
the host is.

The bench also times a whole block, `MoE`, of as many experts, router and permutation included.

GPU time: forward and backward of a mixture of experts, from its permuted rows to its result, by CUDA events. Figures
are ratios to the same mixture in BF16 by `torch._grouped_mm`. The whole block is timed likewise, from tokens to tokens,
beside one of Transformer Engine's functions and operations. Each FP8 step quantises the weights.

The whole block is also timed with FP8 weights that earlier steps have quantised. Its times under block scaling stand
beside floors. The profiler tells how much of the block's GPU time lies outside its grouped products, with and without
the casts of weights. No bar of GPU time changes the exit status.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import te_fast.pytorch as te
from _harness import (
    DTYPES,
    Timing,
    as_in_training,
    attempt,
    interleave,
    options,
    peer,
    show,
    tried,
    write,
)
from _moe_block import SIZES, measure
from te_fast import dispatch
from te_fast.common.recipe import Float8BlockScaling

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

COUNTS = (8, 64, 256)
ROWS_OF_EXPERT = 16
STACK = "one stack"
#: Of the stack: microseconds, and the slowest count over the fastest.
BAR_US, BAR_RATIO = 120.0, 1.10


def layer_of(
    library: Any, experts: int, arguments: argparse.Namespace, *, dummies: bool = False, **more: Any
) -> Any:
    """Make a grouped layer without biases; the stack of `main_grad`s lies in order."""
    size = arguments.features
    layer = library.GroupedLinear(
        experts,
        size,
        size,
        bias=False,
        params_dtype=DTYPES[arguments.dtype],
        device=arguments.device,
        **more,
    )
    if more.get("fuse_wgrad_accumulation"):
        stack = torch.zeros(experts, size, size, device=arguments.device)
        for number, buffer in enumerate(stack):
            weight = getattr(layer, f"weight{number}")
            weight.main_grad = buffer
            if dummies:
                weight.grad_added_to_main_grad = False
    return layer


def step_of(
    layer: Any, counts: Any, arguments: argparse.Namespace, rows: int
) -> Callable[[], None]:
    """Forward and backward."""
    dtype = DTYPES[arguments.dtype]
    x = torch.randn(rows, arguments.features, dtype=dtype, device=arguments.device)
    x.requires_grad_()
    gradient = torch.randn_like(x)
    parameters = [x, *layer.parameters()]

    def step() -> None:
        layer(x, counts).backward(gradient)
        for parameter in parameters:
            parameter.grad = None

    return step


def step_of_linear(arguments: argparse.Namespace, rows: int) -> Callable[[], None]:
    """Forward and backward of torch's own layer on as many rows."""
    size, dtype = arguments.features, DTYPES[arguments.dtype]
    layer = torch.nn.Linear(size, size, bias=False, dtype=dtype, device=arguments.device)
    x = torch.randn(rows, size, dtype=dtype, device=arguments.device, requires_grad=True)
    gradient, parameters = torch.randn_like(x), [x, *layer.parameters()]

    def step() -> None:
        layer(x).backward(gradient)
        for parameter in parameters:
            parameter.grad = None

    return step


class Alone(torch.autograd.Function):
    """A step of the least that autograd does for so many parameters. Its gradients are `pieces` of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pieces: int, *weights: torch.Tensor) -> torch.Tensor:
        """Return a new tensor."""
        ctx.pieces, ctx.like, ctx.missing = pieces, weights[0], [None] * (len(weights) - pieces)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the pieces of a new tensor for the first parameters, and nothing for the others."""
        rows, cols = ctx.like.shape
        stack = ctx.like.new_empty(ctx.pieces * rows, cols) if ctx.pieces else None
        pieces = [] if stack is None else stack.unsafe_split_with_sizes([rows] * ctx.pieces)
        return grads[0], None, *pieces, *ctx.missing


def step_alone(experts: int, arguments: argparse.Namespace, *, pieces: int) -> Callable[[], None]:
    """Forward and backward of such a function on the parameters of a layer."""
    weights = list(layer_of(te, experts, arguments).parameters())
    x = torch.ones_like(weights[0]).requires_grad_()
    gradient, parameters = torch.ones_like(x), [x, *weights]

    def step() -> None:
        y: Any = Alone.apply(x, pieces, *weights)
        y.backward(gradient)
        for parameter in parameters:
            parameter.grad = None

    return step


@contextmanager
def without_kernels(arguments: argparse.Namespace) -> Iterator[None]:
    """Run a region in which the CPU launches nothing."""
    with te.autocast(recipe=Float8BlockScaling()):
        if arguments.device.type == "cuda":
            yield
            return
        with dispatch.record(execute=False):
            yield


def counts_of(experts: int, arguments: argparse.Namespace) -> torch.Tensor:
    """Return the rows of each expert, on the device."""
    return torch.full((experts,), ROWS_OF_EXPERT, device=arguments.device)


def stack_times(arguments: argparse.Namespace) -> dict[str, Timing]:
    """Microseconds of a step of one stack, by number of experts, in the same rounds."""
    bodies: dict[str, Callable[[], object]] = {}
    for experts in COUNTS:
        layer = layer_of(te, experts, arguments, single_grouped_weight=True)
        counts, rows = counts_of(experts, arguments), experts * ROWS_OF_EXPERT
        bodies[str(experts)] = step_of(layer, counts, arguments, rows)
    return interleave(
        bodies,
        arguments.device,
        rounds=arguments.rounds,
        calls=arguments.calls,
        regions=dict.fromkeys(bodies, partial(without_kernels, arguments)),
    )


def host_times(
    arguments: argparse.Namespace, failures: dict[str, str]
) -> dict[str, dict[str, Timing]]:
    """Microseconds of a step, by number of experts and kind of layer."""
    kinds: dict[str, dict[str, Any]] = {
        "main_grad": {"fuse_wgrad_accumulation": True},
        "main_grad, dummies": {"fuse_wgrad_accumulation": True, "dummies": True},
        "parameters": {},
    }
    stacks = stack_times(arguments)
    others = peer() if arguments.device.type == "cuda" else None
    result = {}
    for experts in COUNTS:
        rows = experts * ROWS_OF_EXPERT
        counts = counts_of(experts, arguments)
        bodies: dict[str, Callable[[], object]] = {}
        regions: dict[str, Callable[[], Any]] = {}
        for kind, more in kinds.items():
            layer = layer_of(te, experts, arguments, **more)
            bodies[kind] = step_of(layer, counts, arguments, rows)
        bodies["autograd alone"] = step_alone(experts, arguments, pieces=experts)
        bodies["autograd, no gradients"] = step_alone(experts, arguments, pieces=0)
        bodies["nn.Linear"] = step_of_linear(arguments, rows)
        bodies["block"] = step_of_block(experts, arguments, single=True)
        bodies["block, parameters"] = step_of_block(experts, arguments, single=False)
        regions |= dict.fromkeys(bodies, partial(without_kernels, arguments))
        if others is not None:
            name, recipe = "Transformer Engine", others.recipe.Float8BlockScaling()
            regions[name] = partial(others.pytorch.autocast, enabled=True, recipe=recipe)

            def make(experts: int = experts, rows: int = rows) -> Callable[[], None]:
                layer = layer_of(others.pytorch, experts, arguments)
                return step_of(layer, [ROWS_OF_EXPERT] * experts, arguments, rows)

            trial = partial(tried, make, arguments.device, regions[name])
            body = attempt(f"{experts} experts, {name}", trial, failures)
            if body is not None:
                bodies[name] = body
        found = interleave(
            bodies,
            arguments.device,
            rounds=arguments.rounds,
            calls=arguments.calls,
            regions=regions,
        )
        result[str(experts)] = {STACK: stacks[str(experts)], **found}
    return result


def report_stack(times: dict[str, dict[str, Timing]]) -> tuple[dict[str, float], bool]:
    """Print the stack's medians beside the bars; return the figures, and whether both bars are met."""
    medians = {count: found[STACK].median for count, found in times.items()}
    worst, ratio = max(medians.values()), max(medians.values()) / min(medians.values())
    said = ", ".join(f"{median:.1f} µs for {count} experts" for count, median in medians.items())
    print(f"{STACK}: {said} (bar {BAR_US:.0f}); largest ratio {ratio:.3f} (bar {BAR_RATIO:.2f})")
    figures = {"worst_us": round(worst, 3), "largest_ratio": round(ratio, 3)}
    return figures, worst <= BAR_US and ratio <= BAR_RATIO


def step_of_block(
    experts: int, arguments: argparse.Namespace, *, single: bool
) -> Callable[[], None]:
    """Forward and backward of a whole block."""
    size, dtype = arguments.features, DTYPES[arguments.dtype]
    block = te.MoE(
        *(size, size, experts, 8),
        device=arguments.device,
        dtype=dtype,
        single_grouped_weight=single,
    )
    rows = experts * ROWS_OF_EXPERT // 8
    x = torch.randn(rows, size, dtype=dtype, device=arguments.device, requires_grad=True)
    gradient = torch.ones_like(x)
    parameters = [x, *block.parameters()]

    def step() -> None:
        y: Any = block(x)
        y.backward(gradient)
        for parameter in parameters:
            parameter.grad = None

    return step


def main() -> int:
    """Measure, print, write; 1 when a bar of host time is missed on CUDA."""
    parser = options(__doc__)
    parser.add_argument("--features", type=int, default=512, help="sides of a weight, host time")
    parser.add_argument("--host-only", action="store_true", help="no GPU time")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    as_in_training()
    failures: dict[str, str] = {}
    times = host_times(arguments, failures)
    kinds = list(dict.fromkeys(kind for found in times.values() for kind in found))
    show(
        f"host time of forward + backward, µs, {arguments.features} x {arguments.features}",
        ["experts", *kinds],
        [
            [count, *(f"{found[kind].median:.1f}" if kind in found else "" for kind in kinds)]
            for count, found in times.items()
        ],
    )
    stack, is_met = report_stack(times)
    figures: dict[str, object] = {
        "host_microseconds": {
            count: {kind: timing.as_dict() for kind, timing in found.items()}
            for count, found in times.items()
        },
        STACK: stack,
    }
    if arguments.device.type == "cuda" and not arguments.host_only:
        figures |= measure(arguments, failures)
    write("grouped", arguments, figures, failures)
    return 1 if arguments.device.type == "cuda" and not is_met else 0


if __name__ == "__main__":
    sys.exit(main())
