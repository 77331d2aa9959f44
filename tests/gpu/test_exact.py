"""FP8 products on Hopper equal those of the host's emulation of the tensor cores, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the emulation is of Hopper", allow_module_level=True)

sys.path[:0] = [str(Path(__file__).parents[1])]
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import te_fast  # noqa: E402
import te_fast.pytorch as te  # noqa: E402
from grouped_reference import fp8_values, scales_of, up  # noqa: E402
from te_fast.common.recipe import Float8BlockScaling  # noqa: E402
from te_fast.dispatch import QuantizedOperand  # noqa: E402

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N = 64, 96
MULTIPROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count


def both(x, w, x_scale, w_scale, blocks, out_type, *, fast, bias=None):
    """The product on the GPU, brought to the host, and on the host."""
    results = []
    for device in ("cuda", "cpu"):
        operands = [
            QuantizedOperand(
                data.to(device).view(torch.uint8),
                scale.to(device),
                None,
                None,
                data.dtype,
                block,
                data.shape[1],
            )
            for data, scale, block in zip((x, w), (x_scale, w_scale), blocks, strict=True)
        ]
        out = torch.empty(len(x), len(w), dtype=out_type, device=device)
        te_fast.dispatch.gemm(
            *operands,
            out,
            bias=None if bias is None else bias.to(device),
            fast_accumulation=fast,
            exact=device == "cpu",
        )
        results.append(out.cpu())
    return results


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("x_type", "w_type"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("out_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [32, 128, 272, 1024])
def test_one_scale(k, out_type, x_type, w_type, fast) -> None:
    make = torch.Generator().manual_seed(k)
    x, w = fp8_values((M, k), x_type, make, "cpu"), fp8_values((N, k), w_type, make, "cpu")
    gpu, host = both(x, w, torch.tensor([0.5]), torch.tensor([4.0]), (0, 0), out_type, fast=fast)
    assert gpu.equal(host)


@pytest.mark.parametrize("blocks", [(1, 2), (1, 1)])
@pytest.mark.parametrize("k", [128, 512, 1024])
def test_block_scales(k, blocks) -> None:
    make = torch.Generator().manual_seed(k)
    x, w = fp8_values((M, k), E4M3, make, "cpu"), fp8_values((N, k), E4M3, make, "cpu")
    x_scale = scales_of((k // 128, up(M, 4)), make, "cpu")
    w_shape = (k // 128, up(N, 4)) if blocks[1] == 1 else (up(N, 128) // 128, up(k // 128, 4))
    gpu, host = both(
        x, w, x_scale, scales_of(w_shape, make, "cpu"), blocks, torch.float32, fast=False
    )
    assert gpu.equal(host)


@pytest.mark.parametrize(
    ("x_type", "out_type"), [(E4M3, torch.bfloat16), (E5M2, torch.float32), (E4M3, torch.float16)]
)
@pytest.mark.parametrize(("rows", "with_bias"), [(4219, False), (4224, True), (4096, False)])
def test_block_scales_of_many_tiles(rows, with_bias, x_type, out_type) -> None:
    """te_fast's kernel multiplies without a bias where its tiles fill the GPU: more than 4096 rows have 132."""
    n, k = 1016, 144
    make = torch.Generator().manual_seed(rows)
    x, w = fp8_values((rows, k), x_type, make, "cpu"), fp8_values((n, k), E4M3, make, "cpu")
    x_scale = scales_of((up(k, 128) // 128, up(rows, 4)), make, "cpu")
    w_scale = scales_of((up(n, 128) // 128, up(up(k, 128) // 128, 4)), make, "cpu")
    bias_type = torch.bfloat16 if out_type == torch.float32 else out_type
    bias = torch.randn(n, generator=make).to(bias_type) if with_bias else None
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        gpu, host = both(x, w, x_scale, w_scale, (1, 2), out_type, fast=False, bias=bias)
    own = any("grouped_rows_block" in event.key for event in found.key_averages())
    assert own == (rows > 4096 and not with_bias and MULTIPROCESSORS == 132)
    assert gpu.equal(host)


@pytest.mark.skipif(MULTIPROCESSORS != 132, reason="the rows fill 132 multiprocessors")
def test_who_multiplies_is_said() -> None:
    linear = te.ops.Linear(256, 1016, bias=False, device="cuda", dtype=torch.bfloat16)
    chain = te.ops.Sequential(linear)
    for rows in (4224, 256):
        x = torch.ones(rows, 256, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad(), te.autocast(recipe=Float8BlockScaling()):
            chain(x)
    own, cublas = (line for line in chain.explain().splitlines() if "gemm" in line)
    assert "by te_fast's kernel: its tiles fill the multiprocessors" in own
    assert "by cuBLASLt: " in cublas


@pytest.mark.skipif(MULTIPROCESSORS != 132, reason="the rows fill 132 multiprocessors")
def test_our_kernel_in_graphs() -> None:
    """Calls that repeat their addresses are replayed, and a user's graph replays the layer with other values."""
    recipe = Float8BlockScaling()
    linear = te.Linear(256, 1016, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.empty(4224, 256, dtype=torch.bfloat16, device="cuda")

    def forward() -> torch.Tensor:
        with torch.no_grad(), te.autocast(recipe=recipe):
            result: torch.Tensor = linear(x)
        return result

    def wanted() -> torch.Tensor:
        operands = (
            te_fast.dispatch.quantize(x, recipe),
            te_fast.dispatch.quantize(linear.weight.detach(), recipe, role="weight"),
        )
        return te_fast.dispatch.gemm(
            *operands, torch.empty(4224, 1016, dtype=x.dtype, device="cuda")
        )

    for _ in range(5):
        x.normal_()
        assert forward().equal(wanted())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward()
    for _ in range(3):
        x.normal_()
        y.fill_(float("nan"))
        graph.replay()
        assert y.equal(wanted())


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_no_number(fast) -> None:
    x, w = torch.ones(M, 128).to(E5M2), torch.ones(N, 128).to(E4M3)
    x[0, 3], x[1, 70], x[2, 3] = float("inf"), float("-inf"), float("nan")
    w[1, 3], w[2, 5] = 0.0, float("nan")
    one = torch.ones(1)
    gpu, host = both(x, w, one, one, (0, 0), torch.float32, fast=fast)
    assert gpu.isnan().equal(host.isnan())
    assert gpu.nan_to_num(0.0).equal(host.nan_to_num(0.0))
