"""Functions under the names of Transformer Engine's extension, against plain torch."""

import math
from itertools import chain

import pytest
import torch
import torch.nn.functional as F

import te_fast.pytorch as te
from selection import every_pair, sampled
from te_fast import tex
from te_fast.errors import DeviceError, MissingError, TeFastError, UnsupportedError
from te_fast.tex.missing import NAMES

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def close(got, want, dtype):
    assert got.dtype is dtype
    torch.testing.assert_close(
        got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True
    )


def current():
    return te.Float8CurrentScalingQuantizer(E4M3, device="cpu")


def delayed(**usage):
    quantizer = te.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), E5M2)
    quantizer.set_usage(**usage)
    return quantizer


def blocks():
    return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)


def quickgelu(x):
    return x * torch.sigmoid(1.702 * x)


def clamped(first, second, limit=7.0, alpha=1.702, offset=1.0):
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return first * torch.sigmoid(alpha * first) * (second + offset)


FUNCTIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": quickgelu,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
}
GATES = {
    "glu": torch.sigmoid,
    "geglu": FUNCTIONS["gelu"],
    "qgeglu": quickgelu,
    "reglu": F.relu,
    "sreglu": FUNCTIONS["srelu"],
    "swiglu": F.silu,
}


def gated(function):
    def apply(x):
        first, second = x.chunk(2, -1)
        return function(first) * second

    return apply


FUNCTIONS |= {name: gated(function) for name, function in GATES.items()}
PAIRS = {name: (getattr(tex, name), getattr(tex, f"d{name}")) for name in FUNCTIONS}
FUNCTIONS["clamped_swiglu"] = lambda x: clamped(*x.chunk(2, -1))
PAIRS["clamped_swiglu"] = tex.clamped_swiglu, tex.clamped_dswiglu
FUNCTIONS["situglu"] = None
PAIRS["situglu"] = tex.situglu, tex.dsituglu


def situ(x, beta1=4.0, beta2=25.0):
    first, second = x.chunk(2, -1)
    return (
        beta1
        * torch.tanh(first / beta1)
        * torch.sigmoid(first)
        * beta2
        * torch.tanh(second / beta2)
    )


FUNCTIONS["situglu"] = situ


def differentiated(name, x, dy):
    at = x.detach().double().requires_grad_()
    y = FUNCTIONS[name](at)
    y.backward(dy.double())
    return y.detach(), at.grad


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    sampled(list(FUNCTIONS), [(5, 32), (2, 3, 16), (0, 16), (1, 2)], DTYPES, quick=every_pair),
)
def test_activations(name, shape, dtype):
    forward, backward = PAIRS[name]
    x = (2 * random(*shape, dtype=dtype)).requires_grad_()
    y = forward(x, None)
    dy = random(*y.shape, dtype=dtype, seed=1)
    want, grad = differentiated(name, x, dy)
    assert y.shape == want.shape
    assert not y.requires_grad
    close(y, want, dtype)
    got = backward(dy, x, None)
    assert got.shape == x.shape
    assert not got.requires_grad
    close(got, grad, dtype)


@pytest.mark.parametrize(
    ("name", "make", "rows"),
    sampled(
        ["gelu", "qgelu", "relu", "srelu", "silu"],
        [lambda: None, current, delayed, blocks],
        [16, 3, 0],
        quick=every_pair,
    ),
)
def test_activations_with_bias_and_quantizer(name, make, rows):
    x, dy = random(rows, 128, dtype=torch.bfloat16), random(rows, 128, dtype=torch.bfloat16, seed=1)
    quantizer = make()
    if rows == 0 and quantizer is not None:
        pytest.skip("quantised tensors without rows are of no use")
    sums, grad = getattr(tex, f"dbias_d{name}")(dy, x, quantizer)
    _, want = differentiated(name, x, dy)
    torch.testing.assert_close(sums.double(), want.sum(0), atol=0.1, rtol=0.02)
    if quantizer is None:
        close(grad, want, torch.bfloat16)
    else:
        assert grad.dtype is torch.bfloat16
        assert grad.shape == x.shape
        torch.testing.assert_close(grad.dequantize().double(), want, atol=0.05, rtol=0.15)


