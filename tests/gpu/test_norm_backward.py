"""Gradients of the norms on the GPU: against FP64 autograd, in poisoned buffers between canaries."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from guarded import Guarded  # noqa: E402

import norm_reference as ref  # noqa: E402
from te_fast import dispatch  # noqa: E402
from te_fast.dispatch import NormFunction, NormGradients  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = [
    NormFunction("LayerNorm", 1e-5),
    NormFunction("RMSNorm", 1e-6, zero_centered_gamma=True),
]
# Teams from 4 to 512 threads, with and without 16-byte accesses; fewer rows than blocks and more than any ring
# holds; rows of one block that fill its registers, and rows beyond.
SHAPES = [
    *[(1, 1), (7, 3), (3000, 8), (300, 64), (129, 65), (4001, 96), (40, 256), (517, 1000)],
    *[(2100, 1024), (133, 2050), (400, 4096), (1, 8192), (275, 8192), (31, 8191), (70, 12288)],
    *[(140, 16384), (5, 16383), (33, 20000), (17, 20001), (300, 65536), (3, 65535)],
    *[(200, 12296), (90, 32768), (31, 70000), (4, 70001)],
]


def make(rows, cols, dtype, weight, seed, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    x, dy, add = (torch.randn(rows, cols, generator=generator, device=device) for _ in range(3))
    gamma = torch.randn(cols, generator=generator, device=device).to(weight)
    return dy.to(dtype), (1.5 * x + 0.25).to(dtype), gamma, add.to(dtype)


def statistics(x, gamma, function):
    _, mean, rstd = ref.normalise(x, gamma, function)
    return mean.float() if function.normalization == "LayerNorm" else None, rstd.float()


def guarded_gradients(x, gamma, function, offset):
    """Poisoned gradients between canaries, that of x `offset` elements off alignment."""
    fields = [Guarded(x.shape, x.dtype, offset * x.element_size())]
    with_beta = function.normalization == "LayerNorm"
    fields += [Guarded(gamma.shape, gamma.dtype) for _ in range(2 if with_beta else 1)]
    return fields, NormGradients(*(field.tensor for field in fields))


def shifted(tensor, offset):
    """The same numbers `offset` elements off alignment."""
    if not offset:
        return tensor
    whole = tensor.new_empty(tensor.numel() + offset)
    view = whole[offset:].view_as(tensor)
    return view.copy_(tensor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_against_fp64(function, dtype, shape):
    index = SHAPES.index(shape)
    weight, offset = DTYPES[index % 3], 1 if index % 4 == 3 else 0
    dy, x, gamma, add = make(*shape, dtype, weight, index)
    stats = statistics(x, gamma, function)
    for branch in (None, add):
        fields, out = guarded_gradients(x, gamma, function, offset)
        inputs = shifted(dy, offset), shifted(x, offset), gamma, *stats, function
        dispatch.norm_backward(*inputs, out, add=branch)
        first = [tensor.clone() for tensor in out if tensor is not None]
        dispatch.norm_backward(*inputs, out, add=branch)
        torch.cuda.synchronize()
        for field in fields:
            field.check()
        exact = ref.differentiate(dy, x, gamma, function, branch)
        bounds = ref.gradient_tolerances(dy, x, gamma, function, branch)
        for name, got, expected, bound in zip(out._fields, out, exact, bounds, strict=True):
            assert got is None or ref.near(got, expected, bound), name
        for before, after in zip(first, (t for t in out if t is not None), strict=True):
            assert torch.equal(before, after), "two runs differ"


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("shape", [(130, 96), (50, 2048), (9, 20000)], ids=str)
def test_against_host(function, shape):
    dy, x, gamma, add = make(*shape, torch.float32, torch.float32, 5)
    stats = statistics(x, gamma, function)
    out = dispatch.norm_gradients(x, gamma, function)
    dispatch.norm_backward(dy, x, gamma, *stats, function, out, add=add)
    here = [None if t is None else t.cpu() for t in (dy, x, gamma, *stats)]
    host = dispatch.norm_gradients(here[1], here[2], function)
    dispatch.norm_backward(*here, function, host, add=add.cpu())
    bounds = ref.gradient_tolerances(dy, x, gamma, function, add)
    for got, expected, bound in zip(out, host, bounds, strict=True):
        assert got is None or ref.near(got, expected.double(), bound)


@pytest.mark.parametrize("shape", [(300, 64), (517, 1000), (70, 12288), (33, 20000), (9, 70001)])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_mean_far_from_zero_costs_no_digits(shape, offset):
    """Every kernel of FP32, by 16 bytes and by elements; the FP64 gradients use the saved statistics."""
    function = FUNCTIONS[0]
    dy, x, gamma, add = make(*shape, torch.float32, torch.float32, 7)
    x = (x - x.mean()) / x.std() + 1e4
    stats = statistics(x, gamma, function)
    fields, out = guarded_gradients(x, gamma, function, offset)
    inputs = shifted(dy, offset), shifted(x, offset), gamma, *stats, function
    dispatch.norm_backward(*inputs, out, add=add)
    torch.cuda.synchronize()
    for field in fields:
        field.check()
    exact = ref.differentiate_saved(dy, x, gamma, stats, add)
    for name, got, expected in zip(out._fields, out, exact, strict=True):
        # One FMA of x, rstd and -mean * rstd would be off by 3e-4 in dgamma.
        assert (got.double() - expected).norm() <= 3e-6 * expected.norm(), name


@pytest.mark.parametrize("cols", [520, 20000])
@pytest.mark.parametrize("wanted", range(1, 8))
def test_what_is_not_asked_for_changes_nothing(cols, wanted):
    function = FUNCTIONS[0]
    dy, x, gamma, _ = make(700, cols, torch.bfloat16, torch.float32, 1)
    stats = statistics(x, gamma, function)
    whole = dispatch.norm_gradients(x, gamma, function)
    dispatch.norm_backward(dy, x, gamma, *stats, function, whole)
    fresh = dispatch.norm_gradients(x, gamma, function)
    some = NormGradients(*(t if wanted >> i & 1 else None for i, t in enumerate(fresh)))
    dispatch.norm_backward(dy, x, gamma, *stats, function, some)
    for got, expected in zip(some, whole, strict=True):
        assert got is None or torch.equal(got, expected)


@pytest.mark.parametrize("cols", [24, 20000])
def test_no_rows_have_no_gradient(cols):
    function = FUNCTIONS[0]
    dy, x, gamma, _ = make(0, cols, torch.float16, torch.float32, 0)
    fields, out = guarded_gradients(x, gamma, function, 0)
    dispatch.norm_backward(dy, x, gamma, *statistics(x, gamma, function), function, out)
    assert (out.dgamma == 0).all()
    assert (out.dbeta == 0).all()
    for field in fields:
        field.check()


@pytest.mark.parametrize("cols", [64, 2048, 20000])
def test_what_is_not_finite_stays_in_its_row_and_column(cols):
    function = FUNCTIONS[0]
    dy, x, gamma, _ = make(300, cols, torch.float32, torch.float32, 2)
    dy[2, 3], x[4, 5], dy[299, 7] = torch.nan, torch.inf, -torch.inf
    out = dispatch.norm_gradients(x, gamma, function)
    dispatch.norm_backward(dy, x, gamma, *statistics(x, gamma, function), function, out)
    bad = torch.tensor([2, 4, 299], device="cuda")
    good = torch.ones(300, dtype=torch.bool, device="cuda")
    good[bad] = False
    assert not out.dx[bad, torch.tensor([3, 5, 7])].isfinite().any()
    assert out.dx[good].isfinite().all()
    assert out.dbeta.isfinite().sum() == cols - 2


def test_more_than_two_to_the_31_elements():
    function = FUNCTIONS[1]
    rows, cols = 300_000, 8192
    dy, x = (torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for tensor in (dy, x):
        for part in tensor.split(50_000):
            part.normal_()
    gamma = torch.randn(cols, device="cuda")
    rstd = torch.cat([part.float().square().mean(1).add(1e-6).rsqrt() for part in x.split(50_000)])
    out = dispatch.norm_gradients(x, gamma, function)
    dispatch.norm_backward(dy, x, gamma, None, rstd, function, out)
    last = slice(rows - 64, rows)
    small = dispatch.norm_gradients(x[last], gamma, function)
    dispatch.norm_backward(dy[last], x[last], gamma, None, rstd[last], function, small)
    assert torch.equal(out.dx[last], small.dx)
    exact = torch.zeros(cols, dtype=torch.float64, device="cuda")
    size = torch.zeros_like(exact)
    for dy_part, x_part, rstd_part in zip(*(t.split(50_000) for t in (dy, x, rstd)), strict=True):
        terms = dy_part.double() * x_part.double() * rstd_part.double()[:, None]
        exact += terms.sum(0)
        size += terms.abs().sum(0)
    assert ref.near(out.dgamma, exact, 16 * 2.0**-24 * size)


def test_under_capture():
    function = FUNCTIONS[0]
    for cols in (1024, 20000):
        dy, x, gamma, add = make(400, cols, torch.bfloat16, torch.float32, 3)
        stats = statistics(x, gamma, function)
        out = dispatch.norm_gradients(x, gamma, function)
        dispatch.norm_backward(dy, x, gamma, *stats, function, out, add=add)
        expected = [tensor.clone() for tensor in out]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dispatch.norm_backward(dy, x, gamma, *stats, function, out, add=add)
        for _ in range(3):
            for tensor in out:
                tensor.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_two_streams_at_once():
    """Blocks wait only for blocks of their own launch, and neither launch has the whole GPU."""
    function = FUNCTIONS[0]
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [make(4096, 8192, torch.bfloat16, torch.float32, seed) for seed in range(2)]
    stats = [statistics(x, gamma, function) for _, x, gamma, _ in cases]
    outs = [dispatch.norm_gradients(x, gamma, function) for _, x, gamma, _ in cases]
    expected = []
    for (dy, x, gamma, _), stat, out in zip(cases, stats, outs, strict=True):
        dispatch.norm_backward(dy, x, gamma, *stat, function, out)
        expected.append([tensor.clone() for tensor in out])
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (dy, x, gamma, _), stat, out in zip(streams, cases, stats, outs, strict=True):
            with torch.cuda.stream(stream):
                dispatch.norm_backward(dy, x, gamma, *stat, function, out)
    torch.cuda.synchronize()
    for out, exact in zip(outs, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(out, exact, strict=True))
