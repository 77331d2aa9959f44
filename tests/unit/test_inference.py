"""Key-value caches: steps against attention to whole sequences, in every format, paged or not."""

from __future__ import annotations

import copy
import gc
import pickle
import unittest
import weakref
from collections import OrderedDict

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import te_fast.pytorch as te
from selection import sampled
from te_fast.errors import DtypeError, ShapeError, StateError
from te_fast.pytorch.attention.inference import PagedKVCacheManager
from te_fast.pytorch.graph import set_capture_end, set_capture_start

HIDDEN, HEADS, GROUPS, D, LONGEST = 32, 4, 2, 8, 16


def make(fmt, layer_number=1):
    torch.manual_seed(layer_number)
    layer = te.TransformerLayer(
        HIDDEN,
        48,
        HEADS,
        num_gqa_groups=GROUPS,
        layer_number=layer_number,
        attn_input_format=fmt,
        self_attn_mask_type="padding_causal",
        device="cpu",
    )
    return layer.eval()


def caches(fmt, *, paged=False, batch=3):
    options = {"is_paged": True, "page_size": 4, "total_num_pages": batch * 4} if paged else {}
    sizes = {"num_heads_kv": GROUPS, "head_dim_k": D, "dtype": torch.float32, "max_ctx_len": 7}
    return te.InferenceParams(batch, LONGEST, qkv_format=fmt, **sizes, **options)


def whole(layers, tokens, angles):
    """Run the layers on a whole sequence ``(tokens, hidden)``, and return the result."""
    x = tokens[None]
    for layer in layers:
        other = make("bshd", layer.layer_number)
        x = other(x, self_attn_mask_type="causal", rotary_pos_emb=angles)
    return x[0]


def laid_out(parts, fmt):
    """Lay out the new tokens of all sequences in a format; padding has values that no layer may read."""
    if fmt == "thd":
        return torch.cat(parts)
    size = max(len(part) for part in parts)
    padded = [torch.cat([p, torch.full((size - len(p), HIDDEN), 3.0)]) for p in parts]
    dense = torch.stack(padded)
    return dense if fmt == "bshd" else dense.transpose(0, 1)


def taken_apart(out, lengths, fmt):
    if fmt == "thd":
        return list(out.split(lengths))
    dense = out if fmt == "bshd" else out.transpose(0, 1)
    return [row[:length] for row, length in zip(dense, lengths, strict=True)]


STEPS = [
    {"a": 5, "b": 2, "c": 7},
    {"a": 1, "b": 1, "c": 1},
    {"a": 1, "c": 1},
    {"a": 1, "c": 1, "d": 4},
    {"c": 3, "d": 1},
    {"d": 1, "e": 2},
]


@pytest.mark.parametrize(
    ("fmt", "paged", "rope"), sampled(["bshd", "sbhd", "thd"], [False, True], [False, True])
)
@torch.no_grad()
def test_steps_are_whole_sequences(fmt, paged, rope):
    layers = [make(fmt, 1), make(fmt, 2)]
    params = caches(fmt, paged=paged)
    angles = te.RotaryPositionEmbedding(D)(LONGEST).cpu() if rope else None
    tokens = {name: torch.randn(LONGEST, HIDDEN) for name in "abcde"}
    wanted = {name: whole(layers, tokens[name], angles) for name in tokens}
    seen = dict.fromkeys(tokens, 0)
    for step in STEPS:
        params.pre_step(OrderedDict(step))
        parts = [tokens[name][seen[name] : seen[name] + n] for name, n in step.items()]
        x = laid_out(parts, fmt)
        ends = torch.tensor([0, *step.values()]).cumsum(0).int()
        for layer in layers:
            x = layer(
                x,
                inference_params=params,
                rotary_pos_emb=angles,
                cu_seqlens_q=params.cu_seqlens_q if fmt == "thd" else ends,
            )
        for name, out in zip(step, taken_apart(x, list(step.values()), fmt), strict=True):
            end = seen[name] + step[name]
            assert torch.allclose(out, wanted[name][seen[name] : end], atol=1e-5), (step, name)
            seen[name] = end
    params.reset()
    assert not params.sequences


