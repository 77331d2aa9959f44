"""Norm kernels on the GPU: against FP64 torch and the host kernels, in poisoned buffers between canaries."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from guarded import guarded_like  # noqa: E402

import norm_reference as ref  # noqa: E402
from activation_reference import ARITHMETIC, FP8, assert_fp8_near  # noqa: E402
from te_fast import dispatch  # noqa: E402
from te_fast.dispatch import NormFunction  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FUNCTIONS = [NormFunction("LayerNorm"), NormFunction("RMSNorm", 1e-6, zero_centered_gamma=True)]
# Every size of team, odd and aligned; strips of 32 and 64 rows, whole and not; rows that fit neither registers nor
# shared memory; more strips than blocks; several rows a warp.
SHAPES = [
    (1, 1),
    (7, 12),
    (33, 136),
    (300, 1024),
    (64, 1032),
    (50, 4096),
    (17, 4099),
    (40, 8192),
    (35, 12296),
    (18, 16384),
    (16, 32768),
    (3, 65536),
    (9000, 264),
    (2, 100001),
    (40000, 128),
    (600, 24),
    (2100, 64),
    (1030, 255),
    (70, 100),
    (517, 256),
    (500, 5000),
    (2100, 2056),
]


def make(rows, cols, dtype, weight, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, cols, generator=generator) * 1.5 + 0.3).to(dtype)
    residual = torch.randn(rows, cols, generator=generator).to(dtype)
    gamma, beta = torch.randn(2, cols, generator=generator).to(weight)
    return x, residual, gamma, beta


def shifted(tensor, offset):
    """The same values on the GPU, `offset` elements behind an aligned address."""
    whole = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device="cuda")
    return whole[offset:].view(tensor.shape).copy_(tensor)


def check_fp8(out, host, expected, bound, fmt, scale):
    rows = expected.shape[0]
    assert_fp8_near(out.rowwise_data, expected, scale, fmt, bound / ARITHMETIC)
    transposed = out.columnwise_data.view(torch.uint8)
    assert torch.equal(transposed[:, :rows].t(), out.rowwise_data.view(torch.uint8))
    assert not transposed[:, rows:].any()
    assert torch.equal(out.scale_inv, host.scale_inv)


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["high", "row", "both"])
def test_against_fp64_and_host(function, dtype, shape, kind):
    index = SHAPES.index(shape)
    x, residual, gamma, beta = make(*shape, dtype, DTYPES[index % 3], index)
    options = {} if function.zero_centered_gamma else {"beta": beta}
    fmt, scale = ["e4m3", "e5m2"][index % 2], torch.tensor([[3.0, 0.37, 100.0][index % 3]])
    if kind != "high":
        options["scale"] = scale
    with_residual = index % 2 == 0
    if with_residual:
        options["residual"] = residual
    outputs = dispatch.norm_outputs(
        x,
        function,
        high_precision=kind != "row",
        fp8_dtype=None if kind == "high" else FP8[fmt],
        columnwise=kind == "both",
        residual=with_residual,
        stats=True,
    )
    host_amax, amax = torch.full((1,), 1e-3), torch.full((1,), 1e-3, device="cuda")
    host = dispatch.norm(x, gamma, function, outputs, **options, amax=host_amax)
    summed = host.sum if with_residual else x
    expected, mean, rstd = ref.normalise(summed, gamma, function, options.get("beta"))
    bound = ref.tolerance(summed, gamma, function, options.get("beta"))
    for offset in (0, 3):
        guards, out = guarded_like(outputs, offset, ("columnwise_data",))
        here = {name: shifted(value, offset) for name, value in options.items() if name != "scale"}
        if "scale" in options:
            here["scale"] = scale.cuda()
        amax.fill_(1e-3)
        dispatch.norm(shifted(x, offset), shifted(gamma, offset), function, out, **here, amax=amax)
        torch.cuda.synchronize()
        for guard in guards.values():
            guard.check()
        out = out._replace(**{name: t.cpu() for name, t in out._asdict().items() if t is not None})
        assert torch.allclose(out.rstd.double(), rstd, rtol=1e-6, atol=0)
        if out.mean is not None:
            assert torch.allclose(out.mean.double(), mean, rtol=1e-6, atol=3e-7)
        if with_residual:
            assert torch.equal(out.sum, host.sum)
        if kind != "row":
            assert ref.near(out.high_precision, expected, bound)
        if kind == "row":
            assert_fp8_near(out.rowwise_data, expected, scale, fmt, bound / ARITHMETIC)
        if kind == "both":
            check_fp8(out, host, expected, bound, fmt, scale)
        if kind != "high":
            slack = bound.max().item()
            assert amax.item() == pytest.approx(host_amax.item(), rel=1e-5, abs=slack)


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("cols", [64, 4096, 8192, 65536])
@pytest.mark.parametrize("columnwise", [False, True])
def test_peculiar_rows(function, cols, columnwise):
    x = torch.randn(20, cols)
    x[0], x[1, cols // 2], x[2, 5], x[3] = 0, torch.nan, torch.inf, -0.0
    x[4] = torch.finfo(torch.float32).tiny / 8
    x[5] = 4096 + torch.randn(cols)
    gamma = torch.randn(cols)
    outputs = dispatch.norm_outputs(x, function, fp8_dtype=FP8["e4m3"], columnwise=columnwise)
    host_amax, amax = torch.zeros(1), torch.zeros(1, device="cuda")
    host = dispatch.norm(x, gamma, function, outputs, scale=torch.ones(1), amax=host_amax)
    out = dispatch.norm_outputs(x.cuda(), function, fp8_dtype=FP8["e4m3"], columnwise=columnwise)
    one = torch.ones(1, device="cuda")
    dispatch.norm(x.cuda(), gamma.cuda(), function, out, scale=one, amax=amax)
    high = out.high_precision.cpu()
    assert torch.equal(high.isnan(), host.high_precision.isnan())
    finite = torch.tensor([0, 3, 4, 5, 6])
    expected, _, _ = ref.normalise(x[finite], gamma, function)
    bound = ref.tolerance(x[finite], gamma, function)
    assert ref.near(high[finite], expected, bound)
    got, wanted = out.rowwise_data.cpu(), host.rowwise_data
    assert torch.equal(got.float().isnan(), wanted.float().isnan())
    # The largest may lie in the row about 4096, whose mean alone is off by half a unit in the last place.
    assert amax.item() == pytest.approx(host_amax.item(), rel=1e-5, abs=bound.max().item())


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("cols", [24, 64, 4096, 4099, 16384, 65536])
def test_a_16_bit_row_with_an_infinity_is_nan_on_either_backend(function, dtype, offset, cols):
    """Every kernel gives NaN, also those that read rows element by element."""
    x, _, gamma, _ = make(20, cols, dtype, dtype, 4)
    x[2, 5], x[3, cols - 1], x[7, 1] = torch.inf, -torch.inf, torch.nan
    dy = torch.ones_like(x)
    results = []
    for device in ("cpu", "cuda"):
        here = [shifted(t, offset) if device == "cuda" else t for t in (x, gamma, dy)]
        out = dispatch.norm_outputs(here[0], function, stats=True)
        dispatch.norm(*here[:2], function, out)
        grads = dispatch.norm_gradients(here[0], here[1], function)
        dispatch.norm_backward(here[2], *here[:2], out.mean, out.rstd, function, grads)
        tensors = [out.high_precision, out.rstd, *grads]
        results.append([None if t is None else t.isnan().cpu() for t in tensors])
    wrong = torch.zeros(20, dtype=torch.bool)
    wrong[[2, 3, 7]] = True
    assert torch.equal(results[0][0], wrong[:, None].expand(20, cols))
    for host, got in zip(*results, strict=True):
        assert host is None or torch.equal(got, host)


@pytest.mark.parametrize("columnwise", [False, True])
def test_zero_rows_and_noop(columnwise):
    function, gamma = FUNCTIONS[0], torch.ones(64, device="cuda")
    options = {"scale": torch.full((1,), 4.0, device="cuda")}
    for rows in (0, 40):
        x = torch.randn(rows, 64, device="cuda")
        outputs = dispatch.norm_outputs(
            x, function, fp8_dtype=FP8["e4m3"], columnwise=columnwise, stats=True
        )
        guards, out = guarded_like(outputs)
        noop = torch.full((1,), float(rows != 0), device="cuda")
        dispatch.norm(x, gamma, function, out, **options, noop=noop)
        torch.cuda.synchronize()
        for name, guard in guards.items():
            guard.check()
            if rows != 0:
                assert (guard.whole == 0xA5).all(), name
        if rows == 0:
            assert out.scale_inv.item() == 0.25


def test_more_than_2_31_elements():
    rows, cols = (1 << 31) // 8192 + 3, 8192
    if torch.cuda.mem_get_info()[0] < 5 * rows * cols:
        pytest.skip("needs 11 GB of GPU memory")
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    gamma = torch.ones(cols, dtype=torch.bfloat16, device="cuda")
    one = torch.ones(1, device="cuda")
    for columnwise in (False, True):
        out = dispatch.norm_outputs(
            x, FUNCTIONS[1], high_precision=False, fp8_dtype=FP8["e4m3"], columnwise=columnwise
        )
        dispatch.norm(x, gamma, FUNCTIONS[1], out, scale=one)
        tail = dispatch.norm_outputs(
            x[-64:], FUNCTIONS[1], high_precision=False, fp8_dtype=FP8["e4m3"]
        )
        dispatch.norm(x[-64:], gamma, FUNCTIONS[1], tail, scale=one)
        wanted = tail.rowwise_data.view(torch.uint8)
        assert torch.equal(out.rowwise_data[-64:].view(torch.uint8), wanted)
        if columnwise:
            data = out.columnwise_data.view(torch.uint8)
            assert torch.equal(data[:, rows - 64 : rows].t(), wanted)