@pytest.mark.parametrize(
    ("call", "make", "columnwise", "rows"),
    sampled(
        ["gelu", "swiglu", "dswiglu", "rmsnorm", "layernorm"],
        [current, delayed, blocks],
        [True, False],
        [16, 6],
        quick=every_pair,
    ),
)
def test_quantised_results(call, make, columnwise, rows):
    """Those that the kernel casts, and those of a second pass, are the quantised FP32 result."""
    x, gamma = random(rows, 256), random(256, seed=2)
    other = random(rows, 128, seed=3)
    calls = {
        "gelu": lambda q: tex.gelu(x, q),
        "swiglu": lambda q: tex.swiglu(x, q),
        "dswiglu": lambda q: tex.dswiglu(other, x, q),
        "rmsnorm": lambda q: tex.rmsnorm_fwd(x, gamma, 1e-5, None, q, te.DType.kFloat32, 0, False)[
            0
        ],
        "layernorm": lambda q: tex.layernorm_fwd(
            x, gamma, None, 1e-5, None, q, torch.float32, 0, True
        )[0],
    }
    quantizer, reference = make(), make()
    for one in (quantizer, reference):
        one.set_usage(rowwise=True, columnwise=columnwise)
    got, want = calls[call](quantizer), reference(calls[call](None))
    assert isinstance(got, te.QuantizedTensor)
    assert type(got) is type(want)
    for part in ("row", "col", "row_scale", "col_scale"):
        mine, yours = getattr(got._value, part), getattr(want._value, part)
        assert (mine is None) == (yours is None), part
        if mine is not None:
            assert torch.equal(mine, yours), part
    if isinstance(quantizer, te.Float8Quantizer):
        assert torch.equal(quantizer.amax, reference.amax)
        assert quantizer.amax > 0


@pytest.mark.parametrize(
    ("shape", "zero_centered", "dtype"),
    sampled([(5, 64), (2, 3, 32), (0, 16), (1, 8)], [False, True], DTYPES, quick=every_pair),
)
def test_norms(shape, zero_centered, dtype):
    cols = shape[-1]
    x, dz, add = (random(*shape, dtype=dtype, seed=seed) for seed in (0, 1, 2))
    gamma, beta = (random(cols, dtype=dtype, seed=seed) for seed in (3, 4))
    at = x.double().requires_grad_()
    weight, bias = gamma.double().requires_grad_(), beta.double().requires_grad_()
    factor = weight + 1 if zero_centered else weight
    tail = 0, zero_centered
    want = F.layer_norm(at, (cols,), factor, bias, 1e-5)
    grads = torch.autograd.grad(want, (at, weight, bias), dz.double())
    y, mu, rsigma = tex.layernorm_fwd(
        x.requires_grad_(), gamma, beta, 1e-5, None, None, tex.DType.cast(dtype), *tail
    )
    assert not y.requires_grad
    assert y.shape == x.shape
    close(y, want.detach(), dtype)
    close(mu, at.detach().mean(-1).view(-1), torch.float32)
    got = tex.layernorm_bwd(dz, x, mu, rsigma, gamma, *tail)
    for one, two in zip(got, grads, strict=True):
        torch.testing.assert_close(
            one.double(), two, atol=10 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype]
        )
    scale = (at**2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    want = at * scale * factor
    grads = torch.autograd.grad(want, (at, weight), dz.double())
    y, mu, rsigma = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, tex.DType.cast(dtype), *tail)
    assert mu is None
    close(y, want.detach(), dtype)
    close(rsigma, scale.detach().view(-1), torch.float32)
    for got, more in (
        (tex.rmsnorm_bwd(dz, x, rsigma, gamma, *tail), 0),
        (tex.rmsnorm_bwd_add(dz, x, add, rsigma, gamma, *tail), add.double()),
    ):
        for one, two in zip(got, (grads[0] + more, grads[1]), strict=True):
            torch.testing.assert_close(
                one.double(), two, atol=10 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype]
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_into_given_memory_and_other_types(dtype):
    x, gamma = random(6, 32, dtype=torch.bfloat16)[::2], random(32)
    want = x.double() * (x.double() ** 2).mean(-1, keepdim=True).rsqrt() * gamma.double()
    for out in (torch.empty(3, 32, dtype=dtype), torch.empty(32, 3, dtype=dtype).t()):
        got = tex.rmsnorm_fwd(x, gamma, 0.0, out, None, tex.DType.cast(dtype), 0, False)[0]
        assert got is out
        close(out, want, dtype)
    quantizer = current()
    out = quantizer.make_empty((3, 32), dtype=dtype, device="cpu")
    got = tex.rmsnorm_fwd(x, gamma, 0.0, out, quantizer, tex.DType.cast(dtype), 0, False)[0]
    assert got is out
    torch.testing.assert_close(out.dequantize().double(), want, atol=0.02, rtol=0.07)
    with pytest.raises(RuntimeError, match="its quantizer"):
        tex.rmsnorm_fwd(x, gamma, 0.0, out, None, tex.DType.cast(dtype), 0, False)


