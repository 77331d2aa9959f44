"""DotProductAttention against the formula in FP64, with gradients: every mask, layout, window, bias and softmax."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

import te_fast.pytorch as te
from attention_reference import F64, attend_one, attends, slopes_of
from selection import every_pair, sampled
from te_fast.attention.scores import backends
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from te_fast.runtime.compiling import CAN_COMPILE

HEADS, GROUPS, D = 4, 2, 8
MASKS = ("no_mask", "causal", "causal_bottom_right")
compiles = pytest.mark.skipif(not CAN_COMPILE, reason="torch 2.8 or later")
PADDED = ("padding", "padding_causal", "padding_causal_bottom_right")


def relative(got, wanted):
    return ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-6)).item()


class Case:
    """Heads of sequences, padded to the longest sequence, and the formula's results for them."""

    def __init__(self, lengths_q, lengths_k, *, groups=GROUPS, d_v=D, dtype=F64):
        self.lengths_q, self.lengths_k = lengths_q, lengths_k
        self.batch, self.queries, self.keys = len(lengths_q), max(lengths_q), max(lengths_k)

        def heads(size, count, d):
            return torch.randn(self.batch, size, count, d, dtype=dtype).requires_grad_()

        self.q = heads(self.queries, HEADS, D)
        self.k, self.v = heads(self.keys, groups, D), heads(self.keys, groups, d_v)
        self.d_v = d_v
        self.ends = [torch.tensor([0, *ls]).cumsum(0).int() for ls in (lengths_q, lengths_k)]

    def leaves(self):
        return [self.q, self.k, self.v]

    def wanted(self, kind, *, window=(-1, -1), bottom_right=True, masked=None, **options):
        """Results ``(batch, queries, heads · d_v)``; zero behind the end of a sequence."""
        per_batch = {name: options.pop(name) for name in ("bias", "pre_bias") if name in options}
        rows = []
        for b, (lq, lk) in enumerate(zip(self.lengths_q, self.lengths_k, strict=True)):
            mask = attends(kind, lq, lk, window, bottom_right)
            if masked is not None:
                mask &= ~masked[b, 0]
            own = {name: value[b][:, :lq, :lk] for name, value in per_batch.items()}
            sequences = [t.double()[b, :n] for t, n in ((self.q, lq), (self.k, lk), (self.v, lk))]
            scale = options.get("scale", 1 / math.sqrt(D))
            y = attend_one(*sequences, mask, **{"scale": scale, **options, **own}).flatten(1)
            rows.append(torch.nn.functional.pad(y, (0, 0, 0, self.queries - lq)))
        return torch.stack(rows)

    def masks(self):
        """Padding masks ``(batch, 1, 1, size)``, True behind the end of a sequence."""
        return tuple(
            (torch.arange(size) >= torch.tensor(lengths)[:, None])[:, None, None]
            for size, lengths in ((self.queries, self.lengths_q), (self.keys, self.lengths_k))
        )

    def given(self, fmt):
        """The heads in the layout of a format."""
        if fmt == "bshd":
            return self.leaves()
        if fmt == "sbhd":
            return [t.transpose(0, 1) for t in self.leaves()]
        lengths = (self.lengths_q, self.lengths_k, self.lengths_k)
        return [
            torch.cat([t[b, :n] for b, n in enumerate(ns)])
            for t, ns in zip(self.leaves(), lengths, strict=True)
        ]

    def padded(self, out, fmt):
        """A result as ``(batch, queries, ...)``."""
        if fmt == "bshd":
            return out
        if fmt == "sbhd":
            return out.transpose(0, 1)
        parts = out.split(list(self.lengths_q))
        pads = [(0, 0, 0, self.queries - len(part)) for part in parts]
        return torch.stack(
            [torch.nn.functional.pad(p, pad) for p, pad in zip(parts, pads, strict=True)]
        )

    def compare(self, out, wanted, more=(), bound=1e-12):
        """Compare results and gradients."""
        assert relative(out, wanted) < bound
        grad = torch.randn_like(wanted)
        leaves = [*self.leaves(), *more]
        got = torch.autograd.grad(out, leaves, grad.to(out.dtype), retain_graph=True)
        for mine, theirs in zip(got, torch.autograd.grad(wanted, leaves, grad), strict=True):
            assert relative(mine, theirs) < bound or theirs.abs().max() < 1e-12


def module(groups=GROUPS, channels=D, **options):
    return te.DotProductAttention(HEADS, channels, num_gqa_groups=groups, **options)


@pytest.mark.parametrize(
    ("fmt", "kind", "queries", "keys"),
    sampled(
        ["sbhd", "bshd"],
        MASKS,
        [
            pytest.param(7, 7),
            pytest.param(3, 8),
            pytest.param(8, 3),
            pytest.param(1, 5),
        ],
    ),
)
def test_masks_of_whole_sequences(fmt, kind, queries, keys):
    case = Case([queries] * 2, [keys] * 2)
    out = module(qkv_format=fmt, attn_mask_type=kind)(*case.given(fmt))
    case.compare(case.padded(out, fmt), case.wanted(kind))


