"""One of several ranks that share the tokens of sequences: ``python context_rank.py RANK WORLD FOLDER SCENE ...``.

Each scene compares with attention to whole sequences by its formulas in FP64. Run by ``unit/test_context_ranks.py``.
"""

from __future__ import annotations

import copy
import math
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist

import te_fast.pytorch as te
from parallel_rank import raises, rank_and_size
from ranks import Scenes, Stop, device
from te_fast.attention import ring
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


def expected(q, k, v, grad, *, is_causal=True, window=-1, ahead=-1, cap=0.0, sink=None):
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
    if ahead >= 0:
        seen &= distance >= -ahead
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
def ranks_with_whole_sequences_or_all_keys_have_every_option():
    sink = torch.linspace(-1.0, 2.0, HEADS, device=device())
    around = {"attn_mask_type": "no_mask", "window_size": (3, 6)}
    for way, strategy, (options, formulas) in product(
        ("a2a", "all_gather"),
        te.CPLoadBalancingStrategy,
        (
            ({"window_size": (5, 0)}, {"window": 5}),
            (around, {"is_causal": False, "window": 3, "ahead": 6}),
            ({"softcap": 0.5}, {"cap": 0.5}),
            ({"softmax_type": "off-by-one"}, {"sink": torch.zeros(HEADS, device=device())}),
            ({"softmax_type": "learnable"}, {"sink": sink}),
        ),
    ):
        layer = attention(way, strategy=strategy, device=device(), **options)
        if options.get("softmax_type") == "learnable":
            with torch.no_grad():
                layer.softmax_offset.copy_(sink)
        what = f"{way} {strategy} {options}"
        check(layer, whole(), tokens_here(strategy), 1e-5, what, **formulas)


