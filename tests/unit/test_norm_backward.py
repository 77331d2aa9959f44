"""Gradients of the norms on the host backend against FP64 autograd."""

from __future__ import annotations

import pytest
import torch

import norm_reference as ref
from selection import every_pair, quickly, sampled
from te_fast import dispatch
from te_fast.dispatch import NormFunction, NormGradients
from te_fast.errors import DtypeError, ShapeError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = [
    NormFunction("LayerNorm", 1e-5),
    NormFunction("RMSNorm", 1e-6),
    NormFunction("LayerNorm", 1e-3, zero_centered_gamma=True),
    NormFunction("RMSNorm", 1e-5, zero_centered_gamma=True),
]
LONG = 20_000  # a block cannot hold such a row, which takes two launches


def make(rows, cols, dtype, weight=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, cols, generator=generator) * 1.5 + 0.25).to(dtype)
    dy, add = (torch.randn(rows, cols, generator=generator).to(dtype) for _ in range(2))
    return dy, x, torch.randn(cols, generator=generator).to(weight or dtype), add


def statistics(x, gamma, function):
    """Mean and inverse deviation as the forward saves them."""
    _, mean, rstd = ref.normalise(x, gamma, function)
    return mean.float() if function.normalization == "LayerNorm" else None, rstd.float()


def run(dy, x, gamma, function, out=None, add=None):
    out = dispatch.norm_gradients(x, gamma, function) if out is None else out
    stats = statistics(x, gamma, function)
    return dispatch.norm_backward(dy, x, gamma, *stats, function, out, add=add)


def check(out, dy, x, gamma, function, add=None):
    expected = ref.differentiate(dy, x, gamma, function, add)
    bounds = ref.gradient_tolerances(dy, x, gamma, function, add)
    for name, got, exact, bound in zip(out._fields, out, expected, bounds, strict=True):
        assert got is None or ref.near(got, exact, bound), name


@pytest.mark.parametrize(
    ("function", "dtype", "weight", "shape"),
    sampled(
        FUNCTIONS, DTYPES, DTYPES, [(37, 24), (5, 1), (1, 7), (3, 131), (2, LONG)], quick=every_pair
    ),
    ids=str,
)
def test_against_autograd(function, dtype, weight, shape):
    dy, x, gamma, add = make(*shape, dtype, weight)
    for branch in (None, add):
        out = run(dy, x, gamma, function, add=branch)
        assert (out.dbeta is None) == (function.normalization == "RMSNorm")
        check(out, dy, x, gamma, function, branch)


def test_against_torch_modules():
    dy, x, gamma, _ = make(64, 200, torch.float32)
    x.requires_grad_()
    beta = torch.zeros(200, requires_grad=True)
    gamma.requires_grad_()
    y = torch.nn.functional.layer_norm(x, (200,), gamma, beta)
    expected = torch.autograd.grad(y, [x, gamma, beta], dy)
    out = run(dy, x.detach(), gamma.detach(), FUNCTIONS[0])
    for got, exact in zip(out, expected, strict=True):
        assert torch.allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_forward_and_backward_fit_together():
    function = FUNCTIONS[2]
    dy, x, gamma, residual = make(33, 40, torch.bfloat16, torch.float32)
    forward = dispatch.norm_outputs(x, function, residual=True, stats=True)
    dispatch.norm(x, gamma, function, forward, residual=residual)
    out = dispatch.norm_gradients(x, gamma, function)
    stats = (forward.mean, forward.rstd)
    dispatch.norm_backward(dy, forward.sum, gamma, *stats, function, out, add=dy)
    check(out, dy, forward.sum, gamma, function, dy)


@pytest.mark.parametrize("cols", [64, 512, LONG])
def test_a_mean_far_from_zero_costs_no_digits(cols):
    """The reference uses the saved statistics, since the rounding of a mean of 1e4 belongs to the forward."""
    function = FUNCTIONS[0]
    dy, x, gamma, add = make(24, cols, torch.float32)
    x = (x - x.mean()) / x.std() + 1e4
    stats = statistics(x, gamma, function)
    out = run(dy, x, gamma, function, add=add)
    exact = ref.differentiate_saved(dy, x, gamma, stats, add)
    for name, got, expected in zip(out._fields, out, exact, strict=True):
        assert (got.double() - expected).norm() <= 1e-6 * expected.norm(), name
    rounding = 2.0**-24 * 1e4
    for got, expected in zip(out, ref.differentiate(dy, x, gamma, function, add), strict=True):
        assert (got.double() - expected).norm() <= rounding * expected.norm()


@pytest.mark.parametrize("cols", [24, LONG])
@pytest.mark.parametrize("wanted", range(1, 8))
def test_what_is_not_asked_for_changes_nothing(cols, wanted):
    function = FUNCTIONS[0]
    dy, x, gamma, _ = make(19, cols, torch.bfloat16)
    whole = run(dy, x, gamma, function)
    fresh = dispatch.norm_gradients(x, gamma, function)
    some = NormGradients(*(t if wanted >> i & 1 else None for i, t in enumerate(fresh)))
    for got, expected in zip(run(dy, x, gamma, function, some), whole, strict=True):
        assert got is None or torch.equal(got, expected)