@pytest.mark.parametrize(
    ("kind", "window", "bottom_right"),
    sampled([*MASKS, "arbitrary"], [(2, 0), (0, 0), (3, 2)], [None, True, False], quick=every_pair),
)
def test_windows(kind, window, bottom_right):
    if "causal" in kind and window[1]:
        window = (window[0], 0)
    case = Case([6, 6], [9, 9])
    masked = torch.rand(2, 1, 6, 9) < 0.3 if kind == "arbitrary" else None
    options = {"window_size": window, "bottom_right_diagonal": bottom_right}
    out = module(qkv_format="bshd", attn_mask_type=kind, **options)(*case.leaves(), masked)
    lasts = bottom_right is not False
    wanted = case.wanted(kind, window=window, bottom_right=lasts, masked=masked)
    case.compare(out, wanted)


@pytest.mark.parametrize("fmt", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("by", ["mask", "lengths"])
def test_padding(fmt, kind, by):
    case = Case([5, 2, 7], [5, 2, 7])
    layer = module(qkv_format=fmt, attn_mask_type=kind)
    if by == "mask":
        if fmt == "thd":
            pytest.skip("packed sequences have lengths")
        out = layer(*case.given(fmt), attention_mask=case.masks()[0])
    else:
        out = layer(*case.given(fmt), cu_seqlens_q=case.ends[0], cu_seqlens_kv=case.ends[1])
    case.compare(case.padded(out, fmt), case.wanted(kind))


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("window", [None, (1, 0)])
def test_padding_of_cross_attention(fmt, kind, window):
    case = Case([5, 2, 4], [3, 6, 4])
    layer = module(qkv_format=fmt, attn_mask_type=kind, attention_type="cross", window_size=window)
    if fmt == "thd":
        out = layer(*case.given(fmt), cu_seqlens_q=case.ends[0], cu_seqlens_kv=case.ends[1])
    else:
        out = layer(*case.given(fmt), attention_mask=case.masks())
    case.compare(case.padded(out, fmt), case.wanted(kind, window=window or (-1, -1)))


def test_gaps_between_packed_sequences():
    case = Case([3, 2], [3, 2])
    starts = torch.tensor([0, 5, 9], dtype=torch.int32)
    packed = []
    for tensor in case.leaves():
        rows = torch.full((9, *tensor.shape[2:]), math.nan, dtype=F64)
        packed.append(torch.cat([tensor[0, :3], rows[:2], tensor[1, :2], rows[:2]]))
    ends = case.ends[0]
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    padded = {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    layer = module(qkv_format="thd", attn_mask_type="padding_causal")
    out = layer(*packed, **given, **padded, max_seqlen_q=3, max_seqlen_kv=3)
    assert torch.equal(out[3:5], torch.zeros(2, HEADS * D, dtype=F64))
    got = torch.stack([out[:3], torch.nn.functional.pad(out[5:7], (0, 0, 0, 1))])
    case.compare(got, case.wanted("padding_causal"))


@pytest.mark.parametrize("kind", ["no_mask", "causal"])
def test_values_of_other_size_than_keys(kind):
    case = Case([6], [6], d_v=4)
    out = module(channels=(D, 4), qkv_format="bshd", attn_mask_type=kind)(*case.leaves())
    case.compare(out, case.wanted(kind))


@pytest.mark.parametrize("kind", ["no_mask", "causal", "padding"])
@pytest.mark.parametrize("where", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("shape", [(2, HEADS, 6, 6), (1, HEADS, 6, 6), (1, 1, 1, 6)])
def test_biases(kind, where, shape):
    case = Case([6, 4], [6, 4]) if kind == "padding" else Case([6, 6], [6, 6])
    bias = torch.randn(shape, dtype=F64, requires_grad=True)
    layer = module(qkv_format="bshd", attn_mask_type=kind, softmax_scale=0.3)
    mask = case.masks()[0] if kind == "padding" else None
    options = {"core_attention_bias_type": where, "core_attention_bias": bias}
    out = layer(*case.leaves(), attention_mask=mask, **options)
    name = "pre_bias" if where == "pre_scale_bias" else "bias"
    whole = {name: bias.expand(2, HEADS, 6, 6)}
    case.compare(out, case.wanted(kind, scale=0.3, **whole), [bias])


@pytest.mark.parametrize("kind", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("given", [None, "own"])
def test_alibi(kind, given):
    case = Case([5, 5], [7, 7])
    slopes = None if given is None else torch.rand(HEADS)
    layer = module(qkv_format="bshd", attn_mask_type=kind)
    out = layer(*case.leaves(), core_attention_bias_type="alibi", alibi_slopes=slopes)
    shift = 0 if kind == "causal" else 2
    far = (torch.arange(7) - torch.arange(5)[:, None] - shift).abs()
    bias = -(slopes_of(HEADS) if slopes is None else slopes.double())[:, None, None] * far
    case.compare(out, case.wanted(kind, bias=bias.expand(2, HEADS, 5, 7)), bound=1e-6)


def test_slopes_of_heads_that_are_no_power_of_two():
    layer = te.DotProductAttention(6, D, attn_mask_type="causal", qkv_format="bshd")
    q, k, v = torch.randn(3, 1, 4, 6, D, dtype=F64)
    out = layer(q, k, v, core_attention_bias_type="alibi")
    far = (torch.arange(4) - torch.arange(4)[:, None]).abs()
    mask = attends("causal", 4, 4)
    bias = -slopes_of(6)[:, None, None] * far
    wanted = attend_one(q[0], k[0], v[0], mask, 1 / math.sqrt(D), bias=bias)
    assert relative(out[0], wanted.flatten(1)) < 1e-6


@pytest.mark.parametrize("kind", ["no_mask", "causal", "padding"])
@pytest.mark.parametrize("softmax", ["off-by-one", "learnable"])
def test_sinks(kind, softmax):
    case = Case([6, 3], [6, 3]) if kind == "padding" else Case([6, 6], [6, 6])
    layer = module(qkv_format="bshd", attn_mask_type=kind, softmax_type=softmax, device="cpu")
    sink = torch.zeros(HEADS, dtype=F64)
    more = []
    if softmax == "learnable":
        assert list(layer.state_dict()) == ["softmax_offset"]
        layer.to(F64)
        with torch.no_grad():
            layer.softmax_offset.normal_()
        sink, more = layer.softmax_offset, [layer.softmax_offset]
    mask = case.masks()[0] if kind == "padding" else None
    case.compare(layer(*case.leaves(), mask), case.wanted(kind, sink=sink), more)


@pytest.mark.parametrize("kind", ["no_mask", "causal", "padding"])
def test_max_logit(kind):
    case = Case([4, 4], [4, 4])
    layer = module(qkv_format="bshd", attn_mask_type=kind, return_max_logit=True)
    mask = case.masks()[0] if kind == "padding" else None
    out, largest = layer(*case.leaves(), mask)
    case.compare(out, case.wanted(kind))
    scores = torch.einsum("bqhd,bkhd->bhqk", case.q, case.k.repeat_interleave(2, 2)) / math.sqrt(D)
    seen = attends("causal" if kind == "causal" else "no_mask", 4, 4)
    assert torch.allclose(largest, scores.masked_fill(~seen, -math.inf).amax((0, 2, 3)))


@pytest.mark.parametrize(
    ("fmt", "kind", "window"),
    sampled(["sbhd", "bshd", "thd"], [*MASKS, *PADDED], [None, (2, 0)], quick=every_pair),
)
def test_capped_scores(fmt, kind, window):
    if fmt == "thd" and "padding" not in kind:
        kind = "padding"
    lengths = ([6, 4], [6, 4]) if "padding" in kind else ([5, 5], [7, 7])
    case = Case(*lengths)
    layer = module(qkv_format=fmt, attn_mask_type=kind, window_size=window, softcap=1.5)
    given = {}
    if fmt == "thd":
        given = {"cu_seqlens_q": case.ends[0], "cu_seqlens_kv": case.ends[1]}
    elif "padding" in kind:
        given = {"attention_mask": case.masks()[0]}
    out = layer(*case.given(fmt), **given)
    wanted = case.wanted(kind, window=window or (-1, -1), softcap=1.5)
    case.compare(case.padded(out, fmt), wanted)
    assert relative(out, layer(*case.given(fmt), softcap=0.0, **given)) > 1e-3


@pytest.mark.parametrize("where", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
def test_capped_scores_with_biases_and_sinks(where, softmax):
    # As in Transformer Engine 2.20.2, the cap applies to a bias that is added before the scale, and not to a bias that
    # is added after the scale.
    case = Case([6, 6], [6, 6], d_v=4)
    options = {"softmax_type": softmax, "return_max_logit": True, "device": "cpu"}
    layer = module(channels=(D, 4), qkv_format="bshd", attn_mask_type="causal", **options).to(F64)
    bias = (3 * torch.randn(2, HEADS, 6, 6, dtype=F64)).requires_grad_()
    kinds = {"core_attention_bias_type": where, "core_attention_bias": bias}
    more, sink = [bias], {}
    if softmax == "learnable":
        with torch.no_grad():
            layer.softmax_offset.normal_()
        more, sink = [bias, layer.softmax_offset], {"sink": layer.softmax_offset}
    out, largest = layer(*case.leaves(), softcap=0.8, **kinds)
    name = "pre_bias" if where == "pre_scale_bias" else "bias"
    case.compare(out, case.wanted("causal", softcap=0.8, **{name: bias}, **sink), more)
    scores = torch.einsum("bqhd,bkhd->bhqk", case.q, case.k.repeat_interleave(2, 2))
    if where == "pre_scale_bias":
        scores = 0.8 * torch.tanh((scores + bias) / math.sqrt(D) / 0.8)
    else:
        scores = 0.8 * torch.tanh(scores / math.sqrt(D) / 0.8) + bias
    seen = attends("causal", 6, 6)
    assert torch.allclose(largest, scores.masked_fill(~seen, -math.inf).amax((0, 2, 3)))


def test_capped_scores_that_attend_to_nothing_and_dropout():
    case = Case([4, 4], [4, 4])
    masked = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    masked[0, :, 1] = True
    layer = module(
        qkv_format="bshd", attn_mask_type="arbitrary", softcap=2.0, attention_dropout=1.0
    )
    assert not layer(*case.leaves(), masked).any()
    out = layer.eval()(*case.leaves(), masked)
    assert not out[0, 1].any()
    case.compare(out, case.wanted("arbitrary", masked=masked, softcap=2.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_capped_scores_in_16_bits(dtype):
    case = Case([16, 16], [16, 16], dtype=dtype)
    out = module(qkv_format="bshd", attn_mask_type="causal", softcap=0.5)(*case.leaves())
    assert out.dtype == dtype
    bound = 2e-3 if dtype == torch.float16 else 1.5e-2
    case.compare(out, case.wanted("causal", softcap=0.5), bound=bound)


@pytest.mark.parametrize("cap", [-1.0, math.inf, math.nan])
def test_caps_are_finite_and_not_negative(cap):
    case = Case([4], [4])
    with pytest.raises(ValueError, match="softcap must be finite and not negative"):
        module(qkv_format="bshd")(*case.leaves(), softcap=cap)
    with pytest.raises(ShapeError, match="softcap"):
        module(qkv_format="bshd", softcap=cap)(*case.leaves())


def test_policies_of_packed_sequences_are_refused_by_name():
    case = Case([4], [4])
    layer = module(qkv_format="bshd")
    with pytest.raises(UnsupportedError, match="thd_attention_policies"):
        layer(*case.leaves(), thd_attention_policies=[{"attn_mask_type": "causal"}])
    with pytest.raises(ValueError, match="thd_attention_policy_dispatch must be one of"):
        layer(*case.leaves(), thd_attention_policy_dispatch="each")
    layer(*case.leaves(), thd_attention_policy_dispatch="grouped")


def test_ranks_of_context_parallelism_share_tokens_by_a_known_strategy():
    layer = module()
    assert layer.load_balancing_strategy is te.CPLoadBalancingStrategy.DUAL_CHUNK_SWAP
    layer.set_context_parallel_group(
        None, None, None, "p2p", te.CPLoadBalancingStrategy("no_load_balance")
    )
    assert layer.load_balancing_strategy is te.CPLoadBalancingStrategy.NO_LOAD_BALANCE
    with pytest.raises(AssertionError, match="load_balancing_strategy"):
        layer.set_context_parallel_group(
            None, None, None, load_balancing_strategy="dual_chunk_swap"
        )


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("fmt", ["sbhd", "thd"])
def test_packed_heads(dim, fmt):
    shape = [6, 2, HEADS, D] if fmt == "sbhd" else [6, HEADS, D]
    parts = [torch.randn(shape) for _ in range(3)]
    layer = module(groups=HEADS, qkv_format=fmt, attn_mask_type="padding_causal")
    ends = torch.tensor([0, 4, 6], dtype=torch.int32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "qkv_interleave_dim": dim}
    wanted = layer(*parts, **given)
    assert torch.equal(layer(qkv_layer=torch.stack(parts, dim), **given), wanted)
    packed = layer(parts[0], kv_layer=torch.stack(parts[1:], dim), **given)
    assert torch.equal(packed, wanted)
    for wrong in ({"qkv_layer": [1.0]}, {"query_layer": parts[0], "kv_layer": 3}):
        with pytest.raises(DtypeError, match="kv_layer must be a torch.Tensor"):
            layer(**wrong, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "padding_causal", "causal_bottom_right"])
def test_other_types(dtype, kind):
    case = Case([6, 4], [6, 4], dtype=dtype) if "pad" in kind else Case([6, 6], [9, 9], dtype=dtype)
    mask = case.masks()[0] if "pad" in kind else None
    out = module(qkv_format="bshd", attn_mask_type=kind)(*case.leaves(), mask)
    assert out.dtype == dtype
    bound = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    case.compare(out, case.wanted(kind), bound=bound)


def test_rows_of_nothing_are_zero_and_have_no_gradients():
    case = Case([4], [4])
    masked = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    masked[..., 2, :] = True
    layer = module(qkv_format="bshd", attn_mask_type="arbitrary")
    out = layer(*case.leaves(), masked)
    assert torch.equal(out[0, 2], torch.zeros(HEADS * D, dtype=F64))
    out.sum().backward()
    assert torch.equal(case.q.grad[0, 2], torch.zeros(HEADS, D, dtype=F64))
    assert all(torch.isfinite(leaf.grad).all() for leaf in case.leaves())


@pytest.mark.parametrize("kind", ["causal", "padding_causal"])
def test_no_tokens(kind):
    layer = module(qkv_format="bshd", attn_mask_type=kind)
    q, k, v = torch.zeros(2, 0, HEADS, D), *torch.zeros(2, 2, 0, GROUPS, D)
    ends = torch.zeros(3, dtype=torch.int32)
    assert layer(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends).shape == (2, 0, HEADS * D)
    how = {"softmax_type": "learnable", "device": "cpu"}
    packed = module(qkv_format="thd", attn_mask_type="padding", **how)
    bias = torch.zeros(1, HEADS, 0, 0, requires_grad=True)
    given = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    heads = [t[0].clone().requires_grad_() for t in (q, k, v)]
    out = packed(*heads, cu_seqlens_q=ends, cu_seqlens_kv=ends, **given)
    assert out.shape == (0, HEADS * D)
    out.sum().backward()
    # A parameter without a gradient would stop DistributedDataParallel.
    assert all(t.grad.shape == t.shape for t in (*heads, bias, packed.softmax_offset))


def test_recomputed_attention_has_the_same_bits():
    case = Case([6, 6], [6, 6], dtype=torch.float32)
    layer = module(qkv_format="bshd")
    grads = []
    for recomputes in (False, True):
        out = layer(*case.leaves(), checkpoint_core_attention=recomputes)
        grads.append(torch.autograd.grad(out.square().sum(), case.leaves()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Tracker:
    """A tracker of random numbers with one state."""

    def __init__(self):
        self.state, self.forks = torch.random.get_rng_state(), 0

    def get_states(self):
        return {"model": self.state.clone()}

    def set_states(self, states):
        self.state = states["model"]

    def fork(self, name="model"):
        import contextlib

        @contextlib.contextmanager
        def region():
            self.forks += 1
            outside = torch.random.get_rng_state()
            torch.random.set_rng_state(self.state)
            try:
                yield
            finally:
                self.state = torch.random.get_rng_state()
                torch.random.set_rng_state(outside)

        return region()


@pytest.mark.parametrize("recomputes", [False, True])
def test_dropout_draws_from_the_tracker(recomputes):
    tracker = Tracker()
    layer = module(qkv_format="bshd", attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    case = Case([8], [8], dtype=torch.float32)
    start, outside = tracker.get_states(), torch.random.get_rng_state()
    first = layer(*case.leaves(), checkpoint_core_attention=recomputes)
    grads = torch.autograd.grad(first.sum(), case.leaves())
    assert torch.equal(torch.random.get_rng_state(), outside)
    behind = tracker.get_states()["model"]
    second = layer(*case.leaves())
    assert not torch.equal(first, second)
    tracker.set_states(start)
    again = layer(*case.leaves())
    assert torch.equal(first, again)
    assert torch.equal(behind, tracker.get_states()["model"])
    wanted = torch.autograd.grad(again.sum(), case.leaves())
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    assert torch.allclose(layer.eval()(*case.leaves()).double(), case.wanted("causal"), atol=1e-5)


def test_dropout_keeps_the_mean():
    layer = module(
        groups=HEADS, qkv_format="bshd", attention_dropout=0.25, attn_mask_type="no_mask"
    )
    q, k = torch.randn(2, 1, 32, HEADS, D)
    ones = torch.ones(1, 32, HEADS, D)
    out = torch.stack([layer(q, k, ones) for _ in range(40)])
    assert abs(out.mean().item() - 1) < 0.05
    assert out.std().item() > 0.05


@pytest.mark.slow
@compiles
def test_compiled():
    layer = module(qkv_format="bshd", attn_mask_type="padding_causal")
    case = Case([6, 4], [6, 4], dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    options = {"attention_mask": case.masks()[0]}
    case.compare(compiled(*case.leaves(), **options), layer(*case.leaves(), **options), bound=1e-6)


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling])
def test_attention_in_a_region_is_in_high_precision(recipe):
    case = Case([6], [6])
    layer = module(qkv_format="bshd")
    with te.autocast(recipe=recipe()):
        out = layer(*case.leaves())
    case.compare(out, case.wanted("causal"))


@pytest.mark.parametrize("field", ["fp8_dpa", "fp8_mha"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=compiles)])
def test_attention_in_fp8_raises(field, compiled):
    layer, case = module(qkv_format="bshd"), Case([6], [6], dtype=torch.float32)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    if not compiled:  # an earlier region whose recipe differs in this alone changes nothing
        with te.autocast(recipe=DelayedScaling()):
            layer(*case.leaves())
    with (
        te.autocast(recipe=DelayedScaling(**{field: True})),
        pytest.raises(Exception, match=f"attention in FP8 \\({field}=True"),
    ):
        call(*case.leaves())


def test_state_of_transformer_engine_loads():
    layer = module()
    state = {"_extra_state": torch.empty(0, dtype=torch.uint8)}
    old = {"fused_attention._extra_state": torch.empty(0, dtype=torch.uint8)}
    for known in (state, old, {}):
        layer.load_state_dict(known)
    assert layer.state_dict() == {}
    copy = pickle.loads(pickle.dumps(layer))
    heads = Case([3], [3]).given("sbhd")
    assert torch.equal(copy(*heads), layer(*heads))


BAD = {
    "heads": ({"query_layer": torch.zeros(4, 1, 3, D)}, ShapeError, "4 heads of 8"),
    "channels": ({"key_layer": torch.zeros(4, 1, GROUPS, 4)}, ShapeError, "2 heads of 8"),
    "rank": ({"query_layer": torch.zeros(4, HEADS, D)}, ShapeError, "4 dimensions in sbhd"),
    "nothing": ({"value_layer": None}, ShapeError, "value_layer must be a torch.Tensor"),
    "type": ({"query_layer": torch.zeros(4, 1, HEADS, D).half()}, DtypeError, "one type"),
    "tokens": ({"value_layer": torch.zeros(3, 1, GROUPS, D)}, ShapeError, "the same tokens"),
    "mask": ({"attn_mask_type": "diagonal"}, ShapeError, "attn_mask_type must be one of"),
    "window": ({"window_size": (3, 4, 5)}, DtypeError, "two integers"),
    "negative": ({"attn_mask_type": "no_mask", "window_size": (-2, 3)}, ShapeError, "window_size"),
    "format": ({"qkv_format": "hbsd"}, ShapeError, "qkv_format must be one of"),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, ShapeError, "needs an attention_mask"),
    "float mask": (
        {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(4, 4)},
        DtypeError,
        "torch.bool",
    ),
    "padding": ({"attn_mask_type": "padding"}, ShapeError, "need attention_mask"),
    "mask's size": (
        {"attn_mask_type": "padding", "attention_mask": torch.zeros(1, 1, 1, 5).bool()},
        ShapeError,
        "must have shape \\[1, 1, 1, 4\\]",
    ),
    "bias": ({"core_attention_bias_type": "post_scale_bias"}, ShapeError, "takes a core"),
    "unused bias": ({"core_attention_bias": torch.zeros(1, 1, 4, 4)}, ShapeError, "takes no core"),
    "slopes": (
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.zeros(3)},
        ShapeError,
        "alibi_slopes must be",
    ),
    "score_mod": ({"score_mod": lambda *_: None}, UnsupportedError, "score_mod"),
    "bf16": ({"bf16_backward": True}, UnsupportedError, "bf16_backward"),
    "caps": ({"softcap": torch.ones(2)}, DtypeError, "softcap must be a number"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    given, error, match = BAD[name]
    heads = {
        "query_layer": torch.zeros(4, 1, HEADS, D),
        "key_layer": torch.zeros(4, 1, GROUPS, D),
        "value_layer": torch.zeros(4, 1, GROUPS, D),
    }
    with pytest.raises(error, match=match):
        module()(**heads | given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"attn_mask_type": "causal"}, "needs a mask type with padding"),
        ({"cu_seqlens_q": None}, "needs cu_seqlens_q"),
        ({"cu_seqlens_kv": torch.tensor([0, 4])}, "int32"),
        ({"cu_seqlens_kv": torch.tensor([0, 2, 4]).int()}, "same number of sequences"),
    ],
)
def test_bad_packed_calls(given, match):
    ends = torch.tensor([0, 4], dtype=torch.int32)
    options = {"attn_mask_type": "padding", "cu_seqlens_q": ends, "cu_seqlens_kv": ends} | given
    heads = torch.zeros(4, HEADS, D), *torch.zeros(2, 4, GROUPS, D)
    with pytest.raises(ShapeError, match=match):
        module(qkv_format="thd")(*heads, **options)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"groups": 3}, ShapeError),
        ({"tp_size": 4}, ShapeError),
        ({"softmax_type": "sigmoid"}, ShapeError),
        ({"attention_type": "both"}, ShapeError),
        ({"attn_mask_type": "nothing"}, ShapeError),
    ],
)
def test_bad_modules(given, error):
    with pytest.raises(error):
        module(**given)


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_ranks_have_their_share_of_the_heads(softmax_type):
    case = Case([5, 7], [5, 7])
    whole = module(softmax_type=softmax_type, device="cpu")
    parts = [module(softmax_type=softmax_type, device="cpu", tp_size=2) for _ in range(2)]
    if softmax_type == "learnable":
        with torch.no_grad():
            whole.softmax_offset.normal_()
            for part, offset in zip(parts, whole.softmax_offset.chunk(2), strict=True):
                part.softmax_offset.copy_(offset)
    q, k, v = case.given("sbhd")
    shares = zip(*(tensor.chunk(2, dim=2) for tensor in (q, k, v)), strict=True)
    given = [part(*share) for part, share in zip(parts, shares, strict=True)]
    assert relative(torch.cat(given, -1), whole(q, k, v)) < 1e-6
    with pytest.raises(ShapeError, match="2 heads of 8 channels, got 4"):
        parts[0](q, k, v)
    with pytest.raises(ShapeError, match="alibi_slopes"):
        parts[0](*(t.chunk(2, dim=2)[0] for t in (q, k, v)), core_attention_bias_type="alibi")


