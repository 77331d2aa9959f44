"""Activation kernels of the host backend against FP64 torch, values and gradients."""

from __future__ import annotations

import pytest
import torch

import activation_reference as ref
from selection import every_pair, sampled
from te_fast import dispatch
from te_fast.dispatch import ActivationFunction, ActivationOutputs
from te_fast.errors import DtypeError, ShapeError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = [ActivationFunction(name) for name in ref.UNARY + ref.GATED]
FUNCTIONS += [
    ActivationFunction("swiglu", 8),
    ActivationFunction("clamped_swiglu", 3, 1.5, 1.3, -0.25),
    ActivationFunction("situ_glu", beta1=0.7, beta2=2.0),
]


def make(function, rows, cols, dtype, seed=0, *, edges=False):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, function.halves * cols)
    x = 2 * torch.randn(shape, generator=generator)
    if edges:
        x = ref.edge_values(dtype, x.numel(), seed).view(shape)
        if function.halves == 2:
            # Every special value of one half meets both ordinary and special values of the other half.
            x = x[:, torch.randperm(shape[1], generator=generator)].contiguous()
    dy = torch.randn(rows, cols, generator=generator)
    return x.to(dtype), dy.to(dtype)


@pytest.mark.parametrize(
    ("function", "dtype", "edges"),
    sampled(FUNCTIONS, DTYPES, [False, True], quick=every_pair),
    ids=str,
)
def test_forward_against_fp64(function, dtype, edges):
    x, _ = make(function, 37, 24, dtype, edges=edges)
    out = dispatch.activation(x, function, dispatch.activation_outputs(x, function))
    expected = ref.activate(x.double(), function)
    ref.assert_near(out.high_precision, expected, share=ref.TAIL if edges else ref.ARITHMETIC)


@pytest.mark.parametrize(
    ("function", "dtype", "edges"),
    sampled(FUNCTIONS, DTYPES, [False, True], quick=every_pair),
    ids=str,
)
def test_backward_against_autograd(function, dtype, edges):
    x, dy = make(function, 37, 24, dtype, edges=edges)
    out = dispatch.activation_outputs(x, function, gradient=True)
    out = out._replace(column_sums=x.new_empty(x.shape[1]))
    dispatch.activation_backward(dy, x, function, out)
    expected, _ = ref.differentiate(dy, x, function)
    if edges:
        # Only finite inputs are compared. FP32 cannot tell inf * 0 from the limit, and FP64 cannot hold a square beyond
        # 1e308. For a finite input both results are NaN, or neither is.
        finite = x.isfinite()
        if function.halves == 2:
            g, linear = ref.split(x, function.interleave)
            both = (g.isfinite() & linear.isfinite()).double()
            pair = torch.cat([both, both], 1)
            finite = ref_interleave(pair, function) > 0
        got = torch.where(finite, out.high_precision, 0)
        expected = torch.where(finite, expected, 0.0)
        ref.assert_near(got, expected, slope_magnitude(dy, x, function, finite), ref.TAIL)
        return
    ref.assert_near(out.high_precision, expected, slope_magnitude(dy, x, function))
    ref.assert_near(out.column_sums, expected.sum(0), expected.abs().sum(0))


def ref_interleave(pair, function):
    """The inverse of `ref.split` on concatenated halves."""
    if not function.interleave:
        return pair
    g, linear = (half.unflatten(-1, (-1, function.interleave)) for half in pair.chunk(2, -1))
    return torch.stack([g, linear], -2).flatten(-3)


def slope_magnitude(dy, x, function, finite=None):
    """A bound on each of the gradient's two terms, which cancel near the slope's zero."""
    x = x.double() if finite is None else torch.where(finite, x.double(), 0.0)
    up = dy.double().abs()
    if function.halves == 1:
        return up * (1 + x.abs()) if function.name == "srelu" else 2 * up.expand_as(x)
    g, linear = ref.split(x, function.interleave)
    size = 2 * (1 + function.offset) if function.name == "clamped_swiglu" else 2
    both = torch.cat([size * up * linear.abs() + up * abs(function.offset), up * (1 + g.abs())], 1)
    return ref_interleave(both, function)