def test_quantize():
    x = random(64, 16).t().requires_grad_()
    quantizer = current()
    made = tex.quantize(x, quantizer)
    assert isinstance(made, te.Float8Tensor)
    assert not made.requires_grad
    assert made.grad_fn is None
    scale = 448 / x.detach().abs().max()
    want = (x.detach() * scale).to(torch.float8_e4m3fn)
    assert torch.equal(made._data.view(torch.float8_e4m3fn).float(), want.float())
    close(
        tex.dequantize(made, tex.DType.kBFloat16), (want.double() / scale.double()), torch.bfloat16
    )
    assert not tex.dequantize(made.requires_grad_(), torch.float32).requires_grad
    out = quantizer.make_empty((16, 64), device="cpu")
    assert tex.quantize(x, quantizer, out) is out
    assert torch.equal(out._data, made._data)
    tex.quantize(2 * x + 1, quantizer, output=out, noop=torch.ones(1))
    assert torch.equal(out._data, made._data)
    assert torch.equal(tex.quantize(x, quantizer, noop=torch.zeros(1))._data, made._data)
    with pytest.raises(RuntimeError, match="quantizer is missing"):
        tex.quantize(x, None)
    with pytest.raises(UnsupportedError, match="te_fast"):
        tex.quantize(x, object())
    with pytest.raises(RuntimeError, match="expected a quantised tensor"):
        tex.dequantize(x, torch.float32)


@pytest.mark.parametrize("make", [lambda: None, current, delayed, blocks])
def test_gradients_of_biases(make):
    x = random(4, 32, 128, dtype=torch.bfloat16)
    sums, made = tex.bgrad_quantize(x, make())
    close(sums, x.double().sum((0, 1)), torch.bfloat16)
    want = x if make() is None else make()(x).dequantize()
    got = made if make() is None else made.dequantize()
    assert got.shape == x.shape
    assert torch.equal(got, want)
    sums, _ = tex.bgrad_quantize(x[:, :0], None)
    assert torch.equal(sums, torch.zeros(128, dtype=torch.bfloat16))


def test_several_tensors():
    x = random(10, 32)
    quantizers = [current(), delayed(), current()]
    parts = tex.split_quantize(x, [4, 1, 3], quantizers)
    for got, want, quantizer in zip(parts, (x[:4], x[4:5], x[5:8]), quantizers, strict=True):
        assert torch.equal(got.dequantize(), quantizer(want).dequantize())
    assert tex.split_quantize(x, [], []) == []
    assert len(tex.multi_tensor_quantize([x, x[:2]], quantizers[:2])) == 2
    for sections in ([4, 1, 6], [4, -1, 3]):
        with pytest.raises(RuntimeError, match="do not fit"):
            tex.split_quantize(x, sections, quantizers)
    with pytest.raises(RuntimeError, match="expected 2 quantizers"):
        tex.split_quantize(x, [4, 1], quantizers)
    with pytest.raises(RuntimeError, match="1 tensors and 3"):
        tex.multi_tensor_quantize([x], quantizers)
    made = tex.create_empty_quantized_tensor(current(), [4, 32], torch.bfloat16, "cpu", False)
    assert made.shape == (4, 32)
    assert made.dtype is torch.bfloat16