def largest(q, k, *, is_causal=True):
    """Largest score of each head."""
    wide_q, wide_k = (one.double().transpose(0, 1) for one in (q, k))
    wide_k = wide_k.repeat_interleave(HEADS // k.shape[1], 0)
    scores = wide_q @ wide_k.transpose(-1, -2) / math.sqrt(D)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.flatten(1).amax(1)


@scene
def largest_scores_are_those_of_all_ranks():
    _, size = rank_and_size()
    lengths, sizes = [3 * size, 0, 7 * size - 1, 1], [4 * size, 0, 8 * size, 2 * size]
    ends = torch.tensor([0, *lengths], device=device()).cumsum(0).int()
    for way, strategy, is_causal in product(ways(), te.CPLoadBalancingStrategy, (True, False)):
        what, groups = f"{way} {strategy} {is_causal}", 2 * exchanging(way)
        if groups > HEADS:
            continue
        options = {"return_max_logit": True, "attn_mask_type": "causal" if is_causal else "no_mask"}
        *tensors, _ = whole(groups)
        want = torch.stack(
            [largest(*pair, is_causal=is_causal) for pair in zip(*tensors[:2], strict=True)]
        )
        layer = attention(way, groups, strategy=strategy, **options)
        _, found = layer(*(one[:, tokens_here(strategy)] for one in tensors))
        assert torch.allclose(found.double(), want.amax(0), rtol=1e-5), what
        (*tensors, _), starts = packed(lengths, sizes, groups=groups)
        places = [slice(b, b + n) for b, n in zip(starts, lengths, strict=False) if n]
        want = [largest(tensors[0][at], tensors[1][at], is_causal=is_causal) for at in places]
        options |= {"attn_mask_type": "padding_causal" if is_causal else "padding"}
        layer = attention(way, groups, strategy=strategy, qkv_format="thd", **options)
        bounds = torch.tensor(starts, dtype=torch.int32, device=device())
        given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        given |= {"cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": bounds}
        _, found = layer(*(one[rows_here(starts, strategy)] for one in tensors), **given)
        assert torch.allclose(found.double(), torch.stack(want).amax(0), rtol=1e-5), what


@scene
def sinks_get_the_gradients_of_this_ranks_part():
    """The sum over ranks is the gradient of a layer that has whole sequences."""
    alone = te.DotProductAttention(
        HEADS, D, qkv_format="bshd", softmax_type="learnable", device=device()
    )
    *tensors, grad = whole()
    alone(*tensors).backward(grad.flatten(2))
    for way in ("a2a", "all_gather"):
        layer = attention(way, device=device(), softmax_type="learnable")
        run(layer, [*tensors, grad], tokens_here())
        found = layer.softmax_offset.grad.clone()
        dist.all_reduce(found)
        assert torch.allclose(found, alone.softmax_offset.grad, rtol=1e-4, atol=1e-6), way


@scene
def dropout_keeps_means():
    *tensors, _ = whole()
    here = tokens_here()
    own = [one[:, here] for one in tensors]
    for way in ("a2a", "all_gather"):
        layer = attention(way, attention_dropout=0.5)
        torch.manual_seed(0)
        total = sum(layer(*own) for _ in range(400)) / 400
        mean = attention(way)(*own)
        assert (total - mean).norm() < 0.2 * mean.norm(), way
        layer.eval()
        assert torch.equal(layer(*own), mean), way


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
    for way, value in product(ways(), (D, 2 * D)):
        *tensors, grad = whole(value=value)
        tensors = [
            tensors[0] * 6,
            *tensors[1:],
        ]  # large scores, which the type of products must not round
        own = [one[:, here].requires_grad_() for one in tensors]
        with torch.autocast(kind, torch.bfloat16):
            out = attention(way, channels=(D, value))(*own)
        assert out.dtype == torch.bfloat16
        out.backward(grad[:, here].flatten(2).bfloat16())
        want = expected(*(one.bfloat16() for one in (*tensors, grad)))
        for got, one in zip((out, *(leaf.grad for leaf in own)), want, strict=True):
            assert (got.double() - one[:, here]).norm() < 1e-2 * one[:, here].norm(), (way, value)
        assert all(leaf.grad.dtype == torch.float32 for leaf in own)


@scene
def tensors_of_inference_serve_outside_of_it():
    here = tokens_here()
    for way in ways():
        layer = attention(way)
        with torch.inference_mode():
            own = [one[:, here].clone() for one in whole()[:3]]
            want = layer(*own)
        assert torch.equal(layer(*own), want)


@scene
def a_call_that_failed_on_all_ranks_can_be_made_again():
    here = tokens_here()
    for way in ways():
        layer, tensors = attention(way), whole()

        def fail(*_):
            raise MemoryError

        for name in ("attend_part", "differentiate_part"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ring, name, fail)
                if way != "a2a":
                    with pytest.raises(MemoryError):
                        run(layer, tensors, here)
            check(layer, tensors, here, 1e-5, way)


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
    cases = [(way, {}) for way in ways()]
    cases += [(way, {"window_size": (4, 0)}) for way in ("a2a", "all_gather")]
    for way, options in cases:
        layer = attention(way, **options)
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


# Packed sequences -----------------------------------------------------------------------------------


def rows_here(starts, strategy=BALANCED):
    """Rows of this rank's tokens among those of packed sequences that begin at `starts`."""
    return torch.cat(
        [begin + tokens_here(strategy, end - begin) for begin, end in pairwise(starts)]
    )


def packed(lengths, sizes, *, groups=HEADS, value=D, dtype=torch.float32, seed=0):
    """Queries, keys, values and a gradient of packed sequences, and their cumulative lengths with padding.

    Padding holds what must not be read.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = ((HEADS, D), (groups, D), (groups, value), (HEADS, value))
    made = [torch.randn(sum(sizes), *one, generator=generator, device="cpu") for one in heads]
    starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    for begin, length, size in zip(starts, lengths, sizes, strict=False):
        for one in made:
            one[begin + length : begin + size] = float("nan")
    return [one.to(device(), dtype) for one in made], starts


def expected_packed(tensors, starts, lengths, **formulas):
    """Result and gradients of packed sequences in FP64; zero for padding."""
    found = [torch.zeros_like(one.double()) for one in (tensors[3], *tensors[:3])]
    found[0] = found[0].flatten(1)
    for begin, length in zip(starts, lengths, strict=False):
        place = slice(begin, begin + length)
        one = expected(*(tensor[None, place] for tensor in tensors), **formulas)
        for whole, part in zip(found, one, strict=True):
            whole[place] = part[0]
    return found


def check_packed(layer, tensors, starts, lengths, here, tolerance, what, **formulas):
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    bounds = torch.tensor(starts, dtype=torch.int32)
    ends, bounds = ends.to(device()), bounds.to(device())
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    if not torch.equal(ends, bounds):
        given |= {"cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": bounds}
    *own, grad = [one[here].clone() for one in tensors]
    own = [one.requires_grad_() for one in own]
    out = layer(*own, **given, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    out.backward(grad.flatten(1))
    want = expected_packed(tensors, starts, lengths, **formulas)
    for got, one in zip((out, *(leaf.grad for leaf in own)), want, strict=True):
        error = (got.double() - one[here]).norm() / one[here].norm()
        assert error < tolerance, f"{what}: relative error {error:.2e}"


@scene
def packed_sequences_are_whole_ones():
    """Sequences of several lengths, also with padding of any length between them, and one without tokens."""
    _, size = rank_and_size()
    even = [4 * size, 0, 10 * size, 2 * size]
    cases = {"none": (even, even), "padded": ([3 * size, 0, 9 * size + 1, 1], [*even])}
    cases["much"] = ([5, 3, 16 * size - 1], [16 * size] * 3)
    types = ((torch.float32, 1e-5), (torch.bfloat16, 1.5e-2))
    masks = ("padding_causal", "padding")
    for way, groups, strategy, (case, (lengths, sizes)) in product(
        ways(), (HEADS, 2, 1), te.CPLoadBalancingStrategy, cases.items()
    ):
        if groups % exchanging(way):
            continue
        for mask, (dtype, tolerance) in product(masks, types):
            options = {"qkv_format": "thd", "attn_mask_type": mask}
            layer = attention(way, groups, strategy=strategy, **options)
            tensors, starts = packed(lengths, sizes, groups=groups, dtype=dtype)
            here, what = rows_here(starts, strategy), f"{way} {groups} {strategy} {case} {mask}"
            given = (tensors, starts, lengths, here, tolerance, f"{what} {dtype}")
            check_packed(layer, *given, is_causal=mask == "padding_causal")


@scene
def packed_values_may_have_other_channels():
    _, size = rank_and_size()
    lengths, sizes = [2 * size + 1, 6 * size], [4 * size, 6 * size]
    tensors, starts = packed(lengths, sizes, value=2 * D)
    for way in ways():
        options = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
        layer = attention(way, channels=(D, 2 * D), **options)
        check_packed(layer, tensors, starts, lengths, rows_here(starts), 1e-5, way)


@scene
def packed_queries_may_have_other_keys():
    """Without a causal mask; a query without keys has a result of zeros."""
    _, size = rank_and_size()
    q_lengths, k_lengths = [2 * size, 4 * size, 2 * size], [6 * size, 0, 2 * size - 1]
    types = ((torch.float32, 1e-5), (torch.bfloat16, 1.5e-2))
    for way, (dtype, tolerance) in product(ways(), types):
        (q, _, _, grad), of_q = packed(q_lengths, q_lengths, dtype=dtype)
        (_, k, v, _), of_k = packed(k_lengths, [6 * size, 2 * size, 2 * size], dtype=dtype, seed=1)
        ends = torch.tensor([0, *k_lengths]).cumsum(0).tolist()
        ends, *bounds = (
            torch.tensor(one, dtype=torch.int32, device=device()) for one in (ends, of_q, of_k)
        )
        here_q, here_k = rows_here(of_q), rows_here(of_k)
        own = [one[here].requires_grad_() for one, here in ((q, here_q), (k, here_k), (v, here_k))]
        given = {"cu_seqlens_q": bounds[0], "cu_seqlens_q_padded": bounds[0]}
        given |= {"cu_seqlens_kv": ends, "cu_seqlens_kv_padded": bounds[1]}
        out = attention(way, qkv_format="thd", attn_mask_type="padding")(*own, **given)
        out.backward(grad[here_q].flatten(1))
        want = [torch.zeros_like(one.double()) for one in (q.flatten(1), q, k, v)]
        for number in (0, 2):
            of_queries = slice(of_q[number], of_q[number] + q_lengths[number])
            of_keys = slice(of_k[number], of_k[number] + k_lengths[number])
            heads = (q[of_queries], k[of_keys], v[of_keys], grad[of_queries])
            found = expected(*(one[None] for one in heads), is_causal=False)
            places = (of_queries, of_queries, of_keys, of_keys)
            for one, place, part in zip(want, places, found, strict=True):
                one[place] = part[0]
        here = (here_q, here_q, here_k, here_k)
        for got, one, rows in zip((out, *(leaf.grad for leaf in own)), want, here, strict=True):
            error = (got.double() - one[rows]).norm() / one[rows].norm()
            assert error < tolerance, f"{way} {dtype}: relative error {error:.2e}"


@scene
def packed_layers_rotate_by_positions():
    """A layer of each rank has the results of one with whole sequences."""
    _, size = rank_and_size()
    lengths, sizes = [3 * size, 8 * size - 1], [4 * size, 8 * size]
    starts = [0, sizes[0], sum(sizes)]
    ends = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device())
    bounds = torch.tensor(starts, dtype=torch.int32, device=device())
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 8 * size}
    given |= {"cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": bounds}
    hidden, angles = HEADS * D, te.RotaryPositionEmbedding(D)(8 * size).to(device())
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "thd"}
    options |= {"self_attn_mask_type": "padding_causal"}
    real = torch.cat([torch.arange(b, b + n) for b, n in zip(starts, lengths, strict=False)])
    for way in ways():
        torch.manual_seed(0)
        layer = te.TransformerLayer(hidden, 64, HEADS, device=device(), **options)
        shared = copy.deepcopy(layer)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(sum(sizes), hidden, generator=generator, device="cpu").to(device())
        here = rows_here(starts)
        shared.set_context_parallel_group(group_of(way), None, None, way)
        want = layer(x, rotary_pos_emb=angles, max_seqlen_kv=8 * size, **given)
        got = shared(x[here], rotary_pos_emb=angles, max_seqlen_kv=8 * size, **given)
        is_real = torch.isin(here, real)
        left = want[here][is_real]
        assert (got[is_real] - left).norm() < 1e-5 * left.norm(), way


@scene
def bad_packed_input():
    _, size = rank_and_size()
    parts = 2 * size
    options = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "name": "core"}
    heads = [torch.ones(8, HEADS, D) for _ in "qkv"]
    bounds = torch.tensor([0, 4 * size, 8 * size], dtype=torch.int32)
    for ends, of_k, what in (
        ([0, 8 * size - 1, 8 * size], None, f"multiples of {parts}, from 0 to the {8 * size} tok"),
        ([0, 4 * size], None, f"multiples of {parts}, from 0 to the {8 * size} tokens"),
        ([0, 9 * size], None, "must name rows of the tensor"),
        ([0, 2 * size, 8 * size], bounds, "the same sequences of queries and of keys"),
    ):
        if device().type == "cuda":
            break  # the host does not wait for numbers on a GPU
        of_q = torch.tensor(ends, dtype=torch.int32)
        given = {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_q if of_k is None else of_k}
        with raises(AssertionError, f"core: .*{what}"):
            attention(**options)(*heads, **given)
    given = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    for layer, what in (
        (attention(window_size=(4, 0), **options), "window_size with cp_comm_type='a2a'"),
        (
            attention(
                "all_gather", **options | {"attn_mask_type": "padding", "window_size": (2, 2)}
            ),
            "behind a query of packed sequences with cp_comm_type='a2a' alone",
        ),
    ):
        with raises(NotImplementedError, what):
            layer(*heads, **given)
    empty = [torch.ones(0, HEADS, D).requires_grad_() for _ in "qkv"]
    cases = [(way, {}) for way in ways()]
    cases += [(way, {"window_size": (4, 0)}) for way in ("a2a", "all_gather")]
    for (way, more), ends in product(cases, ([0], [0, 0, 0])):
        bounds = torch.tensor(ends, dtype=torch.int32)
        layer = attention(way, **options, **more)
        out = layer(*empty, cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        out.sum().backward()
        assert out.shape == (0, HEADS * D)
        assert all(one.grad.shape == one.shape for one in empty)


@scene
def packed_sequences_have_every_option():
    _, size = rank_and_size()
    even = [4 * size, 0, 8 * size, 2 * size]
    sink = torch.zeros(HEADS, device=device())
    types = ((torch.float32, 1e-5), (torch.bfloat16, 1.5e-2))
    sinks = {"softmax_type": "off-by-one", "device": device()}
    for way, strategy, lengths, (options, formulas), (dtype, tolerance) in product(
        ("a2a", "all_gather"),
        te.CPLoadBalancingStrategy,
        (even, [3 * size, 0, 7 * size - 1, 1]),
        (
            ({"window_size": (5, 0)}, {"window": 5}),
            (sinks, {"sink": sink}),
            (sinks | {"attn_mask_type": "padding"}, {"sink": sink, "is_causal": False}),
            ({"softcap": 0.5}, {"cap": 0.5}),
        ),
        types,
    ):
        tensors, starts = packed(lengths, even, dtype=dtype)
        given = {"qkv_format": "thd", "attn_mask_type": "padding_causal"} | options
        layer = attention(way, strategy=strategy, **given)
        what = f"{way} {strategy} {lengths} {options} {dtype}"
        here = rows_here(starts, strategy)
        check_packed(layer, tensors, starts, lengths, here, tolerance, what, **formulas)


@scene
def bad_input():
    here, (_, size) = tokens_here(), rank_and_size()
    q, k, v, _ = (one[:, here] for one in whole())
    for layer, keywords, what in (
        (attention(attn_mask_type="padding"), {}, "padding in dense formats"),
        (attention(attn_mask_type="arbitrary"), {}, "arbitrary"),
        (attention(), {"core_attention_bias_type": "alibi"}, "core_attention_bias"),
        (attention(window_size=(4, 0)), {}, "window_size with cp_comm_type='a2a' or 'all_gather'"),
        (attention(softcap=1.0), {}, "softcap with cp_comm_type='a2a' or 'all_gather'"),
        (attention(attention_dropout=0.1), {}, "attention_dropout with"),
        (attention(softmax_type="off-by-one", device=device()), {}, "softmax_type with"),
    ):
        mask = {"attention_mask": torch.zeros(B, 1, 1, len(here), dtype=torch.bool)}
        with raises(NotImplementedError, what):
            layer(q, k, v, **mask, **keywords)
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
    alone = dist.new_group([0])
    for way, group in (("p2p", alone), ("a2a", alone), ("a2a+p2p", [dist.group.WORLD, alone])):
        if dist.get_rank() > 0:
            with raises(RuntimeError, "this rank is not in cp_group; give the group that has it"):
                layer.set_context_parallel_group(group, None, None, way)
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
        is_other = bool(rank % 2 ^ rank // 2)
        setting = "core: the mask, keys, values or another setting of the call must be the same"
        with raises(RuntimeError, setting):
            layer(*own, attn_mask_type=("causal", "no_mask")[is_other])
        longer = [own[0], *torch.ones(2, 1, 8 + 4 * is_other, HEADS, D)]
        with raises(RuntimeError, setting):
            layer(*longer, attn_mask_type="no_mask")
        with (
            torch.autocast(device().type, torch.bfloat16, enabled=is_other),
            raises(RuntimeError, "core: the input's type must be the same"),
        ):
            layer(*own)
        assert torch.isfinite(layer(*own)).all()


@scene
def ranks_that_want_other_gradients():
    rank, _ = rank_and_size()
    is_other = bool(rank % 2 ^ rank // 2)
    for way, frozen in product(ways(), range(4)):
        how = {"softmax_type": "learnable", "device": device()} if way == "a2a" else {}
        layer = attention(way, name="core", **how)
        own = [torch.ones(1, 8, HEADS, D).requires_grad_() for _ in "qkv"]
        wanted = [*own, *layer.parameters()]
        if frozen < len(wanted):
            wanted[frozen].requires_grad_(not is_other)
            with raises(RuntimeError, "core: the set of what wants gradients must be the same"):
                layer(*own)
            wanted[frozen].requires_grad_()
        layer(*own).sum().backward()


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
