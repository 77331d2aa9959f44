"""Products of groups of rows on the GPU: FP8 with the bits of the host's emulation, 16 bits against FP64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernels are Hopper's", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from guarded import Guarded  # noqa: E402

import te_fast  # noqa: E402
from grouped_reference import BLOCK, Problem, up  # noqa: E402
from te_fast.dispatch import QuantizedOperand  # noqa: E402

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SPLITS = {
    "ragged": [3, 0, 16, 1, 40],
    "empty ends": [0, 7, 0],
    "nothing": [0, 0],
    "too many": [200, 100, 900],
    "negative": [4, -3, 6],
    "edges of tiles": [64, 65, 127, 128, 129, 193, 0, 15],
    "more than a warp": [(5 * i) % 9 for i in range(65)],
    "many": [i % 3 for i in range(256)],
}
FP8 = [
    ("tensor", E4M3, True),
    ("tensor", E5M2, False),
    ("tensor", E4M3, False),
    ("block", E4M3, False),
    ("block", E5M2, False),
]
FP8_IDS = ["fast", "split e5m2", "split", "block", "block e5m2"]


def run(problem: Problem, out: torch.Tensor, **options: object) -> None:
    te_fast.dispatch.grouped_gemm(
        problem.a,
        problem.b,
        out,
        problem.counts,
        a_scale_inv=problem.a_scale,
        b_scale_inv=problem.b_scale,
        weight_gradient=problem.kind == "weight_gradient",
        align=problem.align,
        **options,  # type: ignore[arg-type]
    )


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> Guarded:
    """Sevens between canaries: a byte that no launch writes stays seven."""
    guard = Guarded(shape, dtype)
    guard.tensor.fill_(7)
    return guard


def operand(data: torch.Tensor, scale: torch.Tensor, block: int) -> QuantizedOperand:
    """One group's operand on the host; pitches of scales are multiples of four."""
    data = data.contiguous()
    if block:
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[-1] % 4))
    return QuantizedOperand(
        data.view(torch.uint8), scale.contiguous(), None, None, data.dtype, block, data.shape[1]
    )