def test_maxima_and_transposes():
    amax = torch.empty(1)
    tex.compute_amax(random(6, 8)[:, ::2], amax)
    assert amax.item() == random(6, 8)[:, ::2].abs().max().item()
    with pytest.raises(RuntimeError, match="one float32"):
        tex.compute_amax(random(6, 8), torch.empty(2))
    data = torch.arange(2 * 3 * 16).to(torch.uint8).view(2, 3, 16)
    want = data.permute(2, 0, 1)
    assert torch.equal(tex.fp8_transpose(data, E4M3), want)
    out = torch.zeros(16, 6, dtype=torch.uint8)
    assert tex.fp8_transpose(data, E5M2, out=out) is out
    assert torch.equal(out.view(16, 2, 3), want)
    assert tex.fp8_transpose(data[:0], E4M3).shape == (16, 0, 3)
    with pytest.raises(RuntimeError, match="bytes"):
        tex.fp8_transpose(random(4, 4), E4M3)
    x = random(3, 4, 5).requires_grad_()
    swapped = tex.swap_first_dims(x)
    assert swapped.is_contiguous()
    assert torch.equal(swapped, x.transpose(0, 1))
    assert not swapped.requires_grad
    out = torch.empty(4, 3, 5)
    assert tex.swap_first_dims(x, out=out) is out
    assert torch.equal(out, swapped)
    with pytest.raises(RuntimeError, match="two dimensions"):
        tex.swap_first_dims(random(3))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_update_of_scales(algorithm, margin):
    histories = [random(5, 6).abs(), random(5, 1).abs()]
    histories[0][:, 4] = 0
    scales = [random(6, seed=1).abs(), random(1, seed=2).abs()]
    reduced = torch.tensor([0.0, 3.0, torch.inf, torch.nan, 0.0, 1e-42, 2.0])
    wants = []
    flat = iter(reduced.tolist())
    for history, scale in zip(histories, scales, strict=True):
        for column in range(history.shape[1]):
            values, newest = history[:, column].tolist(), next(flat)
            newest = newest if newest != 0 else values[0]
            rolled, amax = values, 0.0
            if newest != 0:
                rolled = [0.0, *values[2:], newest]
                amax = max(0.0, *(one for one in (*values[1:], newest) if not math.isnan(one)))
            if algorithm == "most_recent":
                amax = newest
            made = scale[column].item()
            if math.isfinite(amax) and amax > 0:
                made = min(448 * 2.0**-margin / amax, torch.finfo(torch.float32).max)
            wants.append((rolled, made))
    tex.fused_amax_and_scale_update_after_reduction(
        reduced, histories, scales, algorithm, E4M3, margin
    )
    got = [column for history in histories for column in history.t()]
    for (rolled, made), history, scale in zip(wants, got, torch.cat(scales), strict=True):
        torch.testing.assert_close(history, torch.tensor(rolled), equal_nan=True)
        torch.testing.assert_close(scale, torch.tensor(made))
    with pytest.raises(RuntimeError, match="'max' or 'most_recent'"):
        tex.fused_amax_and_scale_update_after_reduction(reduced, histories, scales, "min", E4M3, 0)
    with pytest.raises(RuntimeError, match="do not fit"):
        tex.fused_amax_and_scale_update_after_reduction(
            reduced[1:], histories, scales, "max", E4M3, 0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [(0, 130 * 200), (77, 20000), (129 * 200 + 3, 130 * 200), (9, 9)])