def test_no_kernel_left(monkeypatch):
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UnsupportedError, match="no kernel is left"):
        module()


def test_kernels_that_are_left_and_cannot_compute_it():
    layer = module()
    with (
        pytest.raises(
            UnsupportedError, match=f"{layer.name}: none of the kernels .*: FLASH_ATTENTION"
        ),
        backends((True, False, False), layer.name),
    ):
        raise RuntimeError("No available kernel. Aborting execution.")
    with pytest.raises(RuntimeError, match="other"), backends((True, False, True), layer.name):
        raise RuntimeError("other")


def test_windows_that_are_nearly_right_warn():
    with pytest.warns(UserWarning, match="window_size should be"):
        layer = module(window_size=(-1, -1))
    case = Case([4], [4])
    out = layer(*case.given("sbhd"))
    case.compare(case.padded(out, "sbhd"), case.wanted("causal"))


@pytest.mark.parametrize(
    ("name", "value"), [("window_size", (1, 0)), ("attn_mask_type", "no_mask")]
)
def test_attributes_of_the_mask_may_change(name, value):
    tensors = [torch.randn(6, 2, 4, 16) for _ in range(3)]
    changed = te.DotProductAttention(4, 16, attention_dropout=0.0)
    changed(*tensors)
    setattr(changed, name, value)
    made = te.DotProductAttention(4, 16, attention_dropout=0.0, **{name: value})
    assert torch.equal(changed(*tensors), made(*tensors))


