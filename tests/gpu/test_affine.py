"""Scaling, bias and addition on the GPU: rows of all lengths and alignments, against torch in FP32."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import te_fast.pytorch as te  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Rows and columns: fewer than an access has, one more or less than several, more elements than a block of threads has.
SIZES = [(1, 1), (3, 3), (5, 8), (7, 129), (1025, 4), (3, 4097), (129, 1000)]


def values(rows: int, cols: int, dtype: torch.dtype, first: int) -> torch.Tensor:
    """Random numbers and edges, `first` elements behind an aligned address."""
    x = torch.randn(rows * cols + first, device="cuda", dtype=dtype)
    edges = [0.0, -0.0, float("inf"), float("nan"), torch.finfo(dtype).max]
    places = torch.linspace(0, x.numel() - 1, len(edges)).long().to(x.device)
    x[places] = torch.tensor(edges, dtype=dtype, device="cuda")
    return x[first:].view(rows, cols)


def run(op: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = op(*inputs)
    return result


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_scale_bias_and_addition(rows, cols, dtype, first) -> None:
    torch.manual_seed(rows)
    x, added = (values(rows, cols, dtype, first) for _ in range(2))
    bias = te.ops.Bias(cols, device="cuda", dtype=dtype)
    with torch.no_grad():
        bias.bias.normal_()
    found = {
        "scale": run(te.ops.ConstantScale(0.3), x),
        "bias": run(bias, x),
        "addition": run(te.ops.AddExtraInput(), x, added),
    }
    scale = torch.tensor(0.3, dtype=torch.float32, device="cuda")
    expected = {
        "scale": x.float() * scale,
        "bias": x.float() + bias.bias.float(),
        "addition": x.float() + added.float(),
    }
    for name, y in found.items():
        torch.testing.assert_close(
            y, expected[name].to(dtype), rtol=0, atol=0, equal_nan=True, msg=name
        )
