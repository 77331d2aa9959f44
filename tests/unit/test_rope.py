"""Rotary position embeddings against complex numbers in FP64, with gradients."""

from __future__ import annotations

import pytest
import torch

import te_fast.pytorch as te
from attention_reference import F64, rotate
from selection import every_pair, sampled
from te_fast.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from te_fast.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from te_fast.runtime.compiling import CAN_COMPILE

compiles = pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")

S, B, H, D = 6, 3, 2, 8
STARTS = torch.tensor([0, 4, 7])
PACKED = {"tensor_format": "thd", "cu_seqlens": torch.tensor([0, 2, 4, 6])}


def angles(positions=16, dim=D, **options):
    return te.RotaryPositionEmbedding(dim, **options)(positions).cpu()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 3])
def test_angles(interleaved, offset):
    found = te.RotaryPositionEmbedding(D, rotary_base=100.0, interleaved=interleaved)(5, offset)
    assert (found.shape, found.dtype) == ((5, 1, 1, D), torch.float32)
    for position in range(5):
        for pair in range(D // 2):
            angle = (position + offset) / 100.0 ** (2 * pair / D)
            channels = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + D // 2)
            for channel in channels:
                assert abs(found[position, 0, 0, channel].item() - angle) < 1e-5


@pytest.mark.parametrize("interleaved", [0, 1, None])
def test_pairs_are_chosen_by_the_truth_of_an_option(interleaved):
    t, of_one = torch.randn(S, B, H, D), [D, D, D]
    for fused in (False, True):
        found, expected = (
            apply_rotary_pos_emb(t, angles(), interleaved=given, fused=fused)
            for given in (interleaved, bool(interleaved))
        )
        assert torch.equal(found, expected)
    packed = torch.randn(S, B, H, 3 * D)
    all_found, all_expected = (
        apply_fused_qkv_rotary_pos_emb(packed, angles(), angles(), of_one, interleaved=given)
        for given in (interleaved, bool(interleaved))
    )
    assert all(map(torch.equal, all_found, all_expected))


@pytest.mark.parametrize("wrong", [None, "half", [0.5], torch.ones(2)])
@pytest.mark.parametrize("name", ["rotary_percent", "rotary_base"])
def test_numbers_of_angles_that_are_none(name, wrong):
    with pytest.raises(DtypeError, match=f"RotaryPositionEmbedding: {name} must be a number"):
        te.RotaryPositionEmbedding(D, **{name: wrong})


def test_share_of_channels_and_interpolation():
    assert angles(dim=D, rotary_percent=0.5).shape == (16, 1, 1, 4)
    options = {"seq_len_interpolation_factor": 4, "pretrained_max_position_embeddings": 8}
    assert torch.allclose(angles(16, **options), angles(16) / 4)
    assert torch.allclose(angles(64, **options), angles(64) / 8)
    assert list(te.RotaryPositionEmbedding(D).state_dict()) == ["inv_freq"]


def positions_of(fmt, starts, ends):
    """Position of every token, in a shape that broadcasts to heads."""
    if fmt == "thd":
        parts = [
            torch.arange(b - a) + s for a, b, s in zip(ends[:-1], ends[1:], starts, strict=True)
        ]
        return torch.cat(parts)[:, None]
    grid = torch.arange(S)[None, :] + torch.tensor(starts)[:, None]
    return grid[..., None] if fmt == "bshd" else grid.T[..., None]


@pytest.mark.parametrize(
    ("fmt", "interleaved", "starts", "width", "fused"),
    sampled(
        ["sbhd", "bshd", "thd"],
        [False, True],
        [None, [0, 4, 7]],
        [D, 4],
        [False, True],
        quick=every_pair,
    ),
)
def test_rotation(fmt, interleaved, starts, width, fused):
    shape = {"sbhd": (S, B, H, D), "bshd": (B, S, H, D), "thd": (7, H, D)}[fmt]
    t = torch.randn(shape, dtype=F64, requires_grad=True)
    freqs = angles(dim=width, interleaved=interleaved)
    ends = [0, 4, 4, 7]
    options = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)} if fmt == "thd" else {}
    begin = None if starts is None else torch.tensor(starts)
    out = apply_rotary_pos_emb(t, freqs, fmt, begin, interleaved, fused, **options)
    places = positions_of(fmt, starts or [0, 0, 0], ends)
    wanted = rotate(t, freqs[places, 0, 0].double(), interleaved)
    assert torch.allclose(out, wanted, atol=1e-6)
    grad = torch.randn_like(t)
    (got,) = torch.autograd.grad(out, t, grad)
    (known,) = torch.autograd.grad(wanted, t, grad)
    assert torch.allclose(got, known, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_rounds_once(dtype):
    t, freqs = torch.randn(S, B, H, D).to(dtype), angles()
    wanted = rotate(t.double(), freqs[:S].double(), False)
    out = apply_rotary_pos_emb(t, freqs, fused=True)
    assert out.dtype == dtype
    assert ((out.double() - wanted).abs() <= wanted.abs() * torch.finfo(dtype).eps / 2 + 1e-6).all()


@pytest.mark.parametrize(("interleaved", "width"), sampled([False, True], [D, 4]))
def test_transforms_of_functions_rotate_too(interleaved, width):
    freqs = angles(dim=width, interleaved=interleaved)

    def scaled(t):
        return apply_rotary_pos_emb(t, freqs, fused=True, interleaved=interleaved).pow(3)

    t = torch.randn(2, S, B, H, D, requires_grad=True)
    wanted = torch.stack([scaled(one) for one in t])
    assert torch.equal(torch.func.vmap(scaled)(t), wanted)
    (grad,) = torch.autograd.grad(wanted.sum(), t)
    got = torch.func.vmap(torch.func.grad(lambda one: scaled(one).sum()))(t.detach())
    assert torch.allclose(got, grad, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("alike", "joined"), sampled([True, False], [True, False]))
def test_transforms_of_attention_that_rotates(alike, joined):
    options = {"fuse_qkv_params": joined, "device": "cpu"}
    layer = te.MultiheadAttention(H * D, H, attention_dropout=0.0, **options)
    given = angles() if alike else (angles(), angles().clone())
    x = torch.randn(2, S, B, H * D)
    wanted = torch.stack([layer(one, rotary_pos_emb=given) for one in x])
    got = torch.func.vmap(lambda one: layer(one, rotary_pos_emb=given))(x)
    assert torch.allclose(got, wanted, atol=1e-6)


def test_waves_follow_angles_that_change():
    t, freqs = torch.randn(S, B, H, D), angles()
    first = apply_rotary_pos_emb(t, freqs, fused=True)
    assert torch.equal(apply_rotary_pos_emb(t, freqs, fused=True), first)
    freqs.mul_(2)
    second = apply_rotary_pos_emb(t, freqs, fused=True)
    assert torch.allclose(second.double(), rotate(t.double(), freqs[:S].double(), False), atol=1e-5)
    last = angles(rotary_base=30.0)
    with torch.inference_mode():
        inside = apply_rotary_pos_emb(t, freqs * 1, fused=True)
        apply_rotary_pos_emb(t, last, fused=True)
    apply_rotary_pos_emb(t.clone().requires_grad_(), last, fused=True).sum().backward()
    again = apply_rotary_pos_emb(t.requires_grad_(), freqs, fused=True)
    again.sum().backward()
    assert torch.equal(inside, second)
    assert torch.equal(again, second)


@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_of_the_product_of_queries_keys_and_values(fmt, interleaved):
    shape = (S, B) if fmt == "sbhd" else (B, S)
    qkv = torch.randn(*shape, 2, 4 * D)
    of_q, of_k = angles(interleaved=interleaved), angles(interleaved=interleaved, rotary_base=50.0)
    options = {"tensor_format": fmt, "interleaved": interleaved}
    q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, of_q, of_k, [2 * D, D, D], **options)
    wanted_q = qkv[..., : 2 * D].reshape(*shape, 4, D)
    wanted_k = qkv[..., 2 * D : 3 * D]
    assert torch.equal(q, apply_rotary_pos_emb(wanted_q, of_q, fused=True, **options))
    assert torch.equal(k, apply_rotary_pos_emb(wanted_k, of_k, fused=True, **options))
    assert torch.equal(v, qkv[..., 3 * D :])