@pytest.mark.parametrize(
    ("function", "fmt", "layouts", "gradient"),
    sampled(
        FUNCTIONS,
        ["e4m3", "e5m2"],
        [(True, False), (False, True), (True, True)],
        [False, True],
        quick=every_pair,
    ),
    ids=str,
)
def test_fp8(function, fmt, layouts, gradient):
    rows, cols = 35, 24
    x, dy = make(function, rows, cols, torch.bfloat16, 3)
    scale, amax = torch.tensor([9.5]), torch.tensor([0.125])
    out = dispatch.activation_outputs(
        x,
        function,
        gradient=gradient,
        high_precision=False,
        fp8_dtype=ref.FP8[fmt],
        rowwise=layouts[0],
        columnwise=layouts[1],
    )
    if gradient:
        dispatch.activation_backward(dy, x, function, out, scale=scale, amax=amax)
        expected, magnitude = (
            ref.differentiate(dy, x, function)[0],
            slope_magnitude(dy, x, function),
        )
    else:
        dispatch.activation(x, function, out, scale=scale, amax=amax)
        expected, magnitude = ref.activate(x.double(), function), None
    if layouts[0]:
        ref.assert_fp8_near(out.rowwise_data, expected, scale, fmt, magnitude)
    if layouts[1]:
        transposed = out.columnwise_data.view(torch.uint8)
        assert transposed.shape == (expected.shape[1], 48)
        assert not transposed[:, rows:].any()
        back = transposed[:, :rows].t().contiguous().view(ref.FP8[fmt])
        ref.assert_fp8_near(back, expected, scale, fmt, magnitude)
        if layouts[0]:
            assert torch.equal(back.view(torch.uint8), out.rowwise_data.view(torch.uint8))
    assert out.scale_inv.item() == torch.tensor(1 / 9.5).item()
    assert amax.item() == pytest.approx(max(0.125, expected.abs().max().item()), rel=2e-6)


def test_amax_is_of_the_unrounded_value():
    # silu(3.25) is neither a bfloat16 nor an FP8 number: the amax must be its FP32 value.
    x = torch.tensor([[3.25]], dtype=torch.bfloat16)
    amax = torch.zeros(1)
    function = ActivationFunction("silu")
    out = dispatch.activation_outputs(x, function, fp8_dtype=torch.float8_e4m3fn)
    dispatch.activation(x, function, out, scale=torch.ones(1), amax=amax)
    exact = torch.nn.functional.silu(x.double()).item()
    assert amax.item() == pytest.approx(exact, rel=1e-6)
    assert amax.item() != out.high_precision.item()