def test_parts_of_matrices_with_block_scales(span, dtype):
    h, w = 130, 200
    whole = random(h, w, dtype=dtype)
    whole[0, 80], whole[1, 150] = torch.nan, -torch.inf
    part = whole.view(-1)[slice(*span)]
    inside = torch.zeros(h * w)
    inside[slice(*span)] = part.float()
    padded = F.pad(inside.view(h, w).nan_to_num(0.0, torch.inf, -torch.inf), (0, 56, 0, 126)).abs()
    want = padded.view(2, 128, 2, 128).amax((1, 3))
    amax = torch.full((3, 4), 9.0)
    tex.fp8_block_scaling_compute_partial_amax(part, amax, h, w, span[0], 128)
    assert torch.equal(amax[:2, :2], want)
    assert (amax[2:] == 9).all()
    assert (amax[:, 2:] == 9).all()
    scale = random(2, 2, seed=3).abs() * 200
    out = torch.zeros(part.numel(), dtype=torch.uint8)
    tex.fp8_block_scaling_partial_cast(part, out, scale, h, w, span[0], 128, E4M3)
    spread = scale.repeat_interleave(128, 0)[:h].repeat_interleave(128, 1)[:, :w]
    values = (whole.float() * spread).view(-1)[slice(*span)].clamp(-448, 448)
    want = values.to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(
        out.view(torch.float8_e4m3fn).float(), want, rtol=0, atol=0, equal_nan=True
    )
    with pytest.raises(RuntimeError, match="block_len"):
        tex.fp8_block_scaling_compute_partial_amax(part, amax, h, w, span[0], 64)
    with pytest.raises(RuntimeError, match="more blocks"):
        tex.fp8_block_scaling_compute_partial_amax(part, amax[:1], h, w, span[0], 128)
    with pytest.raises(RuntimeError, match="uint8"):
        tex.fp8_block_scaling_partial_cast(part, out.float(), scale, h, w, span[0], 128, E4M3)


FLAG = torch.zeros(1, dtype=torch.int32)


def adam_of(g, p, m, v, *, lr, betas, eps, step, decay, mode, corrects):
    g, p, m, v = (one.double() for one in (g, p, m, v))
    if mode == 0:
        g = g + decay * p
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    corrections = [1 - beta**step if corrects else 1.0 for beta in betas]
    update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps)
    if mode == 1:
        update = update + decay * p
    return p - lr * update, m, v


@pytest.mark.parametrize(
    ("kind", "corrects", "mode"),
    sampled(
        ["plain", "master", "bfloat16", "capturable", "capturable_master"],
        [0, 1],
        [0, 1],
        quick=every_pair,
    ),
)
def test_adam(kind, corrects, mode):
    low = torch.bfloat16 if kind in ("master", "bfloat16", "capturable_master") else torch.float32
    shapes = [(5, 7), (3,), (1, 1)]
    grads = [random(*shape, dtype=low) for shape in shapes]
    params = [random(*shape, dtype=low, seed=1) for shape in shapes]
    moments = [[random(*shape, seed=seed).abs() for shape in shapes] for seed in (2, 3)]
    lists = [grads, params, *moments]
    if "master" in kind:
        lists.append([param.float() + 1e-4 for param in params])
    mains = lists[-1] if "master" in kind else params
    numbers = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-3,
        "step": 3,
        "decay": 0.2,
        "mode": mode,
        "corrects": corrects,
    }
    inverse = 0.5 if "capturable" in kind else 1.0
    wants = [
        adam_of(inverse * g.double(), p, m, v, **numbers)
        for g, p, m, v in zip(grads, mains, *moments, strict=True)
    ]
    kept = [grad.clone() for grad in grads]
    arguments = [0.1, 0.9, 0.99, 1e-3, 3, mode, corrects, 0.2]
    name = "multi_tensor_adam"
    if "capturable" in kind:
        name += f"_{kind}"
        arguments[0], arguments[4] = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
        arguments.append(torch.tensor([inverse]))
        before = [[one.clone() for one in each] for each in lists]
        getattr(tex, name)(1, FLAG + 1, lists, *arguments)  # skipped
        for one, two in zip(chain(*lists), chain(*before), strict=True):
            assert torch.equal(one, two)
    getattr(tex, name)(1, FLAG, lists, *arguments)
    for at, (p, m, v) in enumerate(wants):
        close(mains[at], p, mains[at].dtype)
        close(lists[2][at], m, torch.float32)
        close(lists[3][at], v, torch.float32)
        assert torch.equal(grads[at], kept[at])
        assert torch.equal(params[at], mains[at].to(low))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.5)])