@pytest.mark.parametrize("paged", [False, True])
def test_steps_inside_and_outside_of_inference_mode(paged):
    layer, found = make("bshd"), []
    tokens = torch.randn(1, 4, HIDDEN)
    for modes in ([torch.inference_mode, torch.no_grad], [torch.no_grad, torch.inference_mode]):
        with modes[0]():
            params = caches("bshd", paged=paged)
        rows = []
        for step in range(4):
            with modes[step % 2]():
                params.pre_step(OrderedDict(a=1))
                x = tokens[:, step : step + 1].clone()
                rows.append(layer(x, inference_params=params))
        found.append(torch.cat(rows, 1).clone())
    assert torch.equal(*found)
    with torch.no_grad():
        wanted = whole([layer], tokens[0], None)
    assert torch.allclose(found[0][0], wanted, atol=1e-5)


def test_caches_of_the_users_own():
    made = []

    class Manager(te.attention.inference.NonPagedKVCacheManager):
        def allocate_memory(self, layer_number):
            made.append(layer_number)
            super().allocate_memory(layer_number)

    params = te.InferenceParams(1, 8, GROUPS, D, torch.float32, custom_cache_manager=Manager)
    params.pre_step(OrderedDict(a=3))
    with torch.no_grad():
        make("bshd")(torch.randn(1, 3, HIDDEN), inference_params=params)
    assert made == [1]
    assert "max_seqlen=8" in repr(params)


def test_bad_caches():
    with pytest.raises(ShapeError, match="head_dim_k is missing"):
        te.InferenceParams(1, 8, 2)
    with pytest.raises(ShapeError, match="page_size must divide"):
        te.InferenceParams(1, 8, 2, D, torch.float32, is_paged=True, page_size=3)
    with pytest.raises(ShapeError, match="total_num_pages must be"):
        te.InferenceParams(1, 8, 2, D, torch.float32, is_paged=True, page_size=4)
    with pytest.raises(ShapeError, match="max_ctx_len"):
        te.InferenceParams(1, 8, 2, D, torch.float32, qkv_format="thd")
    with pytest.raises(ShapeError, match="qkv_format"):
        te.InferenceParams(1, 8, 2, D, torch.float32, qkv_format="tdh")


@pytest.mark.parametrize("paged", [False, True])
def test_steps_that_do_not_fit_change_nothing(paged):
    params = caches("bshd", paged=paged)
    params.pre_step(OrderedDict(a=10))
    before = dict(params.sequences)
    with pytest.raises(ShapeError, match="has 17 tokens"):
        params.pre_step(OrderedDict(a=7))
    with pytest.raises(ShapeError, match="room for 3 sequences"):
        params.pre_step(OrderedDict.fromkeys("abcd", 1))
    assert params.cache_manager.sequences == before
    if paged:
        params.cache_manager.free_pages.clear()
        with pytest.raises(StateError, match="all taken"):
            params.pre_step(OrderedDict(a=1, b=4))
        assert params.cache_manager.sequences == before


def test_bad_calls():
    params = caches("bshd")
    params.pre_step(OrderedDict(a=2))
    layer = make("bshd")
    with pytest.raises(ShapeError, match="needs a mask type with padding"):
        layer(torch.zeros(1, 2, HIDDEN), self_attn_mask_type="causal", inference_params=params)
    with pytest.raises(DtypeError, match="the caches are torch.float32"):
        layer.bfloat16()(torch.zeros(1, 2, HIDDEN).bfloat16(), inference_params=params)


def test_pages_can_be_logged():
    manager = PagedKVCacheManager(4, 16, 2, 8, torch.float32, max_batch_size=2, max_seqlen=32)
    manager.pre_step({"a": 20, "b": 3})
    with unittest.TestCase().assertLogs("PagedKVCacheManager", "DEBUG") as logged:
        manager.print_cache()
    assert [record.getMessage() for record in logged.records] == [
        "pages: 4 (used 3, free 1)",
        "sequence a: 20 tokens, pages [0, 1]",
        "sequence b: 3 tokens, pages [2]",
    ]


