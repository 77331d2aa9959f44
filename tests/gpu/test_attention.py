"""Attention, transformer layers and converted models on a GPU, against the formula and against the host backend."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import te_fast
import te_fast.pytorch as te
from attention_reference import attend_one, attends
from llama_like import Model, loss_of
from te_fast.attention import packed, scores, varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HEADS, D = 4, 64
BOUNDS = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
KINDS = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
)


def relative(got, wanted):
    size = wanted.double().norm().clamp_min(1e-6)
    return ((got.double().cpu() - wanted.double().cpu()).norm() / size.cpu()).item()


def heads(lengths, groups, d_v, dtype):
    """Queries, keys and values of every sequence, on the GPU."""
    return [
        [
            torch.randn(n, count, d, device="cuda", dtype=dtype, requires_grad=True)
            for count, d in ((HEADS, D), (groups, D), (groups, d_v))
        ]
        for n in lengths
    ]


def wanted(sequences, kind, window, grads):
    """Results and gradients of every sequence by the formula."""
    results = []
    for sequence, grad in zip(sequences, grads, strict=True):
        wide = [t.detach().double().cpu().requires_grad_() for t in sequence]
        mask = attends(kind, len(wide[0]), len(wide[0]), window)
        y = attend_one(*wide, mask, 1 / math.sqrt(D)).flatten(1)
        found = torch.autograd.grad(y, wide, grad.double().cpu().reshape(y.shape))
        results.append((y, found))
    return results


def laid_out(sequences, fmt, longest):
    """The heads in a format."""
    parts = list(zip(*sequences, strict=True))
    if fmt == "thd":
        return [torch.cat(part) for part in parts]
    pad = torch.nn.functional.pad
    dense = [
        torch.stack([pad(t, (0, 0, 0, 0, 0, longest - len(t))) for t in part]) for part in parts
    ]
    return [t if fmt == "bshd" else t.transpose(0, 1) for t in dense]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize(("groups", "d_v"), [(HEADS, D), (2, D), (HEADS, 32)])
@pytest.mark.parametrize("window", [None, (16, 0)])
def test_every_mask_and_layout(dtype, kind, fmt, groups, d_v, window):
    is_padded = "padding" in kind
    if fmt == "thd" and not is_padded:
        pytest.skip("packed sequences have lengths")
    lengths = [40, 17, 64] if is_padded else [64, 64]
    sequences = heads(lengths, groups, d_v, dtype)
    grads = [torch.randn(n, HEADS * d_v, device="cuda", dtype=dtype) for n in lengths]
    layer = te.DotProductAttention(
        HEADS,
        (D, d_v),
        num_gqa_groups=groups,
        qkv_format=fmt,
        attn_mask_type=kind,
        window_size=window,
    )
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} if is_padded else {}
    if fmt == "thd":
        given |= {"max_seqlen_q": 64, "max_seqlen_kv": 64}
    out = layer(*laid_out(sequences, fmt, 64), **given)
    if fmt == "thd":
        parts = out.split(lengths)
    else:
        dense = out if fmt == "bshd" else out.transpose(0, 1)
        parts = [row[:n] for row, n in zip(dense, lengths, strict=True)]
    torch.autograd.backward(parts, grads)
    known = wanted(sequences, kind, window or (-1, -1), grads)
    for part, sequence, (y, found) in zip(parts, sequences, known, strict=True):
        assert relative(part, y) < BOUNDS[dtype]
        for tensor, grad in zip(sequence, found, strict=True):
            assert relative(tensor.grad, grad) < BOUNDS[dtype]


def test_packed_sequences_take_torchs_kernel(monkeypatch):
    if varlen._varlen()[0] is None:
        pytest.skip("torch 2.10 or later")
    calls = []
    kernel = packed.attend_varlen
    monkeypatch.setattr(packed, "attend_varlen", lambda *a: calls.append(1) or kernel(*a))
    layer = te.DotProductAttention(HEADS, D, qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v = torch.randn(3, 48, HEADS, D, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, 16, 48], device="cuda", dtype=torch.int32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 32, "max_seqlen_kv": 32}
    layer(q, k, v, **given)
    assert calls == [1]
    starts = torch.tensor([0, 24, 48], device="cuda", dtype=torch.int32)
    ends = torch.tensor([0, 16, 40], device="cuda", dtype=torch.int32)
    given |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    layer(q, k, v, **given, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
    assert calls == [1, 1]


def test_windows_take_torchs_kernel(monkeypatch):
    """Instead of a mask; also for keys that a query does not begin with, but not for what the kernel lacks."""
    if "window_size" not in varlen._varlen()[1]:
        pytest.skip("torch with windows in its kernel")
    calls = []
    kernel = scores.attend_varlen
    monkeypatch.setattr(scores, "attend_varlen", lambda *a: calls.append(1) or kernel(*a))
    q, k, v = torch.randn(3, 2, 48, HEADS, D, device="cuda", dtype=torch.bfloat16)
    for kind, window, keys, used in (
        ("causal", (7, 0), 48, 1),
        ("no_mask", (7, 3), 48, 1),
        ("causal_bottom_right", (7, 0), 40, 1),
        ("causal", (7, 0), 40, 0),
        ("causal", (-1, 0), 48, 0),
    ):
        calls.clear()
        layer = te.DotProductAttention(
            HEADS, D, qkv_format="bshd", attn_mask_type=kind, window_size=window
        )
        leaves = [one.detach().requires_grad_() for one in (q, k[:, -keys:], v[:, -keys:])]
        out = layer(*leaves)
        assert len(calls) == used, (kind, window, keys)
        grad = torch.randn_like(out)
        found = [out, *torch.autograd.grad(out, leaves, grad)]
        for row in range(2):
            wide = [one[row].detach().double().cpu().requires_grad_() for one in leaves]
            y = attend_one(*wide, attends(kind, 48, keys, window), 1 / math.sqrt(D)).flatten(1)
            want = [y, *torch.autograd.grad(y, wide, grad[row].double().cpu())]
            for got, known in zip(found, want, strict=True):
                assert relative(got[row], known) < BOUNDS[torch.bfloat16], (kind, window, keys)


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("window", [None, (16, 0)])
def test_nothing_is_read_between_packed_sequences(kind, groups, window):
    lengths, sizes, tokens = [40, 0, 17, 64], [48, 8, 17, 64], 160
    sequences = heads(lengths, groups, D, torch.bfloat16)
    grads = [torch.randn(n, HEADS * D, device="cuda", dtype=torch.bfloat16) for n in lengths]
    layer = te.DotProductAttention(
        HEADS, D, groups, qkv_format="thd", attn_mask_type=kind, window_size=window
    )
    ends, starts = (torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in (lengths, sizes))
    places = [slice(begin, begin + n) for begin, n in zip(starts.tolist(), lengths, strict=False)]
    leaves = []
    for part in zip(*sequences, strict=True):
        whole = part[0].new_full((tokens, *part[0].shape[1:]), float("nan"))
        for place, one in zip(places, part, strict=True):
            whole[place] = one.detach()
        leaves.append(whole.requires_grad_())
    grad = torch.full((tokens, HEADS * D), float("nan"), device="cuda", dtype=torch.bfloat16)
    for place, one in zip(places, grads, strict=True):
        grad[place] = one
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 64, "max_seqlen_kv": 64}
    out = layer(*leaves, **given, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
    out.backward(grad)
    found = [out, *(leaf.grad for leaf in leaves)]
    for place, sequence, one in zip(places, sequences, grads, strict=True):
        if place.start != place.stop:
            y, want = wanted([sequence], kind, window or (-1, -1), [one])[0]
            for got, known in zip(found, (y, *want), strict=True):
                assert relative(got[place], known) < BOUNDS[torch.bfloat16]
    is_real = torch.zeros(tokens, dtype=torch.bool, device="cuda")
    for place in places:
        is_real[place] = True
    assert not any(one[~is_real].count_nonzero() for one in found)


@pytest.mark.parametrize("chosen", ["FLASH", "FUSED", "UNFUSED"])
def test_kernels_are_chosen(chosen, monkeypatch):
    for name in {"FLASH", "FUSED", "UNFUSED"} - {chosen}:
        monkeypatch.setenv(f"NVTE_{name}_ATTN", "0")
    layer = te.DotProductAttention(HEADS, D, qkv_format="bshd")
    q, k, v = torch.randn(3, 2, 64, HEADS, D, device="cuda", dtype=torch.bfloat16)
    mask = attends("causal", 64, 64)
    known = attend_one(*(t[0].double().cpu() for t in (q, k, v)), mask, 1 / math.sqrt(D))
    assert relative(layer(q, k, v)[0], known.flatten(1)) < 3e-2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rope", [False, True])
def test_layers_on_the_gpu_are_those_on_the_host(recipe, fused, rope):
    options = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_gqa_groups": 2,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "attn_input_format": "bshd",
        "bias": False,
        "fuse_qkv_params": fused,
        "params_dtype": torch.bfloat16,
    }
    host = te.TransformerLayer(128, 256, 4, device="cpu", **options)
    layer = te.TransformerLayer(128, 256, 4, device="cuda", **options)
    layer.load_state_dict(host.state_dict())
    angles = te.RotaryPositionEmbedding(32)(64) if rope else None
    x, grad = torch.randn(2, 2, 64, 128).bfloat16()
    results = []
    for each in (host, layer):
        device = each.self_attention.proj.weight.device
        for _ in range(3):  # the third call replays a graph
            each.zero_grad()
            own = x.detach().to(device).requires_grad_()
            turns = None if angles is None else angles.to(device)
            with te.autocast(recipe=recipe):
                out = each(own, rotary_pos_emb=turns)
            out.backward(grad.to(device))
        results.append([out.detach(), own.grad, *(p.grad for p in each.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert relative(theirs, mine) < 0.1


def test_converted_models(recipe):
    tokens = torch.randint(1, 96, (2, 16), generator=torch.Generator().manual_seed(3))
    host = Model().bfloat16()
    model = copy.deepcopy(host).cuda()
    for each in (host, model):
        te_fast.convert(each)
    with te.autocast(recipe=recipe):
        known = loss_of(host, tokens)
    with te.autocast(recipe=recipe):
        loss = loss_of(model, tokens.cuda())
    loss.backward()
    assert abs(loss.item() - known.item()) < 5e-2
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_layers_in_graphs_turn_by_their_own_angles():
    layer = te.TransformerLayer(
        128,
        256,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        params_dtype=torch.bfloat16,
    )
    angles = te.RotaryPositionEmbedding(32)(64)
    x = torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        known = layer(x, rotary_pos_emb=angles)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(x, rotary_pos_emb=angles)
        torch.cuda.current_stream().wait_stream(side)
        others = angles.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, rotary_pos_emb=others)
        # Captured launches have not run, so angles of the same tensor must be computed again.
        assert relative(layer(x, rotary_pos_emb=others), known) < 1e-2
        layer(x, rotary_pos_emb=angles * 2)
        graph.replay()
    assert relative(out, known) < 1e-2


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_may_train_alone(dtype, compiles):
    """Gradients of sinks and biases do not depend on whether queries, keys and values want one."""
    layer = te.DotProductAttention(HEADS, D, qkv_format="bshd", softmax_type="learnable")
    bias = torch.randn(1, HEADS, 48, 48, device="cuda", dtype=dtype, requires_grad=True)
    parts = [torch.randn(2, 48, HEADS, D, device="cuda", dtype=dtype) for _ in range(3)]
    grad = torch.randn(2, 48, HEADS * D, device="cuda", dtype=dtype)
    given = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    found = []
    for trains in (True, False):
        leaves = [part.clone().requires_grad_(trains) for part in parts]
        call = torch.compile(layer) if compiles else layer
        call(*leaves, **given).backward(grad)
        found.append((bias.grad, layer.softmax_offset.grad))
        bias.grad = layer.softmax_offset.grad = None
    for want, got in zip(*found, strict=True):
        assert relative(got, want) < BOUNDS[dtype]
        assert got.abs().sum() > 0