def test_sgd(momentum, dampening, first, nesterov):
    if nesterov and (momentum == 0.0 or dampening):
        pytest.skip("Nesterov's momentum has no dampening")
    shapes = [(5, 7), (3,)]
    grads = [random(*shape, dtype=torch.float16) for shape in shapes]
    params, buffers = ([random(*shape, seed=seed) for shape in shapes] for seed in (1, 2))
    copies = [torch.zeros(shape, dtype=torch.float16) for shape in shapes]
    wants = []
    for g, p, b in zip(grads, params, buffers, strict=True):
        g, p, b = 0.5 * g.double() + 0.1 * p.double(), p.double(), b.double()
        if momentum:
            b = g if first else momentum * b + (1 - dampening) * g
            g = g + momentum * b if nesterov else b
        wants.append((p - 0.3 * g, b))
    lists = [grads, params, buffers, copies]
    numbers = 0.1, momentum, dampening, 0.3, nesterov, first, False, 0.5
    before = [[one.clone() for one in each] for each in lists]
    tex.multi_tensor_sgd(1, FLAG + 1, lists, *numbers)  # skipped
    for one, two in zip(chain(*lists), chain(*before), strict=True):
        assert torch.equal(one, two)
    tex.multi_tensor_sgd(1, FLAG, lists, *numbers)
    for at, (p, b) in enumerate(wants):
        close(params[at], p, torch.float32)
        close(buffers[at], b, torch.float32)
        assert torch.equal(grads[at], before[0][at])
        assert torch.equal(copies[at], params[at].half())
    with pytest.raises(UnsupportedError, match="wd_after_momentum"):
        tex.multi_tensor_sgd(1, FLAG, lists, 0.1, 0.9, 0.0, 0.3, False, first, True, 1.0)


