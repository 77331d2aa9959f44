"""Matrix products under the names of Transformer Engine's extension, against FP64 and torch."""

import pytest
import torch

import te_fast.pytorch as te
from te_fast import tex
from te_fast.errors import ArgumentError, QuantizedTensorError, ShapeError, UnsupportedError
from te_fast.pytorch.cpp_extensions import general_gemm, general_grouped_gemm
from te_fast.tensor.dtypes import TE_DType

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
#: Shapes of A and B of a layout, from rows, columns and the summed dimension.
SHAPES = {
    "TN": lambda m, n, k: ((n, k), (m, k)),
    "NN": lambda m, n, k: ((k, n), (m, k)),
    "NT": lambda m, n, k: ((k, n), (k, m)),
}


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def expected(a, b, layout):
    a, b = a.double(), b.double()
    return (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)


def close(got, want, dtype):
    assert got.dtype is dtype
    scale = want.abs().amax().clamp_min(1.0) if want.numel() else 1.0
    torch.testing.assert_close(
        got.double() / scale, want / scale, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", list(SHAPES))
@pytest.mark.parametrize("sizes", [(1, 16, 32), (24, 8, 40)])
def test_layouts(layout, dtype, sizes):
    a, b = (
        random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(SHAPES[layout](*sizes))
    )
    result, bias_grad, gelu_input, extra = general_gemm(a, b, layout=layout)
    close(result, expected(a, b, layout), dtype)
    assert bias_grad is None
    assert gelu_input is None
    assert extra is None
    wide = general_gemm(a, b, torch.float32, layout=layout)[0]
    close(wide, expected(a, b, layout), torch.float32)


def test_leading_dimensions_strides_and_autograd():
    a = random(16, 64)[:, ::2].requires_grad_()
    b = random(3, 32, 5).transpose(1, 2).requires_grad_()
    result = general_gemm(a, b)[0]
    assert result.shape == (3, 5, 16)
    assert not result.requires_grad
    close(result, (b.double() @ a.double().t()).detach(), torch.float32)
    assert general_gemm(a, b[0, 0])[0].shape == (16,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_its_gradient(dtype):
    a, b, bias = random(16, 32, dtype=dtype), random(4, 32, dtype=dtype), random(16, dtype=dtype)
    got = general_gemm(a, b, bias=bias.view(1, 16))[0]
    close(got, expected(a, b, "TN") + bias.double(), dtype)
    dy, x = random(40, 24, dtype=dtype), random(40, 32, dtype=dtype)
    wgrad, bias_grad, _, _ = general_gemm(
        x, dy, layout="NT", grad=True, bias=random(24, dtype=dtype)
    )
    close(wgrad, dy.double().t() @ x.double(), dtype)
    close(bias_grad, dy.double().sum(0), dtype)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, None), (1.0, 1.0), (0.5, 2.0), (-2.0, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulation_and_factors(alpha, beta, dtype):
    a, b, out = random(16, 32, dtype=dtype), random(4, 32, dtype=dtype), random(4, 16, dtype=dtype)
    bias = random(16, dtype=dtype)
    before = out.double()
    got = general_gemm(a, b, alpha=alpha, beta=beta, accumulate=True, out=out, bias=bias)[0]
    assert got is out
    want = alpha * expected(a, b, "TN") + (1.0 if beta is None else beta) * before + bias.double()
    close(got, want, dtype)
    close(general_gemm(a, b, alpha=3.0)[0], 3 * expected(a, b, "TN"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_its_derivative(dtype):
    a, b, bias = random(16, 32, dtype=dtype), random(4, 32, dtype=dtype), random(16, dtype=dtype)
    out, _, before, _ = general_gemm(a, b, gelu=True, bias=bias)
    close(before, expected(a, b, "TN") + bias.double(), dtype)
    want = torch.nn.functional.gelu(before.double(), approximate="tanh")
    close(out, want, dtype)
    at = random(4, 16, dtype=dtype, seed=5).double().requires_grad_()
    torch.nn.functional.gelu(at, approximate="tanh").backward(expected(a, b, "TN"))
    out, _, before, _ = general_gemm(a, b, gelu=True, gelu_in=at.detach().to(dtype), grad=True)
    assert before is None
    close(out, at.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_of_a_sum(dtype):
    a, b, out = random(16, 32, dtype=dtype), random(4, 32, dtype=dtype), random(4, 16, dtype=dtype)
    sums = expected(a, b, "TN") + out.double()
    got, _, before, _ = general_gemm(a, b, gelu=True, accumulate=True, out=out)
    assert got is out
    close(before, sums, dtype)
    close(got, torch.nn.functional.gelu(before.double(), approximate="tanh"), dtype)


def current(dtype=E4M3, **options):
    return te.Float8CurrentScalingQuantizer(dtype, device="cpu", **options)


def delayed(dtype=E4M3):
    return te.Float8Quantizer(torch.full((1,), 8.0), torch.zeros(1), dtype)


def blocks(dimensions):
    return te.Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions
    )


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("layout", list(SHAPES))
@pytest.mark.parametrize(
    "quantizers", [(current(), current(E5M2)), (delayed(), delayed(E5M2)), (blocks(2), blocks(1))]
)
def test_quantised_operands(layout, quantizers, split):
    if layout == "NT" and quantizers[0]._block:
        quantizers = blocks(1), blocks(1)
    shapes = SHAPES[layout](32, 48, 256)
    a, b = (quantizer(random(*shape)) for quantizer, shape in zip(quantizers, shapes, strict=True))
    # The product of what the layouts hold. Blocks of columns have scales of their own.
    columns = (layout[0] == "N", layout[1] == "T")
    values = [held(one, columnwise=column) for one, column in zip((a, b), columns, strict=True)]
    want = expected(*values, layout)
    for dtype in (torch.float32, torch.bfloat16):
        got = general_gemm(a, b, dtype, layout=layout, use_split_accumulator=split)[0]
        close(got, want, dtype)
    assert general_gemm(a, b, layout=layout)[0].dtype is torch.float32  # the nominal type of A


def held(tensor, *, columnwise):
    """Values of one layout, from the bytes."""
    dtype = torch.float8_e4m3fn if tensor._fp8_dtype == E4M3 else torch.float8_e5m2
    value = tensor._value
    data = value.col if columnwise else value.row
    values = data.view(dtype).double()
    if value.block == 0:
        values *= value.row_scale.double()
    else:
        scale = (value.col_scale if columnwise else value.row_scale).double()
        rows, cols = values.shape
        if value.block == 1:
            values *= scale[:, :rows].repeat_interleave(128, 0)[:cols].t()
        else:
            spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
            values *= spread[:, :cols]
    return values.t() if columnwise else values


def test_internal_storages_and_hybrid_and_identity_tensors():
    quantizer = current()
    quantizer.internal = True
    a, b = quantizer(random(16, 32)), quantizer(random(4, 32))
    want = expected(held(a, columnwise=False), held(b, columnwise=False), "TN")
    close(general_gemm(a, b, torch.float32)[0], want, torch.float32)
    identity = te.IdentityQuantizer()(random(16, 32))
    close(
        general_gemm(identity, random(4, 32))[0],
        expected(random(16, 32), random(4, 32), "TN"),
        torch.float32,
    )
    hybrid = te.HybridQuantizer(
        rowwise_quantizer=current(), columnwise_quantizer=te.IdentityQuantizer()
    )
    made = hybrid(random(32, 16))
    got = general_gemm(made, random(4, 32), layout="NN")[0]
    close(got, expected(random(32, 16), random(4, 32), "NN"), torch.float32)


@pytest.mark.parametrize("quantizer", [current(), delayed(E5M2), blocks(1)])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_quantised_results(quantizer, is_fp8):
    a, b = random(32, 64), random(16, 64)
    if is_fp8:
        a, b = current()(a), current()(b)
    plain = general_gemm(a, b, torch.float32)[0]
    made = general_gemm(a, b, torch.bfloat16, quantizer)[0]
    assert isinstance(made, te.QuantizedTensor)
    assert made.dtype is torch.bfloat16
    casts_sums = is_fp8 and isinstance(quantizer, te.Float8Quantizer)
    want = quantizer(plain if casts_sums else plain.bfloat16())
    assert torch.equal(made.dequantize().float(), want.dequantize().float())
    out = quantizer.make_empty((16, 32), dtype=torch.bfloat16, device="cpu")
    assert general_gemm(a, b, torch.bfloat16, quantizer, out=out)[0] is out
    assert torch.equal(out.dequantize(), made.dequantize())


@pytest.mark.parametrize("sizes", [(0, 16, 32), (4, 0, 32), (4, 16, 0)])
def test_empty(sizes):
    m, n, k = sizes
    a, b = torch.ones(n, k), torch.ones(m, k)
    assert torch.equal(general_gemm(a, b)[0], torch.zeros(m, n))
    out = torch.ones(m, n)
    assert torch.equal(general_gemm(a, b, out=out, accumulate=True)[0], torch.ones(m, n))
    dy = torch.ones(0, 8)
    wgrad, bias_grad, _, _ = general_gemm(
        torch.ones(0, 16), dy, layout="NT", grad=True, bias=torch.ones(8)
    )
    assert torch.equal(wgrad, torch.zeros(8, 16))
    assert torch.equal(bias_grad, torch.zeros(8))


def test_values_that_are_not_finite():
    a, b = torch.ones(16, 32), torch.ones(2, 32)
    b[0, 0], b[1, 3] = torch.nan, torch.inf
    result = general_gemm(a, b)[0]
    assert result[0].isnan().all()
    assert (result[1] == torch.inf).all()


def test_the_extensions_function_returns_a_list():
    a, b = random(16, 32), random(4, 32)
    workspace = torch.empty(0, dtype=torch.uint8)
    arguments = (a, True, b, False, None, None, te.DType.kBFloat16, None, te.DType.kBFloat16)
    result = tex.generic_gemm(*arguments, False, None, False, workspace, 0, False, False)
    assert type(result) is list
    assert len(result) == 4
    close(result[0], expected(a, b, "TN"), torch.bfloat16)
    quantizer = blocks(1)
    x, w = (quantizer(random(*shape)) for shape in ((128, 256), (16, 256)))
    *_, before, _ = tex.generic_gemm(
        *(x, True, w, False, None, None, te.DType.kFloat32, None, te.DType.kBFloat16),
        *(True, None, False, workspace, 0, False, True),
    )
    assert before.dtype is torch.bfloat16  # of `bias_type`


def test_errors():
    a, b = torch.ones(16, 32), torch.ones(4, 32)
    with pytest.raises(AssertionError, match="TT") as raised:
        general_gemm(a, b, layout="TT")
    assert isinstance(raised.value, ShapeError)
    with pytest.raises(ValueError, match="contiguous"):
        general_gemm(a, b, out=torch.ones(16, 4).t())
    with pytest.raises(ArgumentError, match="beta"):
        general_gemm(a, b, beta=1.0)
    with pytest.raises(RuntimeError, match="32 and 31"):
        general_gemm(a, torch.ones(4, 31))
    with pytest.raises(RuntimeError, match=r"shape \[4, 16\], got \[4, 15\]"):
        general_gemm(a, b, out=torch.ones(4, 15))
    with pytest.raises(RuntimeError, match="as output_dtype says"):
        general_gemm(a, b, torch.bfloat16, out=torch.ones(4, 16))
    with pytest.raises(RuntimeError, match="needs a plain D"):
        general_gemm(a, b, accumulate=True)
    with pytest.raises(RuntimeError, match="gelu_in"):
        general_gemm(a, b, gelu=True, grad=True)
    with pytest.raises(RuntimeError, match="bias must have 16"):
        general_gemm(a, b, bias=torch.ones(15))
    with pytest.raises(UnsupportedError, match="bgrad_quantize"):
        general_gemm(a, b, grad=True, bias=torch.ones(16))
    with pytest.raises(UnsupportedError, match="Userbuffers"):
        general_gemm(a, b, extra_output=torch.ones(1))
    with pytest.raises(UnsupportedError, match="Userbuffers"):
        general_gemm(a, b, bulk_overlap=True)
    with pytest.raises(NotImplementedError, match="IdentityQuantizer"):
        general_gemm(a, b, quantization_params=te.IdentityQuantizer())
    with pytest.raises(QuantizedTensorError, match="columnwise"):
        general_gemm(current(columnwise=False)(torch.ones(32, 16)), b, layout="NN")
    rows, weights = blocks(1)(torch.ones(128, 128)), blocks(2)(torch.ones(128, 128))
    for one, other in ((weights, rows), (rows, weights)):
        with pytest.raises(RuntimeError, match="use_split_accumulator must be True"):
            tex.generic_gemm(
                *(one, True, other, False, None, None, te.DType.kFloat32, None, te.DType.kBFloat16),
                *(False, None, False, None, 0, False, False),
            )
    with pytest.raises(RuntimeError, match="its quantizer"):
        general_gemm(a, b, out=current()(torch.ones(4, 16)))


@pytest.mark.parametrize("layout", list(SHAPES))
def test_groups(layout):
    rows = [3, 0, 5]
    pairs = [
        [random(*shape, seed=seed) for shape in SHAPES[layout](m, 16, 32)]
        for seed, m in enumerate(rows)
    ]
    if layout == "NT":  # the groups' rows are summed up
        pairs = [[random(m, 16, seed=m), random(m, 24, seed=m + 1)] for m in rows]
    a, b = map(list, zip(*pairs, strict=True))
    wants = [expected(*pair, layout) for pair in pairs]
    outs = [torch.full(want.shape, 7.0) for want in wants]
    got, biases, before = general_grouped_gemm(a, b, outs, [None] * 3, torch.float32, layout)
    assert got is outs
    assert [one.numel() for one in (*biases, *before)] == [0] * 6
    for out, want in zip(outs, wants, strict=True):
        close(out, want, torch.float32)
    general_grouped_gemm(a, b, outs, [None] * 3, torch.float32, layout, accumulate=True)
    for out, want in zip(outs, wants, strict=True):
        close(out, 2 * want, torch.float32)


def test_groups_with_one_result_biases_and_gelu():
    rows = [3, 0, 5]
    a = [random(16, 32, seed=one) for one in range(3)]
    b = [random(m, 32) for m in rows]
    bias = [random(16, seed=9 + one) for one in range(3)]
    out = torch.full((10, 16), 7.0)
    options = {"m_splits": rows, "single_output": True, "bias": bias, "use_bias": True}
    got, biases, _ = general_grouped_gemm(a, b, [out], [None] * 3, torch.float32, **options)
    assert got[0] is out
    assert all(x is y for x, y in zip(biases, bias, strict=True))
    wants = [expected(*pair, "TN") + one.double() for *pair, one in zip(a, b, bias, strict=True)]
    close(out[:8], torch.cat(wants), torch.float32)
    assert (out[8:] == 7).all()
    outs = [torch.empty(m, 16) for m in rows]
    _, _, before = general_grouped_gemm(a, b, outs, [None] * 3, torch.float32, gelu=True)
    close(before[2], expected(a[2], b[2], "TN"), torch.float32)
    want = torch.nn.functional.gelu(before[2].double(), approximate="tanh")
    close(outs[2], want, torch.float32)


def test_gradients_of_groups_biases():
    x, dy = [random(m, 16) for m in (3, 0)], [random(m, 24) for m in (3, 0)]
    outs = [torch.empty(24, 16) for _ in x]
    options = {"grad": True, "use_bias": True, "bias": [torch.ones(24)] * 2}
    _, grads, _ = general_grouped_gemm(x, dy, outs, [None] * 2, torch.float32, "NT", **options)
    for grad, one in zip(grads, dy, strict=True):
        close(grad, one.double().sum(0), torch.float32)


def test_errors_of_groups():
    a, b = [torch.ones(16, 32)] * 2, [torch.ones(4, 32)] * 2
    with pytest.raises(ShapeError, match="m_splits"):
        general_grouped_gemm(
            a, b, [torch.ones(8, 16)], [None] * 2, torch.float32, single_output=True
        )
    with pytest.raises(ShapeError, match="2 elements"):
        general_grouped_gemm(a, b, [torch.ones(4, 16)], [None] * 2, torch.float32)
    outs = [torch.ones(4, 16)] * 2
    with pytest.raises(UnsupportedError, match="gelu"):
        general_grouped_gemm(a, b, outs, [None] * 2, torch.float32, gelu=True, grad=True)


def test_types_are_those_of_the_layers():
    assert TE_DType[torch.bfloat16] is tex.DType.kBFloat16
