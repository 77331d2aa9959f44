"""Activation kernels on the GPU: against FP64 torch and the host kernels, in buffers between canaries."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from guarded import POISON, Guarded  # noqa: E402

import activation_reference as ref  # noqa: E402
from te_fast import dispatch  # noqa: E402
from te_fast.dispatch import ActivationFunction, ActivationOutputs  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = [ActivationFunction(name) for name in ref.UNARY + ref.GATED]
FUNCTIONS += [
    ActivationFunction("swiglu", 32),
    ActivationFunction("geglu", 4),
    ActivationFunction("clamped_swiglu", 0, 1.5, 1.3, -0.25),
    ActivationFunction("situ_glu", beta1=0.7, beta2=2.0),
]
# Odd sizes, aligned sizes, a tile, tiles and a bit; more tiles than blocks run at once.
SHAPES = [(1, 4), (7, 12), (128, 128), (130, 136), (257, 260), (1000, 384), (3, 4000)]


def guarded_outputs(outputs, offset=0):
    """The same outputs, poisoned, between canaries; all but the transposed one are `offset` bytes off alignment."""
    fields = {}
    for name, tensor in outputs._asdict().items():
        if tensor is not None:
            shift = (
                0
                if name == "columnwise_data"
                else offset // tensor.element_size() * tensor.element_size()
            )
            fields[name] = Guarded(tensor.shape, tensor.dtype, shift)
    return fields, ActivationOutputs(**{name: guarded.tensor for name, guarded in fields.items()})


def make(function, rows, cols, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(rows, function.halves * cols, generator=generator)).to(dtype)
    return x, torch.randn(rows, cols, generator=generator).to(dtype)


def magnitude_of(dy, x, function, row_scale):
    """Size of the gradient's terms, which cancel near the slope's zero."""
    up = dy.double().abs() * (1 if row_scale is None else row_scale.double().abs()[:, None])
    x = x.double().abs()
    if function.halves == 1:
        return 2 * up * (1 + x)
    g, linear = ref.split(x, function.interleave)
    halves = [2 * up * (1 + g) * (abs(function.offset) + linear), up * (1 + g)]
    if not function.interleave:
        return torch.cat(halves, 1)
    blocks = [half.unflatten(1, (-1, function.interleave)) for half in halves]
    return torch.stack(blocks, 2).flatten(1)


def run_both(direction, x, dy, function, outputs, options, offset):
    """Run on both backends; outputs of the GPU and of the host, amax of both."""
    results = []
    for device in ("cuda", "cpu"):
        here = {name: value.to(device) for name, value in options.items()}
        here["amax"] = torch.full((1,), 1e-3, device=device)
        if device == "cuda":
            fields, out = guarded_outputs(outputs, offset)
        else:
            out = ActivationOutputs(*(None if t is None else torch.empty_like(t) for t in outputs))
        xd, dyd = x.to(device), dy.to(device)
        if direction == "forward":
            dispatch.activation(xd, function, out, **here)
        else:
            dispatch.activation_backward(dyd, xd, function, out, **here)
            if device == "cuda":
                first = [None if t is None else t.clone() for t in out]
                dispatch.activation_backward(dyd, xd, function, out, **here)
                for before, after in zip(first, out, strict=True):
                    if before is not None:
                        same = torch.equal(before.view(torch.uint8), after.view(torch.uint8))
                        assert same, "two runs differ"
        if device == "cuda":
            torch.cuda.synchronize()
            for guarded in fields.values():
                guarded.check()
        results.append((out, here["amax"].item()))
    return results


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64_and_host(direction, function, dtype):
    for index, (rows, cols) in enumerate(SHAPES):
        if function.interleave and cols % function.interleave:
            cols += function.interleave - cols % function.interleave
        x, dy = make(function, rows, cols, dtype, index)
        fmt = ["e4m3", "e5m2"][index % 2]
        scale = torch.tensor([[3.0, 0.37, 100.0][index % 3]])
        options = {"scale": scale}
        row_scale = None
        if index % 2:
            kind = DTYPES[index % 3]
            row_scale = torch.rand(rows, generator=torch.Generator().manual_seed(2)).to(kind)
            options["row_scale"] = row_scale
        outputs = dispatch.activation_outputs(
            x, function, gradient=direction == "backward", fp8_dtype=ref.FP8[fmt], columnwise=True
        )
        if direction == "backward":
            outputs = outputs._replace(column_sums=x.new_empty(x.shape[1]))
            if row_scale is not None:
                outputs = outputs._replace(row_scale_grad=torch.empty_like(row_scale))
        offset = [0, 0, 4, 0][index % 4]
        (out, amax), (host, host_amax) = run_both(
            direction, x, dy, function, outputs, options, offset
        )
        out = ActivationOutputs(*(None if t is None else t.cpu() for t in out))
        if direction == "forward":
            factor = 1 if row_scale is None else row_scale.double()[:, None]
            expected, magnitude = ref.activate(x.double(), function) * factor, None
        else:
            expected, factor_grad = ref.differentiate(dy, x, function, row_scale)
            magnitude = magnitude_of(dy, x, function, row_scale)
            ref.assert_near(out.column_sums, expected.sum(0), magnitude.sum(0))
            if row_scale is not None:
                exact = ref.activate(x.double(), function)
                ref.assert_near(out.row_scale_grad, factor_grad, (dy.double() * exact).abs().sum(1))
        ref.assert_near(out.high_precision, expected, magnitude)
        ref.assert_fp8_near(out.rowwise_data, expected, scale, fmt, magnitude)
        transposed = out.columnwise_data.view(torch.uint8)
        assert torch.equal(transposed[:, :rows].t(), out.rowwise_data.view(torch.uint8))
        assert not transposed[:, rows:].any()
        assert out.scale_inv.item() == host.scale_inv.item()
        assert amax == pytest.approx(host_amax, rel=2e-6)
        assert amax == pytest.approx(max(1e-3, expected.abs().max().item()), rel=2e-6)
        # The backends differ in the last bits of 2^x and 1/x, so that a few results round differently.
        other = (out.rowwise_data.view(torch.uint8) != host.rowwise_data.view(torch.uint8)).sum()
        assert other <= 2 + expected.numel() // 1000


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_values(function, dtype):
    x = ref.edge_values(dtype, 64 * 64 * function.halves).view(64, -1)
    if function.halves == 2:
        x = x[
            :, torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(3))
        ].contiguous()
    out = dispatch.activation_outputs(x.cuda(), function)
    dispatch.activation(x.cuda(), function, out)
    ref.assert_near(out.high_precision.cpu(), ref.activate(x.double(), function), share=ref.TAIL)
    dy = torch.ones(64, 64, dtype=dtype)
    results = []
    for device in ("cuda", "cpu"):
        grads = dispatch.activation_outputs(x.to(device), function, gradient=True)
        dispatch.activation_backward(dy.to(device), x.to(device), function, grads)
        results.append(grads.high_precision.cpu().double())
    assert torch.equal(results[0].isnan(), results[1].isnan())
    assert torch.equal(results[0].isinf(), results[1].isinf())
    finite = results[1].isfinite()
    torch.testing.assert_close(
        results[0][finite], results[1][finite], rtol=2e-5 + 2 * ref.ROUNDING[dtype], atol=2e-6
    )


@pytest.mark.parametrize("layouts", [(True, False), (False, True)])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
@pytest.mark.parametrize("high_precision", [False, True])
def test_parts_give_the_bits_of_the_whole(layouts, name, high_precision):
    function = ActivationFunction(name)
    x, dy = (t.cuda() for t in make(function, 300, 264, torch.bfloat16))
    scale = torch.full((1,), 5.0, device="cuda")
    for gradient in (False, True):
        results = []
        for rowwise, columnwise, high in [(True, True, True), (*layouts, high_precision)]:
            out = dispatch.activation_outputs(
                x,
                function,
                gradient=gradient,
                high_precision=high,
                fp8_dtype=torch.float8_e4m3fn,
                rowwise=rowwise,
                columnwise=columnwise,
            )
            if gradient:
                if rowwise:
                    out = out._replace(column_sums=x.new_empty(x.shape[1]))
                dispatch.activation_backward(dy, x, function, out, scale=scale)
            else:
                dispatch.activation(x, function, out, scale=scale)
            results.append(out)
        for whole, part in zip(*results, strict=True):
            if part is not None:
                assert torch.equal(whole.view(torch.uint8), part.view(torch.uint8))


def test_noop_and_empty():
    function = ActivationFunction("swiglu")
    x, dy = (t.cuda() for t in make(function, 200, 96, torch.bfloat16))
    one = torch.ones(1, device="cuda")
    outputs = dispatch.activation_outputs(
        x, function, gradient=True, fp8_dtype=torch.float8_e5m2, columnwise=True
    )._replace(column_sums=x.new_empty(192), row_scale_grad=x.new_empty(200))
    fields, out = guarded_outputs(outputs)
    amax = torch.zeros(1, device="cuda")
    row_scale = x.new_ones(200)
    dispatch.activation_backward(
        dy, x, function, out, scale=one, amax=amax, noop=one, row_scale=row_scale
    )
    for guarded in fields.values():
        assert (guarded.whole == POISON).all()
    assert amax.item() == 0
    for rows, cols in [(0, 32), (5, 0)]:
        x = torch.empty(rows, 2 * cols, device="cuda")
        sums = torch.full((2 * cols,), 3.0, device="cuda")
        factors = torch.full((rows,), 3.0, device="cuda")
        out = ActivationOutputs(column_sums=sums, row_scale_grad=factors)
        dy = torch.empty(rows, cols, device="cuda")
        dispatch.activation_backward(
            dy, x, function, out, row_scale=torch.ones(rows, device="cuda")
        )
        assert not sums.any()
        assert not factors.any()


def test_wide_and_tall():
    """Sums over many tiles in both directions, and a tensor of more than 2^31 elements."""
    function = ActivationFunction("silu")
    for rows, cols in [(20000, 24), (24, 40000)]:
        x, dy = make(function, rows, cols, torch.bfloat16)
        row_scale = torch.rand(rows, generator=torch.Generator().manual_seed(2))
        out = ActivationOutputs(
            column_sums=x.new_empty(cols).cuda(), row_scale_grad=torch.empty(rows, device="cuda")
        )
        dispatch.activation_backward(dy.cuda(), x.cuda(), function, out, row_scale=row_scale.cuda())
        expected, factor = ref.differentiate(dy, x, function, row_scale)
        ref.assert_near(out.column_sums.cpu(), expected.sum(0), expected.abs().sum(0))
        exact = ref.activate(x.double(), function)
        ref.assert_near(out.row_scale_grad.cpu(), factor, (dy.double() * exact).abs().sum(1))
    x = torch.zeros(1 << 16, 33000, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 3.0
    function = ActivationFunction("srelu")
    out = dispatch.activation_outputs(x, function)
    dispatch.activation(x, function, out)
    assert out.high_precision[-1, -1].item() == 9.0
    assert not out.high_precision[:-1].any()
