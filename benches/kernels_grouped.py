"""Products of groups of rows: TFLOP/s of every kernel, beside torch's grouped products, in turns in one process.

    python benches/kernels_grouped.py [--device cuda]

GPU time is the median between CUDA events around one call; a read before each call flushes the L2 cache. FP8 is
compared with `torch._scaled_grouped_mm` (a scale per row, fast accumulation), bfloat16 with `torch._grouped_mm`. Weight
gradients have the same shapes; they are added to float32, or stored in bfloat16. With ``TE_FAST_OWN_GEMM=0`` and a
cuBLAS that has them, products of groups in bfloat16 and under one scale are cuBLASLt's.

Dense products are products of one group. Their times over cuBLASLt's say which dense layers use these kernels
(`rust/core/src/gemm/plan.rs`).

Beside bars: 256 experts of 64 rows over a loop of cuBLASLt's products, both as CUDA graphs; the weight gradients of
experts over one dense product of as many operations; casts of all experts' weights and rows, in both layouts, over a
copy that moves as many bytes.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from typing import TYPE_CHECKING

import torch

os.environ.setdefault("TE_FAST_OWN_GEMM", "grouped")  # `gemm` is cuBLASLt

from _harness import options, show, write
from te_fast.common.recipe import Float8BlockScaling, Float8CurrentScaling
from te_fast.dispatch import QuantizedOperand, gemm, grouped_gemm, quantize, quantize_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_fast.dispatch.groups import Role

# (groups, rows of each, n, k)
SHAPES = [
    (8, 1024, 4096, 4096),
    (32, 1024, 4096, 7168),
    (32, 1024, 7168, 2048),
    (32, 1024, 2048, 7168),
    (32, 1024, 7168, 4096),
    (1, 8192, 8192, 8192),
    (256, 128, 4096, 2048),
]
# (rows, n, k) of dense products: linears of models with hidden sizes of 2048, 4096 and 8192
DENSE = [
    (rows, n, k)
    for rows in (512, 2048, 4096, 8192)
    for n, k in (
        *[(2048, 2048), (6144, 2048), (11264, 2048), (2048, 5632)],
        *[(4096, 4096), (12288, 4096), (22016, 4096), (4096, 11008), (8192, 8192)],
    )
]
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Calls = dict[str, "Callable[[], object]"]


def in_turns(calls: Calls, rounds: int = 12) -> dict[str, float]:
    """Median microseconds of each."""
    flush = torch.ones(1 << 26, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for count in range(rounds + 2):
        for name, call in calls.items():
            flush.amax()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if count >= 2:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(samples) for name, samples in times.items()}


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, because a product of zeros draws another power."""
    return torch.randn(*shape, device="cuda", dtype=BF16).to(dtype)


