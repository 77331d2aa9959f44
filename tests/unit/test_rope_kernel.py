"""The rotation's kernel on the host: bits of the formula, forward and backward, one launch each."""

from __future__ import annotations

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from attention_reference import rotate_exactly
from rope_cases import DTYPES, SIZES, check, check_unrotated, randoms, same
from selection import sampled
from te_fast.attention.rope import Heads, _waves, split_rotated
from te_fast.errors import ShapeError
from te_fast.pytorch.attention.rope import apply_rotary_pos_emb
from te_fast.runtime.compiling import CAN_COMPILE


@pytest.mark.parametrize(
    ("heads", "width", "dtype", "interleaved", "in_place"),
    sampled([pytest.param(*case) for case in SIZES], DTYPES, [False, True], [False, True]),
)
def test_the_product_of_queries_keys_and_values(heads, width, dtype, interleaved, in_place):
    for grouped in (False, True):
        own = heads._replace(is_grouped=grouped)
        for rows, fmt in (((5, 3), "sbhd"), ((2, 4), "bshd"), ((0, 3), "sbhd"), ((1, 1), "bshd")):
            check(
                own, width, rows, dtype, "cpu", interleaved=interleaved, in_place=in_place, fmt=fmt
            )


@pytest.mark.parametrize("heads", [heads for heads, _ in SIZES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_without_angles(heads, dtype):
    for grouped in (False, True):
        own = heads._replace(is_grouped=grouped)
        for rows, order in (((5, 3), (1, 2, 0, 3)), ((2, 4), (0, 2, 1, 3)), ((0, 3), (1, 2, 0, 3))):
            check_unrotated(own, rows, dtype, "cpu", order)


def test_heads_that_do_not_fit_the_product_are_told_so():
    packed = torch.randn(3, 2, 48)
    for heads, match in (
        (Heads(2, 2, 6), "contiguous rows of 36 columns"),
        (Heads(3, 2, 8), "a multiple of the groups"),
        (Heads(2, 0, 8), "a multiple of the groups"),
    ):
        with pytest.raises(ShapeError, match=match):
            split_rotated(packed, None, heads, in_place=True)
    with pytest.raises(ShapeError, match="all dimensions, each once"):
        split_rotated(packed, None, Heads(2, 2, 8), in_place=True, order=(0, 0, 1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(4, 2, 16, is_grouped=True)])
def test_packed_sequences(dtype, heads):
    packed = randoms(7, heads.columns, dtype=dtype, device="cpu").requires_grad_()
    angles = torch.randn(7, 1, 16)
    waves = _waves(angles, False)
    outs = split_rotated(packed * 1, (waves, waves), heads, interleaved=False, in_place=True)
    kept = heads.split(packed.detach())
    for out, part in zip(outs[:2], kept[:2], strict=True):
        assert same(out, rotate_exactly(part, angles, False))
    assert same(outs[2], kept[2])
    grads = [randoms(*out.shape, dtype=dtype, device="cpu", seed=3) for out in outs]
    (got,) = torch.autograd.grad(outs, packed, grads)
    for part, grad in zip(heads.split(got)[:2], grads[:2], strict=True):
        assert same(part, rotate_exactly(grad, angles, False, back=True))
    assert same(heads.split(got)[2], grads[2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_heads_by_themselves(interleaved, dtype):
    freqs = torch.randn(9, 1, 1, 12)
    whole = randoms(9, 2, 3, 40, dtype=dtype, device="cpu")
    for t in (whole[..., :16], whole[..., 3:27], whole[::2][..., ::2], whole.transpose(1, 2)):
        own = t.detach().requires_grad_()
        out = apply_rotary_pos_emb(own, freqs, "sbhd", interleaved=interleaved, fused=True)
        placed = freqs[: t.shape[0]]
        assert same(out, rotate_exactly(t, placed, interleaved))
        grad = randoms(1, *t.shape[1:], dtype=dtype, device="cpu", seed=5).expand(t.shape)
        (got,) = torch.autograd.grad(out, own, grad)
        assert same(got, rotate_exactly(grad, placed, interleaved, back=True))


def test_gradients_of_gradients():
    heads = Heads(2, 1, 4)
    packed = torch.randn(3, 2, heads.columns, requires_grad=True)
    angles = torch.randn(3, 1, 1, 4)
    waves = _waves(angles, False)

    def loss(x):
        q, k, v = split_rotated(x * 1, (waves, waves), heads, interleaved=False, in_place=True)
        return (q.sin().sum(), k.pow(3).sum(), v.square().sum())

    def known(x):
        q, k, v = heads.split(x.double())
        turned = [
            t[..., :2] * a.cos()[..., :2] - t[..., 2:] * a.sin()[..., :2]
            for t, a in ((q, angles.double()), (k, angles.double()))
        ]
        rest = [
            t[..., 2:] * a.cos()[..., 2:] + t[..., :2] * a.sin()[..., 2:]
            for t, a in ((q, angles.double()), (k, angles.double()))
        ]
        q, k = (torch.cat(pair, -1) for pair in zip(turned, rest, strict=True))
        return (q.sin().sum(), k.pow(3).sum(), v.square().sum())

    seconds = []
    for function in (loss, known):
        (first,) = torch.autograd.grad(sum(function(packed)), packed, create_graph=True)
        (second,) = torch.autograd.grad(first.cos().sum(), packed)
        seconds.append(second)
    assert torch.allclose(*seconds, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("interleaved_weights", [False, True])
def test_a_layer_rotates_in_one_launch_either_way(groups, interleaved_weights):
    layer = te.MultiheadAttention(
        64,
        4,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        bias=False,
        qkv_weight_interleaved=interleaved_weights,
        device="cpu",
    )
    x = torch.randn(8, 2, 64, requires_grad=True)
    freqs = te.RotaryPositionEmbedding(16)(8).cpu()
    with te_fast.dispatch.record() as launches:
        y = layer(x, rotary_pos_emb=freqs)
    assert [launch.name for launch in launches if "rotate" in launch.name] == ["rotate_f32"]
    y = layer(x, rotary_pos_emb=freqs)
    with torch.profiler.profile() as profile, te_fast.dispatch.record() as launches:
        y.sum().backward()
    assert [launch.name for launch in launches if "rotate" in launch.name] == ["rotate_f32"]
    names = {event.key for event in profile.key_averages()}
    assert "aten::cat" not in names


@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
def test_a_layer_without_angles_copies_nothing_forward_and_once_backward(fmt):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False, "device": "cpu"}
    layer = te.TransformerLayer(
        64,
        64,
        4,
        qkv_weight_interleaved=False,
        attn_input_format=fmt,
        fuse_qkv_params=True,
        **options,
    )
    x = torch.randn(8, 2, 64, requires_grad=True)
    with te_fast.dispatch.record() as launches:
        y = layer(x)
    assert not [launch.name for launch in launches if "rotate" in launch.name]
    with torch.profiler.profile() as profile, te_fast.dispatch.record() as launches:
        y.sum().backward()
    assert [launch.name for launch in launches if "rotate" in launch.name] == ["rotate_f32"]
    names = {event.key for event in profile.key_averages()}
    assert "aten::cat" not in names


def test_a_hook_sees_the_product_as_it_was():
    torch.manual_seed(3)
    options = {"attention_dropout": 0.0, "fuse_qkv_params": True, "device": "cpu"}
    layer = te.MultiheadAttention(32, 2, qkv_weight_interleaved=False, **options)
    x = torch.randn(4, 1, 32)
    freqs = te.RotaryPositionEmbedding(16)(4).cpu()
    plain = layer(x, rotary_pos_emb=freqs)
    seen = []
    layer.qkv.register_forward_hook(lambda _module, _given, out: seen.append((out, out.clone())))
    assert torch.equal(layer(x, rotary_pos_emb=freqs), plain)
    [(kept, then)] = seen
    assert torch.equal(kept, then)


def test_angles_that_do_not_fit_are_told_so():
    heads, packed = Heads(2, 2, 8), torch.randn(3, 2, 48)
    for shape, match in (
        ((3, 1, 1, 10), "at most 8 channels"),
        ((4, 1, 1, 8), r"for \[3, 2\] rows"),
        ((3, 1, 2, 8), "cosines and sines"),
    ):
        wave = torch.zeros(shape)
        with pytest.raises(ShapeError, match=match):
            split_rotated(
                packed, ((wave, wave), (wave, wave)), heads, interleaved=False, in_place=False
            )


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
@pytest.mark.parametrize(("heads", "width"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_graph_holds_the_kernel(heads, width, dtype, interleaved):
    """Compiled, the product takes one launch either way, and gives the bits of the eager one."""
    of_q, of_k = (_waves(torch.randn(1, 5, 1, width), interleaved) for _ in range(2))
    options = {"interleaved": interleaved, "in_place": True, "order": (0, 2, 1, 3)}

    def split(packed):
        return split_rotated(packed * 1, (of_q, of_k), heads, **options)

    compiled = torch.compile(split, fullgraph=True, backend="aot_eager", dynamic=False)
    for rows in (2, 0):
        x = randoms(rows, 5, heads.columns, dtype=dtype, device="cpu")
        results = []
        for function in (split, compiled):
            leaf = x.clone().requires_grad_()
            with te_fast.dispatch.record() as forward:
                outs = function(leaf)
            torch.manual_seed(0)
            grads = [torch.randn(out.shape, dtype=dtype) for out in outs]
            with te_fast.dispatch.record() as backward:
                torch.autograd.backward(outs, grads)
            names = [[launch.name for launch in noted] for noted in (forward, backward)]
            results.append((*outs, leaf.grad, names))
        for one, other in zip(*(result[:4] for result in results), strict=True):
            same(one, other)
        assert results[0][4] == results[1][4]
        assert all(len(noted) <= 1 for noted in results[1][4])
    torch.compiler.reset()