def cumulative(*ends, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype)


WRONG_LENGTHS = {
    "fewer than sequences": (cumulative(0, 3), ShapeError, "batch"),
    "more than tokens": (
        cumulative(0, 3, 12),
        ShapeError,
        "12 tokens, and there are 8|9 tokens, and there are 8",
    ),
    "decreasing": (cumulative(0, 8, 3), ShapeError, "must not decrease"),
    "of floats": (cumulative(0, 3, 8, dtype=torch.float32), ShapeError, "float32"),
    "a list": ([0, 3, 8], DtypeError, "cu_seqlens_q must be a torch.Tensor"),
    "elsewhere": (cumulative(0, 3, 8).to("meta"), DeviceError, "must be on cpu"),
}


@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_lengths_that_contradict_padded_heads(name):
    lengths, error, text = WRONG_LENGTHS[name]
    q = torch.randn(2, 8, HEADS, D)
    layer = te.DotProductAttention(HEADS, D, qkv_format="bshd", attn_mask_type="padding")
    with pytest.raises(error, match=text):
        layer(q, q, q, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)


WRONG_PACKINGS = {
    "beyond the tensor": ({"cu_seqlens_q": cumulative(0, 6, 16)}, ShapeError, "which has 8"),
    "decreasing": ({"cu_seqlens_q": cumulative(0, 8, 3)}, ShapeError, "must not decrease"),
    "a list": ({"cu_seqlens_q": [0, 8]}, DtypeError, "must be a torch.Tensor, got list"),
    "too short": ({"max_seqlen_q": 2}, ShapeError, "max_seqlen_q must be at least 5"),
    "too short for keys": ({"max_seqlen_kv": 4}, ShapeError, "max_seqlen_kv must be at least 5"),
    "no number": ({"max_seqlen_q": "a"}, DtypeError, "max_seqlen_q must be an integer"),
    "fewer starts": ({"cu_seqlens_q_padded": cumulative(0, 4)}, ShapeError, "3 elements"),
    "overlapping": ({"cu_seqlens_q_padded": cumulative(0, 2, 8)}, ShapeError, "each once"),
    "starts in a list": ({"cu_seqlens_kv_padded": [0, 3, 8]}, DtypeError, "torch.Tensor"),
}