@pytest.mark.parametrize("cols", quickly([64, LONG], 64, slow=[LONG]))
def test_threads_do_not_change_the_sums(cols):
    function = FUNCTIONS[0]
    dy, x, gamma, _ = make(700, cols // 4, torch.float32)
    first = run(dy, x, gamma, function)
    for _ in range(3):
        again = run(dy, x, gamma, function)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS[:2], ids=str)
def test_no_rows_have_no_gradient(function):
    x = torch.empty(0, 9, dtype=torch.float16)
    gamma = torch.ones(9)
    out = dispatch.norm_gradients(x, gamma, function)
    for tensor in out[1:]:
        if tensor is not None:
            tensor.fill_(torch.nan)
    run(x, x, gamma, function, out)
    assert all(t is None or (t == 0).all() for t in out)


@pytest.mark.parametrize("function", FUNCTIONS[:2], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_goes_where_it_belongs(function, bad):
    dy, x, gamma, _ = make(6, 16, torch.float32)
    dy[2, 3], x[4, 5] = bad, bad
    mean, rstd = statistics(x, gamma, function)
    out = dispatch.norm_gradients(x, gamma, function)
    dispatch.norm_backward(dy, x, gamma, mean, rstd, function, out)
    assert not out.dx[[2, 4], [3, 5]].isfinite().any()
    assert out.dx[[0, 1, 3, 5]].isfinite().all()
    assert not out.dgamma[3].isfinite()
    if out.dbeta is not None:
        assert not out.dbeta[3].isfinite()
        assert out.dbeta[torch.arange(16) != 3].isfinite().all()


def test_constant_and_tiny_rows():
    function = FUNCTIONS[0]
    dy, x, gamma, _ = make(4, 16, torch.float32)
    x[0], x[1], x[2] = 0, -0.0, 3.0
    x[3] = torch.finfo(torch.float32).tiny / 8
    check(run(dy, x, gamma, function), dy, x, gamma, function)


def test_launches():
    function = FUNCTIONS[0]
    for cols, names in [
        (16, ["norm_backward_bf16"]),
        (20, ["norm_backward_elements_bf16"]),
        (LONG, ["norm_backward_sums_bf16", "norm_backward_tiles_bf16"]),
    ]:
        dy, x, gamma, add = make(5, cols, torch.bfloat16)
        with dispatch.record() as launches:
            run(dy, x, gamma, function, add=add)
        assert [launch.name for launch in launches] == names


def test_launches_of_misaligned_tensors():
    function = FUNCTIONS[0]
    dy, x, gamma, _ = make(5, 16, torch.bfloat16)
    odd = torch.cat((x.new_zeros(1), dy.flatten()))[1:].view_as(dy)
    with dispatch.record() as launches:
        run(odd, x, gamma, function)
    assert [launch.name for launch in launches] == ["norm_backward_elements_bf16"]


def test_bad_input():
    function = FUNCTIONS[0]
    dy, x, gamma, add = make(8, 8, torch.float32)
    mean, rstd = statistics(x, gamma, function)
    out = dispatch.norm_gradients(x, gamma, function)
    backward = dispatch.norm_backward
    with pytest.raises(ShapeError, match="gamma"):
        backward(dy, x, gamma[:7], mean, rstd, function, out)
    with pytest.raises(ShapeError, match="dy"):
        backward(dy[:7], x, gamma, mean, rstd, function, out)
    with pytest.raises(DtypeError, match="dy"):
        backward(dy.half(), x, gamma, mean, rstd, function, out)
    with pytest.raises(DtypeError, match="rstd"):
        backward(dy, x, gamma, mean, rstd.half(), function, out)
    with pytest.raises(ShapeError, match="mean"):
        backward(dy, x, gamma, None, rstd, function, out)
    with pytest.raises(ShapeError, match="RMSNorm has none"):
        backward(dy, x, gamma, mean, rstd, FUNCTIONS[1], out)
    with pytest.raises(ShapeError, match="no beta"):
        backward(dy, x, gamma, None, rstd, FUNCTIONS[1], out)
    with pytest.raises(ShapeError, match="contiguous"):
        backward(dy, x.t(), gamma, mean, rstd, function, out)
    with pytest.raises(ShapeError, match="no output"):
        backward(dy, x, gamma, mean, rstd, function, NormGradients())
    with pytest.raises(ShapeError, match="to add"):
        backward(dy, x, gamma, mean, rstd, function, out._replace(dx=None), add=add)
    with pytest.raises(DtypeError, match="gradient of gamma"):
        backward(dy, x, gamma, mean, rstd, function, out._replace(dgamma=gamma.half()))
    nothing = x[:, :0].contiguous()
    with pytest.raises(ShapeError, match="columns"):
        backward(nothing, nothing, gamma[:0], mean, rstd, function, NormGradients(nothing))