def exact(
    problem: Problem, out: torch.Tensor, bias: torch.Tensor | None, *, accumulate: bool, fast: bool
) -> torch.Tensor:
    """The same products on the host, group by group, with the bits of the tensor cores."""
    host = {name: getattr(problem, name).cpu() for name in ("a", "b", "a_scale", "b_scale")}
    result, block = out.cpu().clone(), problem.scaling == "block"
    for group, (start, length) in enumerate(problem.spans):
        rows = slice(start, start + length)
        if problem.kind == "rows":
            a, b, target = host["a"][rows], host["b"][group], result[rows]
            scales = (host["a_scale"][:, rows], host["b_scale"][group]) if block else None
            blocks = (1, 2)
        else:
            a, b, target = host["a"][:, rows], host["b"][:, rows], result[group]
            strips = slice(start // BLOCK, start // BLOCK + up(length, BLOCK) // BLOCK)
            scales = (host["a_scale"][strips], host["b_scale"][strips]) if block else None
            blocks = (1, 1)
            if length == 0:
                target.mul_(1.0 if accumulate else 0.0)
            # The products' sums end with zeros: they need whole words.
            a, b = (
                torch.nn.functional.pad(x.view(torch.uint8), (0, -length % 16)).view(x.dtype)
                for x in (a, b)
            )
        if length == 0:
            continue
        if scales is None:
            scales, blocks = (
                (host["a_scale"][group : group + 1], host["b_scale"][group : group + 1]),
                (0, 0),
            )
        te_fast.dispatch.gemm(
            operand(a, scales[0], blocks[0]),
            operand(b, scales[1], blocks[1]),
            target,
            bias=None if bias is None else bias[group].cpu(),
            accumulate=accumulate,
            fast_accumulation=fast,
            exact=True,
        )
    return result


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize(("scaling", "a", "fast"), FP8, ids=FP8_IDS)
@pytest.mark.parametrize(("n", "k", "out_type"), [(136, 144, BF16), (392, 528, F32), (16, 16, F16)])
@pytest.mark.parametrize("align", [1, 128])
def test_fp8_rows(splits, scaling, a, fast, n, k, out_type, align) -> None:
    rows = 700 if align == 1 else 128 * (len(splits) + 8)
    problem = Problem("rows", splits, rows, n, k, a, E4M3, scaling, align, "cuda", seed=n)
    bias = torch.randn(len(splits), n, device="cuda").to(BF16) if out_type == BF16 else None
    guard = guarded((rows, n), out_type)
    expected = exact(problem, guard.tensor, bias, accumulate=False, fast=fast)
    run(problem, guard.tensor, bias=bias, fast_accumulation=fast)
    guard.check()
    assert guard.tensor.cpu().equal(expected)


@pytest.mark.parametrize("steps", [33, 64, 98])
@pytest.mark.parametrize(("scaling", "a", "fast"), FP8, ids=FP8_IDS)
def test_fp8_rows_of_many_steps(scaling, a, fast, steps) -> None:
    """Scales of B are read 32 steps ahead, also for the next tile: there are more tiles than multiprocessors."""
    splits, rows, n, k = [1, 0, 2] * 60, 190, 136, 128 * steps - 16
    problem = Problem("rows", splits, rows, n, k, a, E4M3, scaling, 1, "cuda", seed=steps)
    guard = guarded((rows, n), BF16)
    expected = exact(problem, guard.tensor, None, accumulate=False, fast=fast)
    run(problem, guard.tensor, fast_accumulation=fast)
    guard.check()
    assert guard.tensor.cpu().equal(expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize(("scaling", "a", "fast"), FP8, ids=FP8_IDS)
@pytest.mark.parametrize(("n", "k", "out_type"), [(72, 136, F32), (200, 264, BF16)])
def test_fp8_weight_gradient(splits, scaling, a, fast, n, k, out_type, accumulate) -> None:
    if len(splits) > 65:
        splits = splits[:80]
    rows = 128 * (len(splits) + 8)
    problem = Problem("weight_gradient", splits, rows, n, k, a, E4M3, scaling, 128, "cuda", seed=k)
    guard = guarded((len(splits), n, k), out_type)
    expected = exact(problem, guard.tensor, None, accumulate=accumulate, fast=fast)
    run(problem, guard.tensor, accumulate=accumulate, fast_accumulation=fast)
    guard.check()
    assert guard.tensor.cpu().equal(expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("scaling", "a", "fast"), FP8, ids=FP8_IDS)
@pytest.mark.parametrize(("k", "out_type"), [(1400, BF16), (1416, F32), (1672, BF16)])
def test_fp8_weight_gradient_of_many_tiles(scaling, a, fast, k, out_type, accumulate) -> None:
    """Of more tiles than multiprocessors, a gradient that is not added has wider ones."""
    splits, n = [300, 0, 129, 64, 2, 257], 392
    problem = Problem("weight_gradient", splits, 1280, n, k, a, E4M3, scaling, 128, "cuda", seed=k)
    guard = guarded((len(splits), n, k), out_type)
    expected = exact(problem, guard.tensor, None, accumulate=accumulate, fast=fast)
    run(problem, guard.tensor, accumulate=accumulate, fast_accumulation=fast)
    guard.check()
    assert guard.tensor.cpu().equal(expected)


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("kind", ["rows", "weight_gradient"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("n", "k", "out_type"), [(136, 144, None), (392, 520, F32)])
@pytest.mark.parametrize("align", [1, 16])
def test_16_bits(splits, kind, dtype, n, k, out_type, align) -> None:
    rows, out_type = (700 if align == 1 else 16 * (len(splits) + 20)), out_type or dtype
    problem = Problem(kind, splits, rows, n, k, dtype, dtype, "none", align, "cuda", seed=n)
    guard = guarded((rows, n) if kind == "rows" else (len(splits), n, k), out_type)
    accumulate = kind != "rows" and out_type == F32
    expected = problem.expected(guard.tensor, accumulate=accumulate)
    run(problem, guard.tensor, accumulate=accumulate)
    guard.check()
    rounding = {F32: 2.0**-23, BF16: 2.0**-8, F16: 2.0**-11}[out_type]
    bound = 2e-6 * (problem.magnitude() + 8) + rounding * expected.abs()
    assert (guard.tensor.double() - expected).abs().le(bound).all()
    if kind == "rows":
        assert guard.tensor[~problem.inside].eq(7).all()


def test_a_graph_takes_the_splits_of_its_replay() -> None:
    problem = Problem("rows", [40, 30, 20], 128, 256, 256, E4M3, E4M3, "block", 1, "cuda")
    problem.a = torch.randn(128, 256, device="cuda").to(E4M3)
    problem.a_scale = torch.ones_like(problem.a_scale)
    out = torch.empty(128, 256, device="cuda", dtype=BF16)
    run(problem, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(problem, out)
    make = torch.Generator().manual_seed(0)
    for _ in range(100):
        splits = torch.randint(0, 43, (3,), generator=make)
        problem.counts.copy_(splits)
        expected = torch.full_like(out, 7.0)
        run(problem, expected)
        out.fill_(7.0)
        graph.replay()
        assert out.equal(expected)


@pytest.mark.parametrize("scaling", ["block", "tensor", "none"])
def test_results_repeat_beside_other_work(scaling) -> None:
    dtype = BF16 if scaling == "none" else E4M3
    splits = [300, 0, 257, 1000, 64, 2]
    problem = Problem("weight_gradient", splits, 2048, 384, 512, dtype, dtype, scaling, 128, "cuda")
    first = torch.zeros(6, 384, 512, device="cuda")
    run(problem, first)
    other, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            other @ other
        again = torch.zeros_like(first)
        run(problem, again)
        assert again.equal(first)