@pytest.mark.parametrize("name", WRONG_PACKINGS)
def test_lengths_that_contradict_packed_heads(name):
    wrong, error, text = WRONG_PACKINGS[name]
    t = torch.randn(8, HEADS, D)
    ends = cumulative(0, 3, 8)
    layer = te.DotProductAttention(HEADS, D, qkv_format="thd", attn_mask_type="padding")
    with pytest.raises(error, match=text):
        layer(t, t, t, **{"cu_seqlens_q": ends, "cu_seqlens_kv": ends, **wrong})


def mask_of(*shape):
    return torch.zeros(shape, dtype=torch.bool)


ARBITRARY = {"attn_mask_type": "arbitrary"}
PADDING = {"attn_mask_type": "padding"}
BIAS = {"core_attention_bias_type": "post_scale_bias"}
ALIBI = {"core_attention_bias_type": "alibi"}
WRONG_ARGUMENTS = {
    "mask of other keys": ({"attention_mask": mask_of(2, 1, 8, 9), **ARBITRARY}, ShapeError),
    "mask of other heads": ({"attention_mask": mask_of(2, 3, 8, 8), **ARBITRARY}, ShapeError),
    "mask of one dimension": ({"attention_mask": mask_of(5), **ARBITRARY}, ShapeError),
    "padding by a number": ({"attention_mask": 5, **PADDING}, DtypeError),
    "padding by nothing": ({"attention_mask": (None, None), **PADDING}, DtypeError),
    "bias of other keys": ({"core_attention_bias": torch.zeros(1, 4, 8, 9), **BIAS}, ShapeError),
    "bias of other heads": ({"core_attention_bias": torch.zeros(1, 3, 8, 8), **BIAS}, ShapeError),
    "bias in a list": ({"core_attention_bias": [1], **BIAS}, DtypeError),
    "slopes in a list": ({"alibi_slopes": [1, 2, 3, 4], **ALIBI}, DtypeError),
    "slopes of other sequences": ({"alibi_slopes": torch.ones(3, 4), **ALIBI}, ShapeError),
    "bound by a name": ({"softcap": "a"}, DtypeError),
    "caches by a number": ({"inference_params": 3, **PADDING}, DtypeError),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_arguments_that_do_not_fit_name_the_layer(name):
    given, error = WRONG_ARGUMENTS[name]
    q = torch.randn(8, 2, HEADS, D)
    layer = te.DotProductAttention(HEADS, D, name="mine")
    argument = next(argument for argument in given if not argument.endswith("type"))
    with pytest.raises(error, match=f"mine: .*{argument}|mine: a padding mask"):
        layer(q, q, q, **given)


def test_a_padding_mask_has_the_dimension_of_sequences():
    with pytest.raises(ShapeError, match=r"must have shape \[1, 1, 1, 1\], got \[\]"):
        module(attn_mask_type="padding")(*Case([1], [1]).given("sbhd"), torch.tensor(False))


def test_a_mask_of_fewer_dimensions_broadcasts():
    q = torch.randn(2, 6, HEADS, D)
    layer = te.DotProductAttention(HEADS, D, qkv_format="bshd", return_max_logit=True)
    mask = torch.tensor([0, 0, 1, 0, 1, 1]).bool()
    given = {"attn_mask_type": "arbitrary"}
    for got, wanted in zip(
        layer(q, q, q, mask, **given),
        layer(q, q, q, mask.expand(2, 1, 6, 6), **given),
        strict=True,
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64])
def test_heads_of_other_types_are_refused(dtype):
    q = torch.ones(8, 2, HEADS, D).to(dtype)
    with pytest.raises(DtypeError, match="queries, keys and values must be of one type"):
        te.DotProductAttention(HEADS, D)(q, q, q)


