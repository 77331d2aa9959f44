"""Functions of Transformer Engine's extension on the GPU: against FP64 torch, and the same functions on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import te_fast.pytorch as te  # noqa: E402
from te_fast import tex  # noqa: E402
from te_fast.pytorch.cpp_extensions import general_gemm  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPES = {"TN": ((48, 256), (32, 256)), "NN": ((256, 48), (32, 256)), "NT": ((256, 48), (256, 32))}


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).cuda()


def product(a, b, layout):
    a, b = a.double(), b.double()
    return (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)


def near(got, want, tolerance):
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("layout", list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_products(layout, dtype):
    a, b = (random(*shape, dtype=dtype) for shape in SHAPES[layout])
    near(general_gemm(a, b, layout=layout)[0], product(a, b, layout), 2**-7)
    if dtype is torch.bfloat16:
        near(general_gemm(a, b, torch.float32, layout=layout)[0], product(a, b, layout), 1e-5)


@pytest.mark.parametrize("layout", list(SHAPES))
def test_fp8_products(layout):
    quantizers = [
        te.Float8CurrentScalingQuantizer(kind, device="cuda")
        for kind in (te.DType.kFloat8E4M3, te.DType.kFloat8E5M2)
    ]
    a, b = (
        quantizer(random(*shape))
        for quantizer, shape in zip(quantizers, SHAPES[layout], strict=True)
    )
    got = general_gemm(a, b, torch.bfloat16, layout=layout, use_split_accumulator=True)[0]
    near(got, product(a.dequantize(), b.dequantize(), layout), 2**-7)


def test_products_with_block_scales():
    quantizers = [
        te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim
        )
        for dim in (2, 1)
    ]
    a, b = (
        quantizer(random(*shape)) for quantizer, shape in zip(quantizers, SHAPES["TN"], strict=True)
    )
    got = general_gemm(a, b, torch.bfloat16)[0]
    near(got, product(a.dequantize(), b.dequantize(), "TN"), 2**-7)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "rmsnorm"])
def test_kernels_that_cast(name, columnwise):
    """The kernel's cast is the quantizer's cast of its FP32 result."""
    x, gamma = random(32, 256), random(256)
    calls = {
        "swiglu": lambda q: tex.swiglu(x, q),
        "rmsnorm": lambda q: tex.rmsnorm_fwd(x, gamma, 1e-5, None, q, te.DType.kFloat32, 0, False)[
            0
        ],
    }
    quantizer = te.Float8Quantizer(
        torch.full((1,), 4.0, device="cuda"), torch.zeros(1, device="cuda"), te.DType.kFloat8E4M3
    )
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    got, want = calls[name](quantizer), quantizer(calls[name](None))
    assert torch.equal(got._data, want._data)
    if columnwise:
        assert torch.equal(got._transpose, want._transpose)


def test_steps_and_packed_sequences_are_those_of_the_cpu():
    flag = torch.zeros(1, dtype=torch.int32)
    lists = [[random(5, 7, seed=seed).abs()] for seed in range(4)]
    twins = [[one.cpu() for one in each] for each in lists]
    numbers = 0.1, 0.9, 0.99, 1e-3, 3, 1, 1, 0.2
    tex.multi_tensor_adam(1, flag.cuda(), lists, *numbers)
    tex.multi_tensor_adam(1, flag, twins, *numbers)
    for one, two in zip(lists, twins, strict=True):
        torch.testing.assert_close(one[0].cpu(), two[0])
    bounds = torch.tensor([0, 8, 24, 32], dtype=torch.int32)
    got = tex.thd_get_partitioned_indices(bounds.cuda(), 32, 2, 1)
    assert torch.equal(got.cpu(), tex.thd_get_partitioned_indices(bounds, 32, 2, 1))
    lse, step = random(3, 32), random(3, 16)
    pair = lse.cpu(), step.cpu()
    tex.thd_second_half_lse_correction(lse, step, bounds.cuda(), True)
    tex.thd_second_half_lse_correction(*pair, bounds, True)
    torch.testing.assert_close(lse.cpu(), pair[0])


def test_queries():
    assert tex.get_cublasLt_version() > 0
    assert tex.get_cudnn_version() > 0
    least, greatest = tex.get_stream_priority_range()
    assert greatest <= least
