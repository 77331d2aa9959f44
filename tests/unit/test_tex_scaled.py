"""Activations with factors, and rotary embeddings, under the names of Transformer Engine's extension."""

import pytest
import torch
import torch.nn.functional as F

import te_fast.pytorch as te
from selection import every_pair, sampled
from te_fast import tex

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def close(got, want, dtype):
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def swiglu(first, second):
    return F.silu(first) * second


def clamped(first, second):
    first, second = first.clamp(max=7.0), second.clamp(-7.0, 7.0)
    return first * torch.sigmoid(1.702 * first) * (second + 1.0)


def situ(first, second):
    return 4 * torch.tanh(first / 4) * torch.sigmoid(first) * 25 * torch.tanh(second / 25)


CASES = {
    "swiglu": (swiglu, tex.scaled_swiglu, tex.scaled_dswiglu),
    "clamped": (clamped, tex.scaled_clamped_swiglu, tex.scaled_clamped_dswiglu),
    "situ": (situ, tex.scaled_situglu, tex.scaled_dsituglu),
}


def halves(x, interleave):
    if not interleave:
        return x.chunk(2, -1)
    blocks = x.unflatten(-1, (-1, 2, interleave))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


@pytest.mark.parametrize(
    ("name", "shape", "interleave", "dtype"),
    sampled(list(CASES), [(6, 64), (2, 3, 32), (0, 32)], [0, 8], DTYPES, quick=every_pair),
)
def test_gated_functions(name, shape, interleave, dtype):
    formula, forward, backward = CASES[name]
    x, factors = 3 * random(*shape, dtype=dtype), random(*shape[:-1], seed=1)
    at, by = x.double().requires_grad_(), factors.double().requires_grad_()
    want = formula(*halves(at, interleave)) * by[..., None]
    dy = random(*want.shape, dtype=dtype, seed=2)
    grads = torch.autograd.grad(want, (at, by), dy.double())
    got = forward(x.requires_grad_(), factors, None, glu_interleave_size=interleave)
    assert not got.requires_grad
    close(got, want.detach(), dtype)
    dx, dfactors = backward(dy, x, factors, None, glu_interleave_size=interleave)
    close(dx, grads[0], dtype)
    assert dfactors.shape == factors.shape
    torch.testing.assert_close(dfactors.double(), grads[1], atol=0.05, rtol=0.02)
    options = {"glu_interleave_size": interleave, "compute_scale_grad": False}
    again, none = backward(dy, x, factors, None, **options)
    assert none is None
    assert torch.equal(again, dx)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_relu(dtype):
    x, factors, dy = (
        random(6, 32, dtype=dtype),
        random(6, seed=1),
        random(6, 32, dtype=dtype, seed=2),
    )
    at, by = x.double().requires_grad_(), factors.double().requires_grad_()
    want = F.relu(at) ** 2 * by[:, None]
    grads = torch.autograd.grad(want, (at, by), dy.double())
    close(tex.scaled_srelu(x, factors, None), want.detach(), dtype)
    dx, dfactors = tex.scaled_dsrelu(dy, x, factors, None)
    close(dx, grads[0], dtype)
    torch.testing.assert_close(dfactors.double(), grads[1], atol=0.05, rtol=0.02)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    made = tex.scaled_srelu(x, factors, quantizer)
    assert torch.equal(made._data, quantizer(tex.scaled_srelu(x, factors, None))._data)
    with pytest.raises(RuntimeError, match="one factor for each row"):
        tex.scaled_srelu(x, factors[:5], None)


def rotated(x, angles, interleaved):
    """Rotate ``(tokens, ..., d)`` by angles ``(tokens, d_rot)``."""
    width = angles.shape[-1]
    angles = angles.view(angles.shape[0], *[1] * (x.dim() - 2), width)
    part, rest = x[..., :width], x[..., width:]
    if interleaved:
        turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), -1)
    return torch.cat((part * angles.cos() + turned * angles.sin(), rest), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["NVTE_SBHD", "NVTE_BSHD", "NVTE_THD"])
def test_rotary_embeddings(form, interleaved, dtype):
    angles = 3 * random(12, 8, seed=4)
    freqs, bounds = angles.view(12, 1, 1, 8), None
    x = random(10, 2, 3, 16, dtype=dtype) if form != "NVTE_THD" else random(10, 3, 16, dtype=dtype)
    at = x.double().requires_grad_()
    if form == "NVTE_THD":
        bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
        positions = torch.cat((torch.arange(4), torch.arange(6)))
        want = rotated(at, angles[positions].double(), interleaved)
    else:
        want = rotated(at, angles[:10].double(), interleaved)
    dy = random(*x.shape, dtype=dtype, seed=5)
    (grad,) = torch.autograd.grad(want, at, dy.double())
    if form == "NVTE_BSHD":
        x, dy, want, grad = (one.transpose(0, 1) for one in (x, dy, want, grad))
    tail = freqs, None, tex.NVTE_QKV_Format[form], interleaved, bounds, 1, 0
    got = tex.fused_rope_forward(x.clone().requires_grad_(), *tail)
    assert not got.requires_grad
    close(got, want.detach(), dtype)
    close(tex.fused_rope_backward(dy, *tail), grad, dtype)
    with pytest.raises(RuntimeError, match="NVTE_SBHD, NVTE_BSHD, NVTE_THD"):
        tex.fused_rope_forward(
            x, freqs, None, tex.NVTE_QKV_Format.NVTE_BHSD, interleaved, None, 1, 0
        )
