"""One of several ranks that share the tokens of sequences: ``python context_rank.py RANK WORLD FOLDER SCENE ...``.

Each scene compares with attention to whole sequences by its formulas in FP64. Run by ``unit/test_context_ranks.py``.
"""

from __future__ import annotations

import copy
import math
from itertools import product

import pytest
import torch
import torch.distributed as dist

import te_fast.pytorch as te
from parallel_rank import raises, rank_and_size
from ranks import Scenes, Stop, device
from te_fast.runtime.compiling import CAN_COMPILE

scenes = Scenes()
scene = scenes.scene
B, S, HEADS, D = 2, 32, 4, 16
BALANCED = te.CPLoadBalancingStrategy.DUAL_CHUNK_SWAP
_groups = {}


def group_of(way):
    """The ranks of a way; for two ways in turn, pairs of neighbours and pairs of what is left."""
    rank, size = rank_and_size()
    if way != "a2a+p2p":
        return dist.group.WORLD
    if not _groups:  # every rank makes every group
        half = size // 2
        pairs = [dist.new_group([2 * one, 2 * one + 1]) for one in range(half)]
        others = [dist.new_group(list(range(one, size, 2))) for one in range(2)]
        _groups[way] = [pairs[rank // 2], others[rank % 2]]
    return _groups[way]


def tokens_here(strategy=BALANCED, tokens=S):
    """Positions of this rank's tokens."""
    rank, size = rank_and_size()
    if strategy is not BALANCED:
        return torch.arange(tokens).chunk(size)[rank]
    chunks = torch.arange(tokens).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def whole(groups=HEADS, *, dtype=torch.float32, value=D, tokens=S, seed=0):
    """Queries, keys, values and a gradient of whole sequences in ``bshd``, alike on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, D), (groups, D), (groups, value), (HEADS, value))
    made = [torch.randn(B, tokens, *size, generator=generator, device="cpu") for size in sizes]
    return [one.to(device(), dtype) for one in made]


def expected(q, k, v, grad, *, is_causal=True, window=-1, cap=0.0, sink=None):
    """Result and gradients by the formulas of attention, in FP64."""
    own = [one.detach().double().requires_grad_() for one in (q, k, v)]
    wide_q, wide_k, wide_v = (one.transpose(1, 2) for one in own)
    wide_k, wide_v = (one.repeat_interleave(HEADS // k.shape[2], 1) for one in (wide_k, wide_v))
    scores = wide_q @ wide_k.transpose(-1, -2) / math.sqrt(D)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = torch.ones_like(distance, dtype=torch.bool) if not is_causal else distance >= 0
    if window >= 0:
        seen &= distance <= window
    scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    if sink is not None:
        column = sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    out = (weights @ wide_v).transpose(1, 2)
    out.backward(grad.double())
    return [out.detach().flatten(2), *[one.grad for one in own]]


def attention(way="p2p", groups=HEADS, *, strategy=BALANCED, channels=D, **options):
    options = {"qkv_format": "bshd", "attn_mask_type": "causal"} | options
    layer = te.DotProductAttention(HEADS, channels, groups, **options)
    layer.set_context_parallel_group(group_of(way), None, None, way, strategy)
    return layer


def run(layer, tensors, here, **keywords):
    """Result and gradients of this rank's tokens."""
    fmt = layer.qkv_format
    order = (lambda one: one.transpose(0, 1)) if fmt == "sbhd" else (lambda one: one)
    *own, grad = [order(one[:, here]).detach().clone() for one in tensors]
    own = [one.requires_grad_() for one in own]
    out = layer(*own, **keywords)
    out.backward(grad.flatten(2))
    return [order(one) for one in (out.detach(), *[one.grad for one in own])]


def check(layer, tensors, here, tolerance, what, **formulas):
    for got, want in zip(run(layer, tensors, here), expected(*tensors, **formulas), strict=True):
        error = (got.double() - want[:, here]).norm() / want[:, here].norm()
        assert error < tolerance, f"{what}: relative error {error:.2e}"


def ways():
    """Ways that these ranks have."""
    _, size = rank_and_size()
    return ("p2p", "all_gather", "a2a", *(("a2a+p2p",) if size == 4 else ()))


def exchanging(way):
    """How many ranks exchange heads."""
    _, size = rank_and_size()
    return {"a2a": size, "a2a+p2p": 2}.get(way, 1)


@scene
def results_are_those_of_whole_sequences():
    types = ((torch.float32, 1e-5), (torch.bfloat16, 1.5e-2))
    masks = ("causal", "no_mask", "causal_bottom_right")
    for way, groups, fmt, strategy in product(
        ways(), (HEADS, 2, 1), ("bshd", "sbhd"), te.CPLoadBalancingStrategy
    ):
        if groups % exchanging(way):
            continue
        here = tokens_here(strategy)
        for mask, (dtype, tolerance) in product(masks, types):
            layer = attention(way, groups, strategy=strategy, qkv_format=fmt, attn_mask_type=mask)
            what = f"{way} {groups} {fmt} {strategy} {mask} {dtype}"
            tensors = whole(groups, dtype=dtype)
            check(layer, tensors, here, tolerance, what, is_causal=mask != "no_mask")


@scene
def without_balance_ranks_may_have_an_odd_number_of_tokens():
    _, size = rank_and_size()
    strategy, tokens = te.CPLoadBalancingStrategy.NO_LOAD_BALANCE, 5 * size
    for way in ways():
        layer = attention(way, strategy=strategy)
        check(layer, whole(tokens=tokens), tokens_here(strategy, tokens), 1e-5, way)
    angles = te.RotaryPositionEmbedding(D)(tokens).to(device())
    options = {"qkv_format": "bshd", "attention_dropout": 0.0, "device": device()}
    layer = te.MultiheadAttention(HEADS * D, HEADS, **options)
    x, here = torch.randn(1, tokens, HEADS * D), tokens_here(strategy, tokens)
    dist.broadcast(x, 0)
    for parameter in layer.parameters():
        dist.broadcast(parameter.detach(), 0)
    want = layer(x, attn_mask_type="no_mask", rotary_pos_emb=angles)[:, here]
    layer.set_context_parallel_group(group_of("p2p"), None, None, "p2p", strategy)
    got = layer(x[:, here], attn_mask_type="no_mask", rotary_pos_emb=angles)
    assert (got - want).norm() < 1e-5 * want.norm()


@scene
def values_may_have_other_channels():
    for way in ways():
        layer = attention(way, channels=(D, 2 * D))
        check(layer, whole(value=2 * D), tokens_here(), 1e-5, way)


@scene
def an_exchange_of_heads_has_every_option():
    sink = torch.linspace(-1.0, 2.0, HEADS, device=device())
    for options, formulas in (
        ({"window_size": (5, 0)}, {"window": 5}),
        ({"softcap": 0.5}, {"cap": 0.5}),
        ({"softmax_type": "off-by-one"}, {"sink": torch.zeros(HEADS, device=device())}),
        ({"softmax_type": "learnable"}, {"sink": sink}),
    ):
        layer = attention("a2a", device=device(), **options)
        if options.get("softmax_type") == "learnable":
            with torch.no_grad():
                layer.softmax_offset.copy_(sink)
        check(layer, whole(), tokens_here(), 1e-5, str(options), **formulas)


@scene
def sinks_get_the_gradients_of_this_ranks_heads():
    """The sum over ranks is the gradient of a layer that has whole sequences."""
    layer = attention("a2a", device=device(), softmax_type="learnable")
    alone = te.DotProductAttention(
        HEADS, D, qkv_format="bshd", softmax_type="learnable", device=device()
    )
    *tensors, grad = whole()
    alone(*tensors).backward(grad.flatten(2))
    run(layer, [*tensors, grad], tokens_here())
    found = layer.softmax_offset.grad.clone()
    dist.all_reduce(found)
    assert torch.allclose(found, alone.softmax_offset.grad, rtol=1e-4, atol=1e-6)


@scene
def dropout_keeps_means():
    layer = attention("a2a", attention_dropout=0.5)
    *tensors, _ = whole()
    here = tokens_here()
    own = [one[:, here] for one in tensors]
    torch.manual_seed(0)
    total = sum(layer(*own) for _ in range(400)) / 400
    mean = attention("a2a")(*own)
    assert (total - mean).norm() < 0.2 * mean.norm()
    layer.eval()
    assert torch.equal(layer(*own), mean)


@scene
def whole_layers_rotate_by_positions():
    """A layer of each rank has the results of one with whole sequences, and its share of the weights' gradients."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd"}
    hidden = HEADS * D
    for way, strategy in product(ways(), te.CPLoadBalancingStrategy):
        torch.manual_seed(0)
        layer = te.TransformerLayer(hidden, 64, HEADS, device=device(), **options)
        shared = copy.deepcopy(layer)
        angles = te.RotaryPositionEmbedding(D)(S).to(device())
        generator = torch.Generator().manual_seed(1)
        x, grad = (torch.randn(B, S, hidden, generator=generator, device="cpu") for _ in "xg")
        x, grad, here = x.to(device()), grad.to(device()), tokens_here(strategy)
        shared(x[:, here], rotary_pos_emb=angles)  # a plan of one rank is not kept
        shared.set_context_parallel_group(group_of(way), None, None, way, strategy)
        results = []
        for one, given, of in ((layer, x, grad), (shared, x[:, here], grad[:, here])):
            leaf = given.detach().clone().requires_grad_()
            out = one(leaf, rotary_pos_emb=angles)
            out.backward(of)
            results.append((out.detach(), leaf.grad))
        for want, got in zip(*results, strict=True):
            assert (got - want[:, here]).norm() < 1e-5 * want[:, here].norm(), (way, strategy)
        for want, got in zip(layer.parameters(), shared.parameters(), strict=True):
            dist.all_reduce(got.grad)
            assert (got.grad - want.grad).norm() < 1e-5 * want.grad.norm() + 1e-6, (way, strategy)


@scene
def recomputation_gives_the_same_bits():
    for way in ways():
        layer, tensors, here = attention(way), whole(), tokens_here()
        kept = run(layer, tensors, here)
        again = run(layer, tensors, here, checkpoint_core_attention=True)
        assert all(map(torch.equal, kept, again)), way


@scene
def some_tensors_want_no_gradient():
    here = tokens_here()
    for way, wanted in product(ways(), range(3)):
        *tensors, grad = whole()
        own = [one[:, here].requires_grad_(number == wanted) for number, one in enumerate(tensors)]
        layer = attention(way)
        layer(*own).backward(grad[:, here].flatten(2))
        want = expected(*tensors, grad)[1 + wanted][:, here]
        assert (own[wanted].grad - want).norm() < 1e-5 * want.norm(), (way, wanted)
        with torch.no_grad():
            assert torch.equal(layer(*own), layer(*own))


@scene
def tensors_may_lie_anyhow():
    """Channels that are not side by side, and a gradient that is one number for all."""
    here = tokens_here()
    for way in ways():
        *tensors, _ = whole()
        wide = [one[:, here].unsqueeze(-1).repeat(1, 1, 1, 1, 2)[..., 0] for one in tensors]
        own = [one.detach().requires_grad_() for one in wide]
        out = attention(way)(*own)
        out.sum().backward()
        y, *grads = expected(*tensors, torch.ones_like(tensors[0]))
        for got, want in zip((out, *(one.grad for one in own)), (y, *grads), strict=True):
            assert (got - want[:, here]).norm() < 1e-5 * want[:, here].norm() + 1e-5, way


@scene
def autocast_of_torch_decides_the_type():
    here, kind = tokens_here(), device().type
    for way in ways():
        *tensors, grad = whole()
        own = [one[:, here].requires_grad_() for one in tensors]
        with torch.autocast(kind, torch.bfloat16):
            out = attention(way)(*own)
        assert out.dtype == torch.bfloat16
        out.backward(grad[:, here].flatten(2).bfloat16())
        want = expected(*tensors, grad)
        for got, one in zip((out, *(leaf.grad for leaf in own)), want, strict=True):
            assert (got.double() - one[:, here]).norm() < 1.5e-2 * one[:, here].norm(), way
        assert all(leaf.grad.dtype == torch.float32 for leaf in own)


@scene
def second_derivatives_raise():
    here = tokens_here()
    own = [one[:, here].requires_grad_() for one in whole()[:3]]
    for way in ("p2p", "all_gather"):
        out = attention(way, name="core")(*own)
        (grad,) = torch.autograd.grad(out.square().sum(), own[0], create_graph=True)
        with raises(NotImplementedError, "core: its gradient cannot be differentiated again"):
            torch.autograd.grad(grad.square().sum(), own[0])


@scene
def no_tokens():
    for way in ways():
        layer = attention(way)
        own = [torch.randn(B, 0, HEADS, D).requires_grad_() for _ in "qkv"]
        out = layer(*own)
        out.sum().backward()
        assert out.shape == (B, 0, HEADS * D)
        assert all(one.grad.shape == one.shape for one in own)


@scene
def copies_share_the_ranks():
    for way in ways():
        layer, here = attention(way), tokens_here()
        copied = copy.deepcopy(layer)
        own = [one[:, here] for one in whole()[:3]]
        assert copied.cp_group is layer.cp_group or copied.cp_group == layer.cp_group
        assert torch.equal(copied(*own), layer(*own))
        layer.set_context_parallel_group(None, None, None)
        assert layer(*own).shape == (B, len(here), HEADS * D)


@scene
def bad_input():
    here, (_, size) = tokens_here(), rank_and_size()
    q, k, v, _ = (one[:, here] for one in whole())
    ends = torch.tensor([0, len(here)], dtype=torch.int32)
    for layer, keywords, what in (
        (attention(), {"qkv_format": "thd"}, "thd"),
        (attention(attn_mask_type="padding"), {}, "padding"),
        (attention(attn_mask_type="arbitrary"), {}, "arbitrary"),
        (attention(), {"core_attention_bias_type": "alibi"}, "core_attention_bias"),
        (attention(return_max_logit=True), {}, "return_max_logit"),
        (attention(window_size=(4, 0)), {}, "window_size with cp_comm_type='a2a'"),
        (attention(softcap=1.0), {}, "softcap with cp_comm_type='a2a'"),
        (attention("all_gather", attention_dropout=0.1), {}, "attention_dropout with"),
        (attention(softmax_type="off-by-one", device=device()), {}, "softmax_type with"),
    ):
        mask = {"attention_mask": torch.zeros(B, 1, 1, len(here), dtype=torch.bool)}
        given = [one.flatten(0, 1) for one in (q, k, v)] if "thd" in what else (q, k, v)
        ends_of = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} if "thd" in what else mask
        with raises(NotImplementedError, what):
            layer(*given, **ends_of, **keywords)
    with raises(AssertionError, "two chunks of each sequence, got 3 queries"):
        attention()(q[:, :3], k[:, :3], v[:, :3])
    with raises(AssertionError, "as many queries as keys, got 2 and 4"):
        attention()(q[:, :2], k[:, :4], v[:, :4])
    if size == 2:
        few = te.DotProductAttention(3, D, qkv_format="bshd", name="core")
        few.set_context_parallel_group(dist.group.WORLD, None, None, "a2a")
        with raises(AssertionError, r"core: the 2 ranks .* need a multiple of 2 heads.*'p2p'"):
            few(q[:, :, :3], k[:, :, :3], v[:, :, :3])
    layer = attention()
    with raises(AssertionError, "cp_comm_type must be one of p2p, all_gather, a2a, "):
        layer.set_context_parallel_group(dist.group.WORLD, None, None, "ring")
    with raises(TypeError, "a list of two groups for cp_comm_type='a2a.p2p', got 1"):
        layer.set_context_parallel_group(dist.group.WORLD, None, None, "a2a+p2p")
    with raises(AssertionError, "one group for cp_comm_type='p2p', got 2"):
        layer.set_context_parallel_group([dist.group.WORLD] * 2, None, None, "p2p")
    if CAN_COMPILE:
        with pytest.raises(Exception, match="do not attend in a compiled|UnsupportedError"):
            torch.compile(lambda: layer(q, k, v), backend="eager", fullgraph=True)()


@scene
def ranks_that_disagree():
    rank, _ = rank_and_size()
    for way in ways():
        layer = te.DotProductAttention(HEADS, D, qkv_format="bshd", name="core")
        layer.set_context_parallel_group(group_of(way), None, None, way)
        batch = 1 + rank % 2 + rank // 2
        own = [torch.ones(batch, 8, HEADS, D) for _ in "qkv"]
        with raises(
            RuntimeError, "core: the input's shape must be the same on all ranks of cp_group"
        ):
            layer(*own)
        own = [torch.ones(1, 8, HEADS, D) for _ in "qkv"]
        with raises(RuntimeError, "core: the mask or another setting of the call must be the same"):
            layer(*own, attn_mask_type=("causal", "no_mask")[rank % 2 ^ rank // 2])
        assert torch.isfinite(layer(*own)).all()


@scene
def a_rank_that_stops_before_backward():
    """The last scene of a run: the group is gone."""
    rank, size = rank_and_size()
    layers = [te.DotProductAttention(HEADS, D, qkv_format="bshd", name=way) for way in ways()[:3]]
    outs = []
    for layer in layers:
        layer.set_context_parallel_group(dist.group.WORLD, None, None, layer.name)
        own = [torch.ones(1, 8, HEADS, D).requires_grad_() for _ in "qkv"]
        outs.append((layer(*own), own))
    if rank == size - 1:
        raise Stop
    for layer, (out, own) in zip(layers, outs, strict=True):
        with raises(RuntimeError, f"{layer.name}: the .* failed; another rank has stopped"):
            out.sum().backward()
        assert all(one.grad is None for one in own)


if __name__ == "__main__":
    scenes.main()
