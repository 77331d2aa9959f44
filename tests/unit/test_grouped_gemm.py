"""Grouped products on the host backend against FP64."""

from __future__ import annotations

import pytest
import torch

import te_fast
from grouped_reference import Problem
from selection import sampled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPLITS = {
    "ragged": [3, 0, 16, 1, 40],
    "empty ends": [0, 7, 0],
    "one": [33],
    "all in one": [0, 64, 0, 0],
    "nothing": [0, 0],
    "too many": [20, 100, 5],
    "negative": [4, -3, 6],
}


def run(problem: Problem, out: torch.Tensor, **options: object) -> torch.Tensor:
    return te_fast.dispatch.grouped_gemm(
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


@pytest.mark.parametrize(
    ("splits", "a", "b", "scaling", "align"),
    sampled(
        SPLITS.values(),
        [
            pytest.param(torch.float32, torch.float32, "none"),
            pytest.param(torch.bfloat16, torch.bfloat16, "none"),
            pytest.param(E4M3, E4M3, "tensor"),
            pytest.param(E5M2, E4M3, "tensor"),
            pytest.param(E4M3, E4M3, "block"),
        ],
        [1, 128],
    ),
    ids=str,
)
def test_rows(splits: list[int], a: torch.dtype, b: torch.dtype, scaling: str, align: int) -> None:
    rows = 64 if align == 1 else 5 * 128
    problem = Problem(
        "rows", splits, rows, n=144, k=160, a_dtype=a, b_dtype=b, scaling=scaling, align=align
    )
    bias = torch.randn(len(splits), 144, generator=torch.Generator().manual_seed(1))
    out = torch.full((rows, 144), 7.0)
    expected = problem.expected(out, bias)
    run(problem, out, bias=bias)
    assert (out.double() - expected).abs().le(2e-6 * (problem.magnitude() + 8)).all()
    assert out[~problem.inside].eq(7).all()


@pytest.mark.parametrize(
    ("splits", "a", "b", "scaling", "align", "accumulate"),
    sampled(
        SPLITS.values(),
        [
            pytest.param(torch.float32, torch.float32, "none", 1),
            pytest.param(torch.bfloat16, torch.bfloat16, "none", 16),
            pytest.param(E4M3, E4M3, "tensor", 128),
            pytest.param(E5M2, E4M3, "tensor", 128),
            pytest.param(E4M3, E4M3, "block", 128),
        ],
        [False, True],
    ),
    ids=str,
)
def test_weight_gradient(
    splits: list[int], a: torch.dtype, b: torch.dtype, scaling: str, align: int, accumulate: bool
) -> None:
    rows = 5 * 128 if align == 128 else 64
    problem = Problem(
        "weight_gradient",
        splits,
        rows,
        n=48,
        k=80,
        a_dtype=a,
        b_dtype=b,
        scaling=scaling,
        align=align,
    )
    out = torch.full((len(splits), 48, 80), 7.0)
    expected = problem.expected(out, accumulate=accumulate)
    run(problem, out, accumulate=accumulate)
    assert (out.double() - expected).abs().le(2e-6 * (problem.magnitude() + 8)).all()


@pytest.mark.parametrize(("n", "k"), [(0, 8), (8, 0)])
def test_weight_gradients_without_elements(n: int, k: int) -> None:
    out, splits = torch.empty(2, n, k), torch.tensor([3, 1])
    a, b = torch.ones(4, n), torch.ones(4, k)
    te_fast.dispatch.grouped_gemm(a, b, out, splits, weight_gradient=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    problem = Problem("rows", [5, 9], 14, 16, 32, torch.float32, torch.float32, "none", 1)
    wide = run(problem, torch.empty(14, 16))
    assert run(problem, torch.empty(14, 16, dtype=dtype)).equal(wide.to(dtype))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"splits": torch.tensor([2, 2], dtype=torch.int32)},
            te_fast.DtypeError,
            "splits must be torch.int64",
        ),
        ({"splits": torch.tensor([2, 2, 2])}, te_fast.ShapeError, "b must be of shape"),
        ({"out": torch.empty(4, 3)}, te_fast.ShapeError, "d must be of shape"),
        ({"b": torch.empty(2, 16, 8, dtype=torch.bfloat16)}, te_fast.DtypeError, "operand"),
        ({"accumulate": True}, te_fast.UnsupportedError, "weight gradient"),
        ({"align": 3}, te_fast.TeFastError, "multiple"),
        ({"align": -16}, ValueError, "multiple"),
        ({"a": torch.ones(4, 0), "b": torch.ones(2, 16, 0)}, te_fast.ShapeError, "one column"),
        ({"a_scale_inv": torch.ones(2)}, te_fast.TeFastError, "scales"),
        ({"bias": torch.ones(2, 15)}, te_fast.ShapeError, "32 elements"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], text: str) -> None:
    arguments: dict[str, object] = {
        "a": torch.ones(4, 8),
        "b": torch.ones(2, 16, 8),
        "out": torch.full((4, 16), 7.0),
        "splits": torch.tensor([2, 2]),
    }
    out = arguments["out"]
    arguments.update(change)
    with pytest.raises(error, match=text):
        te_fast.dispatch.grouped_gemm(**arguments)  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor)
    assert out.eq(7).all()