@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
@pytest.mark.parametrize("paged", [False, True])
def test_rows_of_the_batch_without_a_sequence(fmt, paged):
    """A batch of one size serves steps of fewer sequences, as graphs need it."""
    layer = make(fmt)
    found = []
    for rows in (2, 3):
        params, own = caches(fmt, paged=paged), []
        torch.manual_seed(0)
        for tokens in (4, 1):
            params.pre_step(OrderedDict({"a": tokens, "b": tokens}))
            new = torch.randn(2, tokens, HIDDEN)
            new = torch.cat((new, torch.full((rows - 2, tokens, HIDDEN), 3.0)))
            new = new if fmt == "bshd" else new.transpose(0, 1)
            with torch.no_grad():
                y = layer(new, inference_params=params)
            own.append((y if fmt == "bshd" else y.transpose(0, 1))[:2])
        found.append(torch.cat(own, 1))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_that_do_not_fit(rows):
    params = caches("bshd", paged=False)
    params.pre_step(OrderedDict({"a": 2, "b": 2}))
    with (
        torch.no_grad(),
        pytest.raises(ShapeError, match=f"the batch has {rows} rows; the inference_params have 2"),
    ):
        make("bshd")(torch.randn(rows, 2, HIDDEN), inference_params=params)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("wrong", [{"b": 1, "a": 1}, {"c": 2, "a": 1, "b": 1}, {"d": 1, "b": 1}])
def test_sequences_in_another_order_than_that_of_the_caches(paged, wrong):
    params = caches("bshd", paged=paged)
    params.pre_step(OrderedDict(a=4, b=2))
    with pytest.raises(ShapeError, match=r"InferenceParams: .* must be in the order \['[ab]'"):
        params.pre_step(OrderedDict(wrong))
    assert dict(params.sequences) == dict(params.cache_manager.sequences) == {"a": 4, "b": 2}
    params.pre_step(OrderedDict(a=1, b=1, c=2))
    params.reset()
    params.pre_step(OrderedDict(b=1, a=1))


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
def test_angles_of_new_tokens_alone_are_too_few(fmt):
    layer, params = make(fmt), caches(fmt)
    for tokens in (4, 1):
        params.pre_step(OrderedDict(a=tokens, b=tokens))
        given = {"cu_seqlens_q": params.cu_seqlens_q, "inference_params": params}
        x = laid_out([torch.randn(tokens, HIDDEN)] * 2, fmt)
        if tokens == 1:
            match = "angles for 1 positions, and there is a sequence of 5 tokens"
            with pytest.raises(ShapeError, match=match):
                layer(x, rotary_pos_emb=te.RotaryPositionEmbedding(D)(1), **given)
        layer(x, rotary_pos_emb=te.RotaryPositionEmbedding(D)(5), **given)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("paged", [False, True])
def test_copies_go_on_by_themselves(paged, copied):
    layer, params = make("bshd"), caches("bshd", paged=paged)
    params.pre_step(OrderedDict({"a": 5, "b": 2}))
    layer(torch.randn(2, 5, HIDDEN), inference_params=params)
    other, x, results = copied(params), torch.randn(2, 1, HIDDEN), []
    for one in (params, other, params):
        one.pre_step(OrderedDict({"a": 1, "b": 1}))
        results.append(layer(x, inference_params=one))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