def chunks_of(t, ranks, rank, dim):
    """The two chunks of a rank."""
    chunks = t.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
def test_ranks_that_share_sequences_have_the_angles_of_their_tokens(fmt, ranks, fused, starts):
    dim, of_t = fmt.index("s"), angles(30)
    whole = torch.randn(24, 2, H, D) if fmt == "sbhd" else torch.randn(2, 24, H, D)
    grad = torch.randn_like(whole)
    start = torch.tensor([0, 5]) if starts else None
    options = {"tensor_format": fmt, "fused": fused, "start_positions": start}
    leaf = whole.clone().requires_grad_()
    y = apply_rotary_pos_emb(leaf, of_t, **options)
    y.backward(grad)
    for rank in range(ranks):
        part = chunks_of(whole, ranks, rank, dim).requires_grad_()
        out = apply_rotary_pos_emb(part, of_t, cp_size=ranks, cp_rank=rank, **options)
        assert torch.equal(out, chunks_of(y, ranks, rank, dim))
        out.backward(chunks_of(grad, ranks, rank, dim))
        assert torch.equal(part.grad, chunks_of(leaf.grad, ranks, rank, dim))


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_that_share_packed_sequences(fused, starts):
    lengths, ranks, of_t = [8, 0, 16, 4], 2, angles(24)
    start = torch.tensor([3, 1, 0, 7]) if starts else None
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    whole = torch.randn(sum(lengths), H, D)
    options = {"tensor_format": "thd", "fused": fused, "cu_seqlens": ends}
    options["start_positions"] = start
    y = apply_rotary_pos_emb(whole, of_t, **options)
    for rank in range(ranks):
        part, wanted = (
            torch.cat([chunks_of(t, ranks, rank, 0) for t in tensor.split(lengths) if len(t)])
            for tensor in (whole, y)
        )
        out = apply_rotary_pos_emb(part, of_t, cp_size=ranks, cp_rank=rank, **options)
        assert torch.equal(out, wanted)


