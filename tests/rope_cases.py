"""Cases of the rotation's kernel, on any device: products of queries, keys and values, and the expected results."""

from __future__ import annotations

import torch

from attention_reference import rotate_exactly
from te_fast.attention.rope import Heads, split_rotated, waves_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Heads, and channels that turn: whole and in part, with and without 16-byte vectors, one head, many heads.
SIZES = [
    (Heads(2, 2, 32), 32),
    (Heads(4, 2, 32), 16),
    (Heads(9, 3, 64), 32),
    (Heads(1, 1, 6), 2),
    (Heads(3, 1, 10), 8),
    (Heads(12, 4, 16), 16),
]
SPECIAL = [0.0, -0.0, 1e-40, -6e-8, 65504.0, float("inf"), float("-inf"), float("nan"), 3e38]


def randoms(*shape, dtype, device, seed=0):
    """Numbers of many magnitudes, edge values among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp2()
    flat = x.view(-1)
    count = min(flat.numel(), len(SPECIAL))
    if count:
        flat[:: max(1, flat.numel() // count)][:count] = torch.tensor(SPECIAL[:count])
    return x.to(dtype).to(device)


def are_views(heads):
    """Whether the heads of queries lie at one distance in the product."""
    return not heads.is_grouped or heads.per_group == 1


def check(heads, width, rows, dtype, device, *, interleaved, in_place, fmt="sbhd"):
    """Run forward and backward in one shape; the bits must be the formula's."""
    packed = randoms(*rows, heads.columns, dtype=dtype, device=device).requires_grad_()
    freqs = [torch.randn(rows[fmt == "bshd"], 1, 1, width) * 3 for _ in range(2)]
    places = [f.transpose(0, 1) if fmt == "bshd" else f for f in freqs]
    # Cosines of the host, on any device: a GPU's differ in their last bits.
    waves = [
        tuple(wave.to(device) for wave in waves_of(f, packed.shape, fmt, interleaved=interleaved))
        for f in freqs
    ]
    given = packed * 1  # a product that nothing else reads
    before = packed.detach().cpu()
    outs = split_rotated(given, tuple(waves), heads, interleaved=interleaved, in_place=in_place)
    kept = heads.split(before)
    wanted = [rotate_exactly(t, f, interleaved) for t, f in zip(kept, places, strict=False)]
    for name, out, known in zip("qkv", outs, [*wanted, kept[2]], strict=True):
        assert out.dtype == dtype
        assert same(out, known), name
    if not in_place:
        assert same(given, before)
    shares = outs[0].untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    if given.numel():
        assert shares == (in_place and are_views(heads))
    # Gradients as attention gives them: heads before rows.
    grads = [
        randoms(*out.transpose(-3, -2).shape, dtype=dtype, device=device, seed=index).transpose(
            -3, -2
        )
        for index, out in enumerate(outs, 1)
    ]
    (got,) = torch.autograd.grad(outs, packed, grads)
    of_q, of_k, of_v = (grad.cpu() for grad in grads)
    of_q, of_k = (
        rotate_exactly(t, f, interleaved, back=True)
        for t, f in zip((of_q, of_k), places, strict=True)
    )
    for name, part, known in zip("qkv", heads.split(got.cpu()), (of_q, of_k, of_v), strict=True):
        assert same(part, known), name


def check_unrotated(heads, rows, dtype, device, order):
    """Run forward and backward without angles; values and gradients must be those of torch's views, bit for bit."""
    packed = randoms(*rows, heads.columns, dtype=dtype, device=device).requires_grad_()
    given = packed * 1
    outs = split_rotated(given, None, heads, in_place=True, order=order)
    parts = [part.permute(order) for part in heads.split(packed.detach())]
    for name, out, known in zip("qkv", outs, parts, strict=True):
        assert out.dtype == dtype
        assert same(out, known), name
    if given.numel():
        shares = outs[2].untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        assert shares == are_views(heads)
    grads = [
        randoms(*out.shape, dtype=dtype, device=device, seed=index)
        for index, out in enumerate(outs, 1)
    ]
    grads[1] = grads[1].transpose(-1, -2).contiguous().transpose(-1, -2)  # channels apart
    (got,) = torch.autograd.grad(outs, packed, grads)
    twin = packed.detach().clone().requires_grad_()
    parts = [part.permute(order) for part in heads.split(twin)]
    (known,) = torch.autograd.grad(parts, twin, grads)
    assert same(got, known)


def same(a, b):
    """Whether the bits are equal; all NaN count as equal."""
    a, b = a.detach().cpu(), b.detach().cpu()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
