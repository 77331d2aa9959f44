"""Norm kernels of the host backend against FP64 torch."""

from __future__ import annotations

import pytest
import torch

import norm_reference as ref
from activation_reference import ARITHMETIC, FP8, assert_fp8_near
from selection import every_pair, sampled
from te_fast import dispatch
from te_fast.dispatch import NormFunction
from te_fast.errors import DtypeError, ShapeError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = [
    NormFunction("LayerNorm", 1e-5),
    NormFunction("RMSNorm", 1e-6),
    NormFunction("LayerNorm", 1e-3, zero_centered_gamma=True),
    NormFunction("RMSNorm", 1e-5, zero_centered_gamma=True),
]


def make(rows, cols, dtype, weight=None, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, cols, generator=generator) * 1.5 + offset).to(dtype)
    gamma = torch.randn(cols, generator=generator).to(weight or dtype)
    beta = torch.randn(cols, generator=generator).to(weight or dtype)
    return x, gamma, beta


@pytest.mark.parametrize(
    ("function", "dtype", "weight", "shape"),
    sampled(FUNCTIONS, DTYPES, DTYPES, [(37, 24), (5, 1), (3, 131), (1, 2000)], quick=every_pair),
    ids=str,
)
def test_against_fp64(function, dtype, weight, shape):
    x, gamma, beta = make(*shape, dtype, weight)
    for bias in (None, beta):
        out = dispatch.norm_outputs(x, function, stats=True)
        dispatch.norm(x, gamma, function, out, beta=bias)
        y, mean, rstd = ref.normalise(x, gamma, function, bias)
        assert ref.near(out.high_precision, y, ref.tolerance(x, gamma, function, bias))
        assert torch.allclose(out.rstd.double(), rstd, rtol=1e-6, atol=0)
        assert (out.mean is None) == (function.normalization == "RMSNorm")
        if out.mean is not None:
            assert torch.allclose(out.mean.double(), mean, rtol=1e-6, atol=1e-7)


def test_against_torch_modules():
    x, gamma, beta = make(64, 200, torch.float32)
    out = dispatch.norm(
        x, gamma, FUNCTIONS[0], dispatch.norm_outputs(x, FUNCTIONS[0]), beta=beta
    ).high_precision
    assert torch.allclose(out, torch.nn.functional.layer_norm(x, (200,), gamma, beta), atol=2e-6)
    out = dispatch.norm(
        x, gamma, FUNCTIONS[1], dispatch.norm_outputs(x, FUNCTIONS[1])
    ).high_precision
    assert torch.allclose(out, torch.nn.functional.rms_norm(x, (200,), gamma, 1e-6), atol=2e-6)


@pytest.mark.parametrize("function", FUNCTIONS[:2], ids=str)
def test_a_large_mean_does_not_cancel(function):
    # One pass over sums of squares would lose the variance altogether: 4096^2 against 1.
    x, gamma, beta = make(16, 512, torch.float32, offset=4096.0)
    out = dispatch.norm_outputs(x, function)
    dispatch.norm(x, gamma, function, out, beta=beta)
    y, _, _ = ref.normalise(x, gamma, function, beta)
    assert ref.near(out.high_precision, y, ref.tolerance(x, gamma, function, beta))