def test_ranks_that_share_the_product_of_queries_keys_and_values():
    of_t, qkv = angles(24), torch.randn(24, B, 2, 3 * D)
    whole = apply_fused_qkv_rotary_pos_emb(qkv, of_t, of_t, [D, D, D])
    for rank in range(2):
        part = chunks_of(qkv, 2, rank, 0)
        found = apply_fused_qkv_rotary_pos_emb(part, of_t, of_t, [D, D, D], cp_size=2, cp_rank=rank)
        for out, wanted in zip(found, whole, strict=True):
            assert torch.equal(out, chunks_of(wanted, 2, rank, 0))


@compiles
@pytest.mark.parametrize(
    ("width", "dtype"),
    sampled([D, 4], [torch.float32, torch.bfloat16], quick=[(4, torch.bfloat16)]),
)
def test_a_graph_has_the_gradients_of_eager(width, dtype):
    # Between differentiable operations: torch 2.11 lost the gradient there.
    of_t, factor = angles(dim=width), torch.randn(D, dtype=dtype)

    def scaled(t):
        return apply_rotary_pos_emb(t * factor, of_t) * factor

    t, grad = torch.randn(S, B, H, D, dtype=dtype), torch.randn(S, B, H, D, dtype=dtype)
    results = []
    for function in (scaled, torch.compile(scaled, fullgraph=True, backend="aot_eager")):
        given = t.clone().requires_grad_()
        function(given).backward(grad)
        results.append(given.grad)
    assert results[0].abs().max() > 0.1
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("t", "freqs", "options", "error", "match"),
    [
        ((S, B, H, D), (4, 1, 1, D), {}, ShapeError, "4 positions, and 6 tokens"),
        ((S, B, H, D), (16, 1, 1, 10), {}, ShapeError, "at most the 8 of the heads"),
        ((S, B, H, D), (16, 1, 1, 3), {}, ShapeError, "even number"),
        ((S, B, D), (16, 1, 1, D), {}, ShapeError, "4 dimensions"),
        ((S, H, D), (16, 1, 1, D), {"tensor_format": "thd"}, ShapeError, "cu_seqlens must say"),
        ((S, B, H, D), (16, 1, 1, D), {"tensor_format": "sbdh"}, ShapeError, "tensor_format"),
        ((S, B, H, D), (11, 1, 1, D), {"cp_size": 2}, ShapeError, "11 positions, and 12 tokens"),
        ((5, B, H, D), (16, 1, 1, D), {"cp_size": 2}, ShapeError, "two chunks .*, got 5 tokens"),
        ((S, B, H, D), (16, 1, 1, D), {"cp_size": 2, "cp_rank": 2}, ArgumentError, "from 0 to"),
        ((S, B, H, D), (16, 2, 1, D), {}, ShapeError, r"for 1 or 3 sequences, got \[16, 2, 1, 8\]"),
        ((S, B, H, D), (16, 1, 3, D), {}, ShapeError, r"\(positions, 1, 1, channels\)"),
        ((S, B, H, D), (16, B, 1, D), {"start_positions": STARTS}, ShapeError, "for 1 sequence"),
        ((S, H, D), (16, B, 1, D), PACKED, ShapeError, "for 1 sequence"),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_bad_calls(t, freqs, options, error, match, fused):
    with pytest.raises(error, match=match):
        apply_rotary_pos_emb(torch.zeros(t), torch.zeros(freqs), fused=fused, **options)


@pytest.mark.parametrize("fused", [False, True])
def test_complex_waves_are_no_angles(fused):
    waves = torch.polar(torch.ones(S, 1, 1, D), angles(S))
    with pytest.raises(DtypeError, match="angles must be real, got torch.complex64"):
        apply_rotary_pos_emb(torch.zeros(S, B, H, D), waves, fused=fused)


@pytest.mark.parametrize(("fmt", "fused"), sampled(["sbhd", "bshd"], [False, True]))
def test_each_sequence_may_have_angles_of_its_own(fmt, fused):
    t = torch.randn((S, B, H, D) if fmt == "sbhd" else (B, S, H, D))
    own = torch.stack([angles()[begin : begin + S, 0] for begin in STARTS.tolist()], 1)
    wanted = apply_rotary_pos_emb(t, angles(), fmt, STARTS, fused=fused)
    assert torch.equal(apply_rotary_pos_emb(t, own, fmt, fused=fused), wanted)


def test_bad_splits():
    for given in ((None, angles()), (angles(), None)):
        with pytest.raises(DtypeError, match="apply_fused_qkv_rotary_pos_emb: ._freqs must be"):
            apply_fused_qkv_rotary_pos_emb(torch.ones(2, 2, 2, 24), *given, [8, 8, 8])
    with pytest.raises(ShapeError, match="qkv_split_arg_list"):
        apply_fused_qkv_rotary_pos_emb(torch.zeros(S, B, H, D), angles(), angles(), [4, 4, 4])
    with pytest.raises(UnsupportedError, match="thd"):
        apply_fused_qkv_rotary_pos_emb(
            torch.zeros(S, H, D), angles(), angles(), [4, 2, 2], tensor_format="thd"
        )


def test_the_rotation_of_a_transposed_tensor_is_contiguous():
    """As Transformer Engine's: what follows may view the result in another shape."""
    t = torch.randn(2, 8, 4, 16).transpose(0, 1)
    angles = te.RotaryPositionEmbedding(16)(8)
    y = apply_rotary_pos_emb(t, angles, fused=True)
    assert y.is_contiguous()
    assert torch.equal(y, apply_rotary_pos_emb(t.contiguous(), angles, fused=True))


def test_angles_of_no_positions():
    assert te.RotaryPositionEmbedding(16)(0).shape == (0, 1, 1, 16)


@pytest.mark.parametrize(("dim", "error"), [(-4, ShapeError), ("a", DtypeError)])
def test_widths_that_are_none(dim, error):
    with pytest.raises(error, match="RotaryPositionEmbedding: dim must"):
        te.RotaryPositionEmbedding(dim)
    with pytest.raises(error, match="RotaryPositionEmbedding: dim must"):
        te.RotaryPositionEmbedding(dim, rotary_percent=0.5)


@pytest.mark.parametrize(
    ("length", "error"), [(-4, ShapeError), (4.5, DtypeError), ("a", DtypeError)]
)
def test_lengths_that_are_none(length, error):
    with pytest.raises(error, match="RotaryPositionEmbedding: max_seq_len must"):
        te.RotaryPositionEmbedding(D)(length)


@pytest.mark.parametrize("name", ["rotary_percent", "rotary_base"])
def test_numbers_that_are_none(name):
    with pytest.raises(DtypeError, match=f"RotaryPositionEmbedding: {name} must be a number"):
        te.RotaryPositionEmbedding(D, **{name: "x"})


@pytest.mark.parametrize("offset", [None, "a", torch.ones(2)])
def test_offsets_that_are_none(offset):
    with pytest.raises(DtypeError, match="RotaryPositionEmbedding: offset must be a number"):
        te.RotaryPositionEmbedding(D)(4, offset)


ONES = torch.ones(S, B, H, D)


@pytest.mark.parametrize(
    ("heads", "freqs", "options", "error"),
    [
        (ONES, angles().to("meta"), {}, DeviceError),
        (ONES, angles(), {"start_positions": torch.zeros(B)}, DtypeError),
        (ONES, angles(), {"start_positions": torch.zeros(B - 1, dtype=torch.int32)}, ShapeError),
        (ONES, angles(), {"start_positions": torch.zeros(1, B, dtype=torch.int32)}, ShapeError),
        *(
            (ONES[:, 0], angles(), {"tensor_format": "thd", "cu_seqlens": ends}, error)
            for ends, error in (
                (torch.tensor([0.0, S]), DtypeError),
                (torch.tensor([[0, S]]), ShapeError),
                (torch.tensor([], dtype=torch.int32), ShapeError),
            )
        ),
        (ONES, angles(), {"start_positions": [0] * B}, DtypeError),
        (ONES, angles(), {"start_positions": torch.zeros(B, 1, dtype=torch.int32)}, ShapeError),
        (ONES[:, 0], angles(), {"tensor_format": "thd", "cu_seqlens": [0, S]}, DtypeError),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_arguments_that_are_no_tensors_of_the_device(heads, freqs, options, error, fused):
    with pytest.raises(error, match="apply_rotary_pos_emb: "):
        apply_rotary_pos_emb(heads, freqs, fused=fused, **options)


@pytest.mark.parametrize(
    ("split", "width", "error"),
    [
        ([D, 0, D], 2 * D, ShapeError),
        ("abc", 3 * D, DtypeError),
        ([D, D, 4], 2 * D + 4, ShapeError),
        (None, 3 * D, DtypeError),
    ],
)
def test_splits_that_are_none(split, width, error):
    with pytest.raises(error, match="apply_fused_qkv_rotary_pos_emb: qkv_split_arg_list must"):
        apply_fused_qkv_rotary_pos_emb(torch.ones(S, B, H, width), angles(), angles(), split)


@pytest.mark.parametrize("shape", [(), (S, 3 * D), (S, B, 3 * D)])
def test_products_that_have_no_heads(shape):
    with pytest.raises(ShapeError, match="apply_fused_qkv_rotary_pos_emb: .* four dimensions"):
        apply_fused_qkv_rotary_pos_emb(torch.ones(shape), angles(), angles(), [D] * 3)