@pytest.mark.parametrize("name", ["swiglu", "srelu", "situ_glu", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_scale(name, dtype):
    function = ActivationFunction(name)
    x, dy = make(function, 21, 40, torch.bfloat16, 5)
    row_scale = torch.rand(21, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = dispatch.activation_outputs(x, function)
    dispatch.activation(x, function, out, row_scale=row_scale)
    exact = ref.activate(x.double(), function)
    ref.assert_near(out.high_precision, exact * row_scale.double()[:, None])
    grads = dispatch.activation_outputs(x, function, gradient=True)
    grads = grads._replace(row_scale_grad=torch.empty_like(row_scale))
    dispatch.activation_backward(dy, x, function, grads, row_scale=row_scale)
    expected, expected_factor = ref.differentiate(dy, x, function, row_scale)
    ref.assert_near(grads.high_precision, expected, slope_magnitude(dy, x, function))
    ref.assert_near(grads.row_scale_grad, expected_factor, (dy.double() * exact).abs().sum(1))


def test_noop_leaves_everything():
    function = ActivationFunction("swiglu")
    x, dy = make(function, 5, 16, torch.bfloat16)
    for gradient in (False, True):
        out = dispatch.activation_outputs(
            x, function, gradient=gradient, fp8_dtype=torch.float8_e4m3fn, columnwise=True
        )
        if gradient:
            out = out._replace(
                column_sums=x.new_empty(32), row_scale_grad=torch.empty(5, dtype=torch.float16)
            )
        written = [tensor for tensor in out if tensor is not None]
        for tensor in written:
            tensor.view(torch.uint8).fill_(0xA5)
        amax = torch.full((1,), 0.5)
        scalars = {"scale": torch.ones(1), "amax": amax, "row_scale": x.new_ones(5).half()}
        run = dispatch.activation_backward if gradient else dispatch.activation
        run(*([dy] if gradient else []), x, function, out, noop=torch.ones(1), **scalars)
        assert all((tensor.view(torch.uint8) == 0xA5).all() for tensor in written)
        assert amax.item() == 0.5
        run(*([dy] if gradient else []), x, function, out, noop=torch.zeros(1), **scalars)
        assert not any((tensor.view(torch.uint8) == 0xA5).all() for tensor in written)


@pytest.mark.parametrize("shape", [(0, 16), (5, 0), (0, 0)])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_empty(shape, name):
    function = ActivationFunction(name)
    x, dy = make(function, *shape, torch.float32)
    scale = torch.full((1,), 4.0)
    out = dispatch.activation_outputs(x, function, fp8_dtype=torch.float8_e4m3fn, columnwise=True)
    dispatch.activation(x, function, out, scale=scale)
    assert out.scale_inv.item() == 0.25
    out = dispatch.activation_outputs(x, function, gradient=True)
    out = out._replace(column_sums=torch.full((x.shape[1],), 7.0))
    dispatch.activation_backward(dy, x, function, out)
    assert not out.column_sums.any()


def test_outputs_have_memory_of_their_own():
    function = ActivationFunction("gelu")
    both, dy = torch.randn(24, 32), torch.randn(16, 32)
    x = both[:16]
    for out in (x, both[8:], dy.view(torch.int32).view(torch.float32)):
        with pytest.raises(ShapeError, match="activation_backward: an output must be in memory of"):
            dispatch.activation_backward(dy, x, function, ActivationOutputs(out))
    fp8 = dispatch.activation_outputs(x, function, fp8_dtype=torch.float8_e4m3fn)
    for outputs in (ActivationOutputs(x), fp8._replace(columnwise_data=fp8.rowwise_data)):
        with pytest.raises(ShapeError, match="activation: an output must be in memory of its own"):
            dispatch.activation(x, function, outputs, scale=torch.ones(1))
    wanted = torch.nn.functional.gelu(x, approximate="tanh")
    dispatch.activation(x, function, ActivationOutputs(dy))
    assert torch.allclose(dy, wanted, atol=1e-6)


def test_wrong_arguments():
    function = ActivationFunction("swiglu")
    x, dy = make(function, 4, 16, torch.bfloat16)
    out = dispatch.activation_outputs(x, function)
    with pytest.raises(ShapeError, match="no activation"):
        dispatch.activation(x, ActivationFunction("swish"), out)
    with pytest.raises(ShapeError, match="interleave"):
        dispatch.activation(x, ActivationFunction("swiglu", 5), out)
    with pytest.raises(ShapeError, match="even number of columns"):
        dispatch.activation(x[:, :31].contiguous(), function, out)
    with pytest.raises(ShapeError, match="contiguous"):
        dispatch.activation(x[:, ::2], function, out)
    with pytest.raises(ShapeError, match="64 elements"):
        dispatch.activation(x, function, ActivationOutputs(x.new_empty(4, 15)))
    with pytest.raises(DtypeError):
        dispatch.activation(x, function, ActivationOutputs(torch.empty(4, 16)))
    with pytest.raises(ShapeError, match="beta1 and beta2"):
        dispatch.activation(x, ActivationFunction("situ_glu", beta1=-1.0), out)
    with pytest.raises(ShapeError, match="no output"):
        dispatch.activation(x, function, ActivationOutputs())
    quantized = dispatch.activation_outputs(x, function, fp8_dtype=torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match="an FP8 output needs a scale"):
        dispatch.activation(x, function, quantized)
    with pytest.raises(ShapeError, match="outputs of the gradient"):
        dispatch.activation(x, function, out._replace(column_sums=x.new_empty(32)))
    with pytest.raises(ShapeError, match="row scale"):
        dispatch.activation_backward(
            dy, x, function, ActivationOutputs(row_scale_grad=x.new_empty(4))
        )
    with pytest.raises(DtypeError):
        dispatch.activation_backward(
            dy.float(), x, function, ActivationOutputs(torch.empty_like(x))
        )