def rows(groups: int, each: int, n: int, k: int) -> Calls:
    """Products by rows."""
    count = groups * each
    splits = torch.full((groups,), each, dtype=torch.int64, device="cuda")
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device="cuda") * each
    a, b, out = (
        random(count, k, dtype=E4M3),
        random(groups, n, k, dtype=E4M3),
        random(count, n, dtype=BF16),
    )
    a16, b16 = random(count, k, dtype=BF16), random(groups, n, k, dtype=BF16)
    one = torch.ones(groups, device="cuda")
    a_blocks = torch.ones(k // 128, count, device="cuda")
    b_blocks = torch.ones(groups, n // 128, -(-k // 512) * 4, device="cuda")
    a_rows, b_rows = torch.ones(count, device="cuda"), torch.ones(groups, n, device="cuda")
    tensor = {"a_scale_inv": one, "b_scale_inv": one}
    return {
        "torch fp8": lambda: torch._scaled_grouped_mm(
            a, b.transpose(1, 2), a_rows, b_rows, offs=ends, out_dtype=BF16, use_fast_accum=True
        ),
        "fast": lambda: grouped_gemm(a, b, out, splits, fast_accumulation=True, **tensor),
        "split": lambda: grouped_gemm(a, b, out, splits, **tensor),
        "block": lambda: grouped_gemm(
            a, b, out, splits, a_scale_inv=a_blocks, b_scale_inv=b_blocks
        ),
        "torch bf16": lambda: torch._grouped_mm(a16, b16.transpose(1, 2), offs=ends),
        "bf16": lambda: grouped_gemm(a16, b16, out, splits),
    }


def weight_gradients(groups: int, each: int, n: int, k: int) -> Calls:
    """Weight gradients."""
    count = groups * each
    splits = torch.full((groups,), each, dtype=torch.int64, device="cuda")
    a, b = random(n, count, dtype=E4M3), random(k, count, dtype=E4M3)
    a16, b16 = random(count, n, dtype=BF16), random(count, k, dtype=BF16)
    one = torch.ones(groups, device="cuda")
    tensor = {"a_scale_inv": one, "b_scale_inv": one}
    block = {
        "a_scale_inv": torch.ones(count // 128, n, device="cuda"),
        "b_scale_inv": torch.ones(count // 128, k, device="cuda"),
    }
    added, stored = (
        torch.zeros(groups, n, k, device="cuda"),
        torch.empty(groups, n, k, dtype=BF16, device="cuda"),
    )
    calls: Calls = {}
    for name, operands, scales in [
        ("split", (a, b), tensor),
        ("block", (a, b), block),
        ("bf16", (a16, b16), {}),
    ]:
        for kind, out in (("added", added), ("stored", stored)):
            calls[f"{name}, {kind}"] = (
                lambda operands=operands, scales=scales, out=out, adds=kind == "added": (
                    grouped_gemm(
                        *operands,
                        out,
                        splits,
                        weight_gradient=True,
                        accumulate=adds,
                        align=128,
                        **scales,
                    )
                )
            )
    return calls


def own_dense(
    x: QuantizedOperand, w: QuantizedOperand, out: torch.Tensor, splits: torch.Tensor, *, fast: bool
) -> object:
    """One group's product."""
    assert x.rowwise_data is not None
    assert w.rowwise_data is not None
    a, b = x.rowwise_scale_inv, w.rowwise_scale_inv
    assert a is not None
    assert b is not None
    return grouped_gemm(
        x.rowwise_data.view(E4M3),
        w.rowwise_data.view(E4M3)[None],
        out,
        splits,
        a_scale_inv=a if x.block else a.view(-1),
        b_scale_inv=b[None] if x.block else b.view(-1),
        fast_accumulation=fast,
    )


def dense(rows: int, n: int, k: int) -> Calls:
    """Dense products by the kernel of groups and by cuBLASLt."""
    x, w = random(rows, k, dtype=BF16), random(n, k, dtype=BF16)
    out = torch.empty(rows, n, device="cuda", dtype=BF16)
    splits = torch.tensor([rows], device="cuda")
    calls: Calls = {}
    for kind, recipe, fast in [
        ("fast", Float8CurrentScaling(), True),
        ("split", Float8CurrentScaling(), False),
        ("block", Float8BlockScaling(), False),
    ]:
        operands = quantize(x, recipe), quantize(w, recipe, role="weight")
        calls[f"{kind}, cuBLASLt"] = lambda operands=operands, fast=fast: gemm(
            *operands, out, fast_accumulation=fast
        )
        calls[f"{kind}, own"] = lambda operands=operands, fast=fast: own_dense(
            *operands, out, splits, fast=fast
        )
    return calls


def block_operand(rows: int, k: int, block: int) -> QuantizedOperand:
    """FP8 values under scales of 1: one for 1 x 128 elements, or for 128 x 128."""
    shape = (k // 128, rows) if block == 1 else (-(-rows // 128), -(-k // 512) * 4)
    data = random(rows, k, dtype=E4M3).view(torch.uint8)
    return QuantizedOperand(data, torch.ones(shape, device="cuda"), None, None, E4M3, block, k)


def graph_of(call: Callable[[], object]) -> Callable[[], None]:
    """Capture a call, behind a run of it."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def few_rows(n: int, k: int) -> Calls:
    """256 experts of 64 rows: one launch, and a loop of cuBLASLt's products."""
    groups, each = 256, 64
    own = rows(groups, each, n, k)["block"]
    x, w = block_operand(each, k, 1), block_operand(n, k, 2)
    outs = torch.empty(groups, each, n, device="cuda", dtype=BF16)

    def loop() -> None:
        for out in outs:
            gemm(x, w, out)

    return {"one launch": graph_of(own), "loop of cuBLASLt": graph_of(loop)}


def dense_gradient(groups: int, each: int, n: int, k: int) -> Calls:
    """Return the stored weight gradients of experts, and one dense product of as many operations."""
    x, w = (block_operand(size, groups * each, 1) for size in (n, k))
    out = torch.empty(n, k, device="cuda", dtype=BF16)
    own = weight_gradients(groups, each, n, k)["block, stored"]
    return {"experts": own, "dense": lambda: gemm(x, w, out)}


def casts(groups: int, each: int, n: int, k: int) -> dict[str, float]:
    """Return the times of the casts of all weights, and of all rows, over those of copies."""
    ratios = {}
    splits = torch.full((groups,), each, dtype=torch.int64, device="cuda")
    recipe = Float8BlockScaling()
    cases: list[tuple[str, Role, torch.Tensor, torch.Tensor | None]] = [
        ("weights", "weight", random(groups, n, k, dtype=BF16), None),
        ("rows", "input", random(groups * each, k, dtype=BF16), splits),
    ]
    for name, role, x, given in cases:
        copied = torch.empty(2 * x.numel(), device="cuda", dtype=torch.uint8)
        target = torch.empty_like(copied)
        times = in_turns(
            {
                "cast": partial(quantize_groups, x, given, recipe, role=role, columnwise=True),
                "copy": partial(target.copy_, copied),
            }
        )
        ratios[name] = times["cast"] / times["copy"]
    return ratios


def measure_bars() -> dict[str, dict[str, float]]:
    """Measure and print what has bars of its own."""
    few = {f"{k} to {n}": in_turns(few_rows(n, k)) for n, k in ((4096, 2048), (2048, 4096))}
    dense = {
        f"{groups} x {each}, {k} to {n}": in_turns(dense_gradient(groups, each, n, k))
        for groups, each, n, k in ((8, 1024, 4096, 4096), (32, 1024, 4096, 7168))
    }
    table = {
        "loop of cuBLASLt over 256 experts of 64 rows (bar: 2 or more)": {
            name: times["loop of cuBLASLt"] / times["one launch"] for name, times in few.items()
        },
        "weight gradients over a dense product (bar: 1.15)": {
            name: times["experts"] / times["dense"] for name, times in dense.items()
        },
        "casts over a copy (bars: weights 1.10, rows 1.15)": casts(32, 1024, 4096, 7168),
    }
    for title, ratios in table.items():
        print(title, {name: round(ratio, 3) for name, ratio in ratios.items()})
    return table


def measure_dense() -> dict[str, dict[str, float]]:
    """Measure microseconds of both, and the ratio of te_fast's to cuBLASLt's."""
    table = {}
    for rows, n, k in DENSE:
        times = in_turns(dense(rows, n, k), rounds=8)
        kinds = dict.fromkeys(name.partition(",")[0] for name in times)
        ratios = {kind: times[f"{kind}, own"] / times[f"{kind}, cuBLASLt"] for kind in kinds}
        table[f"{rows}, {k} to {n}"] = times | ratios
        torch.cuda.empty_cache()
    names = list(next(iter(table.values())))
    show(
        "dense products, microseconds, and the own kernel's over cuBLASLt's",
        ["shape", *names],
        [
            [
                shape,
                *(
                    f"{value:.2f}" if name in kinds else f"{value:.1f}"
                    for name, value in line.items()
                ),
            ]
            for shape, line in table.items()
        ],
    )
    medians = {kind: statistics.median(line[kind] for line in table.values()) for kind in kinds}
    print("medians:", ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in medians.items()))
    return table


def main() -> None:
    arguments = options(__doc__).parse_args()
    figures: dict[str, object] = {"dense products": measure_dense()}
    for title, make in (("products by rows", rows), ("weight gradients", weight_gradients)):
        table = {}
        for groups, each, n, k in SHAPES:
            times = in_turns(make(groups, each, n, k))
            flop = 2 * groups * each * n * k
            table[f"{groups} x {each}, {k} to {n}"] = {
                name: flop / us / 1e6 for name, us in times.items()
            }
            torch.cuda.empty_cache()
        names = list(next(iter(table.values())))
        show(
            f"{title}, TFLOP/s",
            ["shape", *names],
            [[shape, *(f"{rate:.0f}" for rate in line.values())] for shape, line in table.items()],
        )
        figures[title] = table
    figures |= measure_bars()
    write("kernels_grouped", arguments, figures)


if __name__ == "__main__":
    main()