@pytest.mark.parametrize("paged", [False, True])
def test_caches_keep_no_step_alive_where_gradients_are_on(paged):
    layer, params, results = make("bshd"), caches("bshd", paged=paged), []
    for step in STEPS:
        params.pre_step(OrderedDict(step))
        x = torch.randn(len(step), max(step.values()), HIDDEN, requires_grad=True)
        y = layer(x, inference_params=params)
        y.sum().backward()
        assert torch.isfinite(x.grad).all()
        results.append(weakref.ref(y.grad_fn))
    assert not any(cache.requires_grad for cache in params.cache_manager.cache[1])
    del y
    gc.collect()
    assert not any(result() for result in results)


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
def test_new_keys_are_those_of_the_new_queries(fmt, tokens):
    attention = te.DotProductAttention(HEADS, D, num_gqa_groups=GROUPS, qkv_format=fmt)
    params = caches(fmt)
    params.pre_step(OrderedDict(a=3))
    shape = {"bshd": (1, 3), "sbhd": (3, 1), "thd": (3,)}[fmt]
    other = {"bshd": (1, tokens), "sbhd": (tokens, 1), "thd": (tokens,)}[fmt]
    given = {"attn_mask_type": "padding_causal", "inference_params": params}
    q, k = torch.randn(*shape, HEADS, D), torch.randn(*other, GROUPS, D)
    with pytest.raises(ShapeError, match="key_layer must have the new tokens"):
        attention(q, k, k, **given)
    assert not params.cache_manager.cache
    k = torch.randn(*shape, GROUPS, D)
    attention(q, k, k, **given)


def test_layers_of_one_number_are_told_apart():
    first, second = make("bshd"), make("bshd")
    params, x = caches("bshd"), torch.randn(1, 3, HIDDEN)
    for _ in range(2):  # the first layer may go on
        params.pre_step(OrderedDict(a=3))
        y = first(x, inference_params=params)
        with pytest.raises(StateError, match="another layer .* a layer_number of its own"):
            second(y, inference_params=params)
        assert torch.equal(first(x, inference_params=params), y)
    params.pre_step(OrderedDict(a=3))
    second(x, inference_params=params)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
def test_a_decoder_attends_to_the_whole_encoder_in_every_step(fmt, rope):
    torch.manual_seed(0)
    options = {"num_gqa_groups": GROUPS, "layer_type": "decoder", "device": "cpu"}
    masks = {"self_attn_mask_type": "padding_causal", "enc_dec_attn_mask_type": "no_mask"}
    if fmt == "thd":
        masks["enc_dec_attn_mask_type"] = "padding"
    layer = te.TransformerLayer(
        HIDDEN, 48, HEADS, layer_number=1, attn_input_format=fmt, **masks, **options
    ).eval()
    plain = te.TransformerLayer(HIDDEN, 48, HEADS, attn_input_format="bshd", **options).eval()
    plain.load_state_dict(layer.state_dict())
    angles = te.RotaryPositionEmbedding(D)(LONGEST) if rope else None
    tokens, encoded = torch.randn(2, 7, HIDDEN), torch.randn(2, 5, HIDDEN)
    params, given = caches(fmt, batch=2), {"encoder_output": laid_out(list(encoded), fmt)}
    found = []
    for step in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        params.pre_step(OrderedDict.fromkeys("ab", step.shape[1]))
        if fmt == "thd":
            given["cu_seqlens_q"] = params.cu_seqlens_q
            given["cu_seqlens_kv"] = torch.tensor([0, 5, 10], dtype=torch.int32)
        with torch.no_grad():
            x = laid_out(list(step), fmt)
            y = layer(x, inference_params=params, rotary_pos_emb=angles, **given)
        found.append(torch.stack(taken_apart(y, [step.shape[1]] * 2, fmt)))
    with torch.no_grad():
        wanted = plain(tokens, encoder_output=encoded, rotary_pos_emb=angles)
    torch.testing.assert_close(torch.cat(found, 1), wanted)


@pytest.mark.parametrize("paged", [False, True])
def test_a_call_that_failed_can_be_made_again(paged):
    attention = te.DotProductAttention(HEADS, D, num_gqa_groups=GROUPS, qkv_format="bshd")
    bias = {"core_attention_bias_type": "post_scale_bias"}
    found = []
    for fails in (False, True):
        torch.manual_seed(0)
        params = caches("bshd", paged=paged)
        for step in STEPS:
            params.pre_step(OrderedDict(step))
            shape = len(step), max(step.values())
            heads = [torch.randn(*shape, count, D) for count in (HEADS, GROUPS, GROUPS)]
            given = {"attn_mask_type": "padding_causal", "inference_params": params}
            if fails:
                with pytest.raises(ShapeError, match="core_attention_bias must be"):
                    attention(*heads, core_attention_bias=torch.zeros(1, 1, 9, 1), **bias, **given)
            found.append(attention(*heads, **given))
    for once, twice in zip(found[: len(STEPS)], found[len(STEPS) :], strict=True):
        assert torch.equal(once, twice)


