"""cuBLASLt's FP8 products on Hopper equal those of the host's emulation of the tensor cores, bit for bit."""

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
import te_fast  # noqa: E402
from grouped_reference import fp8_values, scales_of, up  # noqa: E402
from te_fast.dispatch import QuantizedOperand  # noqa: E402

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N = 64, 96


def both(x, w, x_scale, w_scale, blocks, out_type, *, fast):
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
        out = torch.empty(M, N, dtype=out_type, device=device)
        te_fast.dispatch.gemm(*operands, out, fast_accumulation=fast, exact=device == "cpu")
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


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_no_number(fast) -> None:
    x, w = torch.ones(M, 128).to(E5M2), torch.ones(N, 128).to(E4M3)
    x[0, 3], x[1, 70], x[2, 3] = float("inf"), float("-inf"), float("nan")
    w[1, 3], w[2, 5] = 0.0, float("nan")
    one = torch.ones(1)
    gpu, host = both(x, w, one, one, (0, 0), torch.float32, fast=fast)
    assert gpu.isnan().equal(host.isnan())
    assert gpu.nan_to_num(0.0).equal(host.nan_to_num(0.0))