@pytest.mark.parametrize("strided", range(4))
def test_steps_of_strided_lists(strided):
    plain = [[random(5, 7, seed=seed).abs()] for seed in range(4)]
    lists = [[one.clone() for one in each] for each in plain]
    lists[strided] = [
        torch.stack([one, torch.ones_like(one)], -1)[..., 0] for one in plain[strided]
    ]
    for each in (plain, lists):
        tex.multi_tensor_adam(1, FLAG, each, 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
        tex.multi_tensor_sgd(1, FLAG, each[:3], 0.1, 0.9, 0.0, 0.3, False, False, False, 1.0)
    for one, two in zip(chain(*lists), chain(*plain), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("flat", range(5))
def test_steps_of_lists_of_other_shapes(flat):
    plain = [[random(5, 7, seed=seed).abs()] for seed in range(5)]
    lists = [[one.clone() for one in each] for each in plain]
    lists[flat] = [lists[flat][0].reshape(-1)]
    one, step = torch.ones(1), torch.ones(1, dtype=torch.int)
    for each in (plain, lists):
        tex.multi_tensor_adam(1, FLAG, each, 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
        numbers = one, 0.9, 0.9, 1e-8, step, 1, 1, 0.0, one
        tex.multi_tensor_adam_capturable_master(1, FLAG, each, *numbers)
        tex.multi_tensor_sgd(1, FLAG, each[:4], 0.1, 0.9, 0.0, 0.3, False, False, False, 1.0)
    for one, two in zip(chain(*lists), chain(*plain), strict=True):
        assert torch.equal(one, two.reshape(one.shape))


@pytest.mark.parametrize("pow2", [False, True])
def test_scales_of_maxima(pow2):
    maxima = [torch.tensor([0.0, 3.0, torch.inf, torch.nan]), torch.tensor([1e-3, 1e-42])]
    scales, inverse = ([torch.empty_like(one) for one in maxima] for _ in range(2))
    tex.multi_tensor_compute_scale_and_scale_inv(
        1, FLAG, [maxima, scales, inverse], 448.0, pow2, 0.0
    )
    for amax, scale, inv in zip(
        torch.cat(maxima).tolist(), torch.cat(scales), torch.cat(inverse), strict=True
    ):
        want = 448 / amax if math.isfinite(amax) and amax > 0 else 1.0
        want = min(want, torch.finfo(torch.float32).max)
        if pow2:
            want = 2.0 ** (math.frexp(want)[1] - 1)
        assert scale.item() == torch.tensor(want).item()
        assert inv.item() == (torch.tensor(1.0) / scale).item()


def test_errors_of_lists():
    x = [torch.ones(2)]
    with pytest.raises(RuntimeError, match="4 or 5 lists"):
        tex.multi_tensor_adam(1, FLAG, [x] * 3, 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
    with pytest.raises(RuntimeError, match="mode"):
        tex.multi_tensor_adam(1, FLAG, [x] * 4, 0.1, 0.9, 0.9, 1e-8, 1, 2, 1, 0.0)
    with pytest.raises(RuntimeError, match=r"\[1, 0, 1\]"):
        tex.multi_tensor_sgd(1, FLAG, [x, [], x], 0.1, 0.9, 0.0, 0.3, False, False, False, 1.0)
    y = [torch.ones(1)]
    with pytest.raises(RuntimeError, match=r"as many elements, got shapes \[\[1\], \[2\]"):
        tex.multi_tensor_adam(1, FLAG, [y, x, x, x], 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
    with pytest.raises(RuntimeError, match=r"as many elements, got shapes \[\[2\], \[2\], \[1\]"):
        tex.multi_tensor_sgd(1, FLAG, [x, x, y], 0.1, 0.9, 0.0, 0.3, False, False, False, 1.0)
    with pytest.raises(tex.errors.ExtensionError, match="noop_flag must be a torch.Tensor"):
        tex.multi_tensor_sgd(1, None, [x] * 3, 0.1, 0.9, 0.0, 0.3, False, False, False, 1.0)
    numbers = 0.1, 0.9, 0.9, 1e-8, FLAG, 1, 1, 0.0, torch.ones(1)
    with pytest.raises(tex.errors.ExtensionError, match="lr must be a torch.Tensor"):
        tex.multi_tensor_adam_capturable(1, FLAG, [x] * 4, *numbers)
    with pytest.raises(tex.errors.ExtensionError, match="must be a list of lists of tensors"):
        tex.multi_tensor_adam(1, FLAG, x[0], 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
    tex.multi_tensor_adam(1, FLAG, [[]] * 4, 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
    tex.multi_tensor_sgd(1, FLAG, [[]] * 3, 0.1, 0.9, 0.0, 0.3, False, False, False, 1.0)


ONES = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gelu", (None, None)),
        ("dswiglu", (ONES, None, None)),
        ("dbias_dgelu", (ONES, [1.0], None)),
        ("scaled_swiglu", (ONES, None, None)),
        ("rmsnorm_bwd", (ONES, ONES, None, ONES[0], 0, False)),
        ("layernorm_bwd", (ONES, ONES, None, ONES[:, 0], ONES[0], 0, False)),
        ("compute_amax", (None, ONES[0, :1])),
        ("swap_first_dims", ([1.0],)),
        ("thd_get_partitioned_indices", ([0, 4], 4, 2, 0)),
    ],
)
def test_arguments_that_are_no_tensors_are_named(name, arguments):
    with pytest.raises(TypeError, match=f"{name}: .* must be a torch.Tensor") as raised:
        getattr(tex, name)(*arguments)
    assert isinstance(raised.value, TeFastError)


FP8 = tex.DType.kFloat8E4M3
NUMBER = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("dgelu", (3, ONES, None), "grad must be a torch.Tensor"),
        ("dbias_dgelu", (NUMBER, NUMBER, None), "grad must be a dense tensor of one dimension"),
        ("gelu", (ONES.to_sparse(), None), "input must be a dense tensor"),
        ("rmsnorm_fwd", (3, ONES[0], 1e-6, None, None, tex.DType.kFloat32, 0, False), "input must"),
        ("rmsnorm_fwd", (ONES, ONES[0], "a", None, None, 4, 0, False), "eps must be a number"),
        ("layernorm_fwd", (ONES, ONES[0], 3, 0.0, None, None, 4, 0, False), "bias must be"),
        ("rmsnorm_bwd", (NUMBER, ONES, NUMBER, ONES[0], 0, False), "dz must be a dense tensor"),
        ("rmsnorm_bwd", (ONES, ONES, ONES[:, 0], ONES[0], 0, ONES), "zero_centered_gamma must be"),
        ("bgrad_quantize", (None, None), "input must be a torch.Tensor"),
        ("multi_tensor_quantize", (None, None), "tensor_list must be a list"),
        ("split_quantize", ("x", [1], [None]), "tensor must be a torch.Tensor"),
        ("split_quantize", (ONES, None, None), "split_sections must be a list"),
        ("split_quantize", (ONES, ["x"], [None]), "sections .* do not fit"),
        ("swap_first_dims", (ONES.to_sparse(),), "tensor must be a dense tensor"),
        ("fp8_block_scaling_compute_partial_amax", (ONES, ONES, ONES, 2, 0, 128), "h must be"),
        ("fp8_block_scaling_partial_cast", (ONES, 3, ONES, 2, 4, 0, 128, FP8), "out must be"),
        ("fused_rope_forward", (ONES, ONES, None, [], False, None, 1, 0), "qkv_format must be"),
        ("fused_rope_backward", (True, ONES, None, 0, False, None, 1, 0), "output_grads must be"),
        ("fused_rope_backward", (ONES, ONES, None, 0, False, None, ONES, 0), "cp_size must be"),
        (
            "fused_amax_and_scale_update_after_reduction",
            (None, [ONES], [ONES], "max", FP8, 0),
            "amax_reduction_buffer must be a torch.Tensor",
        ),
        (
            "thd_second_half_lse_correction",
            (ONES, NUMBER, torch.tensor([0, 4]).int(), True),
            "lse_per_step must be a dense tensor",
        ),
    ],
)
def test_arguments_that_functions_cannot_read_are_named(name, arguments, match):
    with pytest.raises(TypeError, match=f"{name}: {match}") as raised:
        getattr(tex, name)(*arguments)
    assert isinstance(raised.value, TeFastError)


def test_queries():
    assert tex.get_num_cublas_streams() == 1
    assert tex.device_supports_multicast() is False
    assert tex.ubuf_built_with_mpi() is False
    assert tex.nvte_built_with_cublasmp() is False
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no GPU"):
            tex.get_stream_priority_range()
    if torch.backends.cudnn.is_available():
        assert tex.get_cudnn_version() == torch.backends.cudnn.version()
    else:
        with pytest.raises(RuntimeError, match="torch for CUDA"):
            tex.get_cudnn_version()
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="torch for CUDA"):
            tex.get_cublasLt_version()
    else:
        assert str(tex.get_cublasLt_version()).startswith(torch.version.cuda.partition(".")[0])
    meta = tex.FP8TensorMeta()
    assert meta.scale is meta.scale_inv is meta.amax_history is None
    assert tex.FP8FwdTensors.GEMM2_WEIGHT == 4
    assert tex.FP8BwdTensors.GRAD_INPUT3 == 5
    assert tex.DType is te.DType
    assert tex.DType.kFloat8E4M3 == 7


def test_what_is_missing_says_so():
    assert not NAMES & set(tex.__all__)
    assert len(NAMES) > 80
    for module in (tex, te.cpp_extensions):
        for name in (
            "fused_attn_fwd",
            "CommOverlapP2P",
            "nvfp4_2d_partial_cast",
            "init_nvshmem_backend",
        ):
            assert not hasattr(module, name)
            with pytest.raises(
                MissingError, match=f"{name} is not there yet; keep Transformer Engine's"
            ):
                getattr(module, name)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            module.nothing  # noqa: B018
    assert set(tex.__all__) < set(te.cpp_extensions.__all__)