def test_heads_on_several_devices_are_refused():
    q = torch.ones(8, 2, HEADS, D)
    with pytest.raises(DeviceError, match="must be on one device, got cpu, meta, cpu"):
        te.DotProductAttention(HEADS, D)(q, q.to("meta"), q)
    layer = te.DotProductAttention(HEADS, D, softmax_type="learnable", device="meta", name="core")
    with pytest.raises(DeviceError, match="core: softmax_offset is on meta, .* on cpu; move the"):
        layer(q, q, q)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"kv_channels": (16, 16, 16)}, ShapeError),
        ({"attention_dropout": 1.5}, ArgumentError),
        ({"attention_dropout": -0.5}, ArgumentError),
        ({"attention_dropout": "a"}, DtypeError),
        ({"softmax_scale": "a"}, DtypeError),
        ({"softcap": "a"}, DtypeError),
    ],
)
def test_options_that_are_out_of_range(given, error):
    with pytest.raises(error, match=next(iter(given))):
        te.DotProductAttention(HEADS, **{"kv_channels": D, **given})


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (4, 0), (0, 4)])
@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("bias", ["no_bias", "alibi"])
def test_the_largest_of_no_scores(queries, keys, softmax, bias):
    q, k = torch.randn(queries, HEADS, D), torch.randn(keys, HEADS, D)
    options = {"return_max_logit": True, "softmax_type": softmax, "device": "cpu"}
    layer = te.DotProductAttention(HEADS, D, qkv_format="thd", attn_mask_type="padding", **options)
    ends = {"cu_seqlens_q": cumulative(0, queries), "cu_seqlens_kv": cumulative(0, keys)}
    out, largest = layer(q, k, k, core_attention_bias_type=bias, **ends)
    assert torch.equal(out, torch.zeros(queries, HEADS * D))
    assert torch.equal(largest, torch.full((HEADS,), -math.inf))