@pytest.mark.parametrize("lengths_of_keys", ["all", "new", None])
@pytest.mark.parametrize("norms_first", [False, True])
def test_new_keys_of_packed_sequences_are_rotated_as_the_queries(lengths_of_keys, norms_first):
    torch.manual_seed(0)
    options = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, "device": "cpu"}
    if norms_first:
        options |= {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True}
    attention = te.MultiheadAttention(HIDDEN, HEADS, qkv_format="thd", layer_number=1, **options)
    attention.eval()
    plain = te.MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", **options).eval()
    plain.load_state_dict(attention.state_dict())
    angles = te.RotaryPositionEmbedding(D)(LONGEST)
    params, kept = caches("thd"), {}
    for step in ({"a": 5, "b": 2}, {"a": 3, "b": 4, "c": 2}, {"b": 1, "c": 2}):
        new = {name: 8 * torch.randn(tokens, HIDDEN) for name, tokens in step.items()}
        kept = {name: torch.cat([kept.get(name, x[:0]), x]) for name, x in new.items()}
        params.pre_step(OrderedDict(step))
        ends = {"all": params.cu_seqlens_kv, "new": params.cu_seqlens_q}.get(lengths_of_keys)
        with torch.no_grad():
            y = attention(
                torch.cat(list(new.values())),
                attn_mask_type="padding_causal",
                cu_seqlens_q=params.cu_seqlens_q,
                cu_seqlens_kv=ends,
                rotary_pos_emb=angles,
                inference_params=params,
            )
            wanted = [
                plain(x[None], attn_mask_type="causal", rotary_pos_emb=angles)[0, -step[name] :]
                for name, x in kept.items()
            ]
        torch.testing.assert_close(y, torch.cat(wanted))


@pytest.mark.parametrize(("fmt", "paged"), sampled(["bshd", "thd"], [False, True]))
def test_operations_of_a_step_serve_later_steps(fmt, paged):
    """A captured step has nothing of its own sequences: their number, their lengths and their order may change."""
    torch.manual_seed(0)
    layer = te.DotProductAttention(
        HEADS, D, num_gqa_groups=GROUPS, qkv_format=fmt, attn_mask_type="padding_causal"
    ).eval()
    shape = (3, 2) if fmt == "bshd" else (6,)
    steps = [OrderedDict.fromkeys(names, 2) for names in ("ab", "abc", "abc", "bcd", "bd")]
    data = [[torch.randn(*shape, heads, D) for heads in (HEADS, GROUPS, GROUPS)] for _ in steps]

    def run(params, call):
        found = []
        for step, new in zip(steps, data, strict=True):
            params.pre_step(step)
            y = call(*new)
            found.append(y[: 2 * len(step)] if fmt == "thd" else y[: len(step)])
        return found

    with torch.no_grad():
        plain, captured = caches(fmt, paged=paged), caches(fmt, paged=paged)
        expected = run(plain, lambda *new: layer(*new, inference_params=plain))
        captured.allocate_memory(1)
        captured.pre_step(steps[0])
        set_capture_start()
        try:
            graph = make_fx(lambda *new: layer(*new, inference_params=captured))(*data[0])
        finally:
            set_capture_end()
        captured.reset()
        found = run(captured, graph)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
@torch.no_grad()
def test_a_step_has_the_tokens_that_were_announced(fmt):
    layer, params = make(fmt), caches(fmt)
    parts = [torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)]
    x = laid_out(parts, fmt)
    with pytest.raises(StateError, match="call pre_step"):
        layer(x, inference_params=params)
    params.pre_step(OrderedDict(a=4, b=4))
    with pytest.raises(ShapeError, match="there must be"):
        layer(x, inference_params=params)
    params.reset()
    with pytest.raises(StateError, match="call pre_step"):
        layer(x, inference_params=params)
    params.pre_step(OrderedDict(a=2, b=2))
    layer(x, inference_params=params)