@pytest.mark.parametrize(
    ("function", "dtype", "fmt", "layouts", "shape"),
    sampled(
        FUNCTIONS,
        DTYPES,
        ["e4m3", "e5m2"],
        [(True, False), (False, True), (True, True)],
        [(35, 24), (16, 7), (1, 129)],
        quick=every_pair,
    ),
    ids=str,
)
def test_fp8(function, dtype, fmt, layouts, shape):
    x, gamma, beta = make(*shape, dtype, seed=3)
    scale, amax = torch.tensor([9.5]), torch.tensor([0.125])
    out = dispatch.norm_outputs(
        x, function, fp8_dtype=FP8[fmt], rowwise=layouts[0], columnwise=layouts[1]
    )
    dispatch.norm(x, gamma, function, out, beta=beta, scale=scale, amax=amax)
    expected, _, _ = ref.normalise(x, gamma, function, beta)
    bound = ref.tolerance(x, gamma, function, beta)
    assert ref.near(out.high_precision, expected, bound)
    magnitude = bound / ARITHMETIC
    if layouts[0]:
        assert_fp8_near(out.rowwise_data, expected, scale, fmt, magnitude)
    if layouts[1]:
        rows, cols = shape
        transposed = out.columnwise_data.view(torch.uint8)
        assert transposed.shape == (cols, -(-rows // 16) * 16)
        assert not transposed[:, rows:].any()
        back = transposed[:, :rows].t().contiguous().view(FP8[fmt])
        assert_fp8_near(back, expected, scale, fmt, magnitude)
        if layouts[0]:
            assert torch.equal(back.view(torch.uint8), out.rowwise_data.view(torch.uint8))
    assert out.scale_inv.item() == torch.tensor(1 / 9.5).item()
    assert amax.item() == pytest.approx(max(0.125, expected.abs().max().item()), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual(dtype):
    function = FUNCTIONS[0]
    x, gamma, beta = make(33, 40, dtype)
    residual = make(33, 40, dtype, seed=9)[0]
    out = dispatch.norm_outputs(x, function, residual=True, stats=True)
    dispatch.norm(x, gamma, function, out, beta=beta, residual=residual)
    assert torch.equal(out.sum, x + residual)
    y, mean, _ = ref.normalise(out.sum, gamma, function, beta)
    assert ref.near(out.high_precision, y, ref.tolerance(out.sum, gamma, function, beta))
    assert torch.allclose(out.mean.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("function", FUNCTIONS[:2], ids=str)
def test_peculiar_rows(function):
    cols = 16
    x = torch.randn(6, cols, generator=torch.Generator().manual_seed(1))
    x[0], x[1, 3], x[2, 5], x[3] = 0, torch.nan, torch.inf, -0.0
    x[4] = torch.finfo(torch.float32).tiny / 8
    gamma = torch.ones(cols)
    scale, amax = torch.ones(1), torch.zeros(1)
    out = dispatch.norm_outputs(x, function, fp8_dtype=torch.float8_e4m3fn, stats=True)
    dispatch.norm(x, gamma, function, out, scale=scale, amax=amax)
    y = out.high_precision
    assert (y[0] == 0).all()
    assert (y[3] == 0).all()
    assert y[1].isnan().all()
    assert out.rowwise_data.view(torch.uint8)[1].eq(0x7F).all()
    # Infinity minus the infinite mean is NaN, and so is infinity times a zero rstd.
    assert y[2, 5].isnan()
    expected, _, _ = ref.normalise(x[[4, 5]], gamma, function)
    assert ref.near(y[[4, 5]], expected, ref.tolerance(x[[4, 5]], gamma, function))
    # NaN never counts towards the amax.
    assert amax.item() == y[y.isfinite()].abs().max().item()


@pytest.mark.parametrize(
    ("function", "dtype", "bad", "cols"),
    sampled(
        FUNCTIONS, DTYPES[1:], [torch.inf, -torch.inf, torch.nan], [24, 131, 512], quick=every_pair
    ),
    ids=str,
)
def test_a_16_bit_row_with_an_infinity_is_nan(function, dtype, bad, cols):
    """The GPU gives NaN too: its sum of squares of such a row is infinity minus infinity times a mean of zero."""
    x, gamma, _ = make(5, cols, dtype)
    x[2, cols // 2] = bad
    out = dispatch.norm_outputs(x, function, stats=True)
    dispatch.norm(x, gamma, function, out)
    wrong = torch.arange(5) == 2
    assert torch.equal(out.high_precision.isnan(), wrong[:, None].expand(5, cols))
    assert torch.equal(out.rstd.isnan(), wrong)
    grads = dispatch.norm_gradients(x, gamma, function)
    dispatch.norm_backward(torch.ones_like(x), x, gamma, out.mean, out.rstd, function, grads)
    assert torch.equal(grads.dx.isnan(), wrong[:, None].expand(5, cols))
    assert grads.dgamma.isnan().all()


def test_zero_rows_write_the_scale_alone():
    function = FUNCTIONS[0]
    x = torch.empty(0, 8)
    out = dispatch.norm_outputs(
        x, function, fp8_dtype=torch.float8_e4m3fn, columnwise=True, stats=True
    )
    amax = torch.tensor([2.0])
    dispatch.norm(x, torch.ones(8), function, out, scale=torch.tensor([4.0]), amax=amax)
    assert (out.scale_inv.item(), amax.item()) == (0.25, 2.0)


def test_noop_leaves_everything():
    function = FUNCTIONS[0]
    x, gamma, beta = make(8, 8, torch.float32)
    out = dispatch.norm_outputs(x, function, fp8_dtype=torch.float8_e4m3fn, stats=True)
    for tensor in (out.high_precision, out.scale_inv, out.mean, out.rstd):
        tensor.fill_(7.0)
    amax = torch.tensor([3.0])
    noop = torch.ones(1)
    dispatch.norm(x, gamma, function, out, beta=beta, scale=torch.ones(1), amax=amax, noop=noop)
    for tensor in (out.high_precision, out.scale_inv, out.mean, out.rstd):
        assert (tensor == 7).all()
    assert amax.item() == 3


def test_one_launch():
    function = FUNCTIONS[0]
    for cols, name in ((64, "norm_short_transpose_bf16"), (264, "norm_transpose_bf16")):
        x, gamma, beta = make(64, cols, torch.bfloat16)
        out = dispatch.norm_outputs(
            x, function, fp8_dtype=torch.float8_e4m3fn, columnwise=True, residual=True, stats=True
        )
        with dispatch.record() as launches:
            dispatch.norm(x, gamma, function, out, beta=beta, residual=x, scale=torch.ones(1))
        assert [launch.name for launch in launches] == [name]


def test_bad_input():
    function = FUNCTIONS[0]
    x, gamma, beta = make(8, 8, torch.float32)
    out = dispatch.norm_outputs(x, function)
    with pytest.raises(ShapeError, match="gamma"):
        dispatch.norm(x, gamma[:7], function, out)
    with pytest.raises(DtypeError, match="beta"):
        dispatch.norm(x, gamma, function, out, beta=beta.double())
    with pytest.raises(DtypeError, match="gamma"):
        dispatch.norm(x, gamma.double(), function, out)
    with pytest.raises(ShapeError, match="contiguous"):
        dispatch.norm(x.t(), gamma, function, out)
    with pytest.raises(ShapeError, match="eps"):
        dispatch.norm(x, gamma, function._replace(eps=-1.0), out)
    with pytest.raises(ShapeError, match="normalization"):
        dispatch.norm(x, gamma, function._replace(normalization="BatchNorm"), out)
    with pytest.raises(ShapeError, match="no output"):
        dispatch.norm(x, gamma, function, out._replace(high_precision=None))
    with pytest.raises(ShapeError, match="residual"):
        dispatch.norm(x, gamma, function, out, residual=x)
    with pytest.raises(ShapeError, match="norm: an output must be in memory of its own"):
        dispatch.norm(x, gamma, function, out._replace(high_precision=x))
    with pytest.raises(ShapeError, match="columns"):
        dispatch.norm(x[:, :0].contiguous(), gamma[:0], function, out)