@torch.no_grad()
def test_a_step_of_packed_tokens_keeps_to_the_longest_context():
    layer, params = make("thd"), caches("thd")
    params.pre_step(OrderedDict(a=8))
    with pytest.raises(ShapeError, match="max_ctx_len = 7"):
        layer(torch.randn(8, HIDDEN), inference_params=params)


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        ([1, 2], DtypeError, "got list"),
        ({"a": -3}, ShapeError, "tokens of sequence 'a' must not be negative"),
        ({"a": "x"}, DtypeError, "tokens of sequence 'a' must be an integer"),
    ],
)
def test_steps_that_are_none(step, error, text):
    params = caches("bshd")
    with pytest.raises(error, match=text):
        params.pre_step(step)
    assert not params.sequences


@pytest.mark.parametrize("wrong", [{"num_heads_kv": 4}, {"head_dim_k": 4}, {"head_dim_v": 4}])
@pytest.mark.parametrize("paged", [False, True])
@torch.no_grad()
def test_caches_of_other_heads(wrong, paged):
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 4} if paged else {}
    sizes = {"num_heads_kv": GROUPS, "head_dim_k": D, "dtype": torch.float32, **wrong}
    params = te.InferenceParams(1, LONGEST, **sizes, **pages)
    params.pre_step(OrderedDict(a=2))
    with pytest.raises(ShapeError, match="InferenceParams: the caches have"):
        make("bshd")(torch.randn(1, 2, HIDDEN), inference_params=params)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"max_batch_size": -2}, ShapeError),
        ({"max_sequence_length": "a"}, DtypeError),
        ({"dtype": "float"}, DtypeError),
        ({"is_paged": True, "page_size": 0, "total_num_pages": 2}, ShapeError),
        ({"is_paged": True, "page_size": -4, "total_num_pages": -8}, ShapeError),
    ],
)
def test_sizes_of_caches_that_are_none(given, error):
    sizes = {"max_batch_size": 2, "max_sequence_length": 16, "num_heads_kv": 2, "head_dim_k": 8}
    with pytest.raises(error, match="InferenceParams: "):
        te.InferenceParams(**{**sizes, "dtype": torch.float32, **given})


class PagesOfTransformerEngine(PagedKVCacheManager):
    """Takes and frees pages by the methods that Transformer Engine's manager has."""

    def pre_step(self, step_dict):
        for name in [name for name in self.sequences if name not in step_dict]:
            self.sequences.pop(name)
            self.deallocate_sequence(name)
        for name, tokens in step_dict.items():
            if name not in self.sequences:
                self.allocate_sequence(name, tokens)
            elif self.sequences[name] % self.page_size == 0:
                self.allocate_page(name)
            self.sequences[name] = self.sequences.get(name, 0) + tokens
        self.page_table = self.get_page_table(list(self.sequences))
        return self.sequences


@torch.no_grad()
def test_a_manager_with_the_methods_of_transformer_engine():
    layer = make("bshd")
    sizes = {"num_heads_kv": GROUPS, "head_dim_k": D, "dtype": torch.float32}
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 2 * LONGEST // 4}
    both = [
        te.InferenceParams(2, LONGEST, **sizes, **pages, custom_cache_manager=kind)
        for kind in (PagesOfTransformerEngine, None)
    ]
    for step in ({"a": 4, "b": 3}, {"a": 1, "b": 1}, {"b": 1, "c": 1}):
        x = torch.randn(2, max(step.values()), HIDDEN)
        results = []
        for params in both:
            params.pre_step(OrderedDict(step))
            results.append(layer(x, inference_params=params))
        assert torch.equal(*results)
    manager = both[0].cache_manager
    assert manager.get_sequence_count() == 2
    assert manager.get_sequence_lengths() == [5, 1]
    assert [manager.get_page_count(name) for name in "abc"] == [0, 2, 1]
    assert manager.get_page_table(["b", "c"])[0, :2].tolist() == manager.get_page_list("b")
    manager.allocate_sequence("d", 5 * 4)
    assert not manager.has_free_page()
    with pytest.raises(StateError, match="all taken"):
        manager.allocate_page("d")
