"""Attention around padding that holds anything: of dense heads, and between packed sequences.

A stand-in takes the place of the GPU's kernel for packed sequences, which takes no padding.
"""

import math
from itertools import pairwise

import pytest
import torch

import te_fast.pytorch as te
from attention_reference import F64, attend_one, attends
from te_fast.attention import packed
from te_fast.attention.packed import Packing, attend_packed
from te_fast.attention.rules import Rule
from te_fast.attention.scores import Scores

HEADS, D = 4, 8
RULES = {
    "padding": Rule("padding", -1, -1, False),
    "padding_causal": Rule("padding_causal", -1, 0, False),
    "padding_causal_bottom_right": Rule("padding_causal_bottom_right", -1, 0, True),
}


class KernelForRows(torch.autograd.Function):
    """Attend by the formula, and leave what the kernel leaves in rows of no sequence: anything."""

    @staticmethod
    def forward(ctx, q, k, v, ends, kind):
        ctx.save_for_backward(q, k, v)
        ctx.ends, ctx.kind = ends, kind
        out = q.new_full((q.shape[0], HEADS, v.shape[-1]), float("nan"))
        for of_q, of_k in KernelForRows.places(ends):
            out[of_q] = KernelForRows.formula(q[of_q], k[of_k], v[of_k], kind)
        return out

    @staticmethod
    def backward(ctx, grad):
        found = [torch.full_like(one, float("nan")) for one in ctx.saved_tensors]
        for of_q, of_k in KernelForRows.places(ctx.ends):
            rows = (of_q, of_k, of_k)
            own = [
                one[place].detach().requires_grad_()
                for one, place in zip(ctx.saved_tensors, rows, strict=True)
            ]
            with torch.enable_grad():
                y = KernelForRows.formula(*own, ctx.kind)
            grads = torch.autograd.grad(y, own, grad[of_q])
            for one, place, part in zip(found, rows, grads, strict=True):
                one[place] = part
        return *found, None, None

    @staticmethod
    def places(ends):
        of_q, of_k = ([slice(*pair) for pair in pairwise(one.tolist())] for one in ends)
        return zip(of_q, of_k, strict=True)

    @staticmethod
    def formula(q, k, v, kind):
        mask = attends(kind, len(q), len(k), (-1, -1), bottom_right="bottom_right" in kind)
        return attend_one(q, k, v, mask, 1 / math.sqrt(D))


@pytest.fixture
def kernel(monkeypatch):
    """Calls of the kernel: the rows of queries and of keys."""
    calls = []

    def attend(q, k, v, ends, longest, scores):
        assert all(max(one.diff()) <= most for one, most in zip(ends, longest, strict=True))
        calls.append((len(q), len(k)))
        return KernelForRows.apply(q, k, v, ends, scores.rule.kind)

    monkeypatch.setattr(packed, "attend_varlen", attend)
    monkeypatch.setattr(packed, "varlen_problem", lambda *_, **__: "")
    return calls


def packing(lengths, sizes):
    ends, starts = (torch.tensor([0, *one]).cumsum(0).int() for one in (lengths, sizes))
    return Packing(ends, starts, max(lengths))


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("behind", [0, 5])
def test_nothing_is_read_between_sequences(kind, behind, kernel):
    """Padding behind each sequence, an empty one, and rows behind all of them."""
    q_lengths, k_lengths = [3, 0, 6, 1], [3, 2, 6, 1]
    if kind == "padding":
        k_lengths = [5, 2, 1, 4]
    sizes = [5, 2, 6, 4]
    of_q, of_k = packing(q_lengths, sizes), packing(k_lengths, sizes)
    tokens = sum(sizes) + behind
    leaves = [torch.full((tokens, HEADS, D), float("nan"), dtype=F64) for _ in "qkv"]
    grad = torch.full((tokens, HEADS, D), float("nan"), dtype=F64)
    want = [torch.zeros(tokens, HEADS, D, dtype=F64) for _ in "yqkv"]
    for begin, many, few in zip(of_q.starts.tolist(), q_lengths, k_lengths, strict=False):
        places = [slice(begin, begin + size) for size in (many, few, few)]
        for one, place in zip((*leaves, grad), (*places, places[0]), strict=True):
            one[place] = torch.randn(place.stop - place.start, HEADS, D, dtype=F64)
        own = [
            one[place].clone().requires_grad_() for one, place in zip(leaves, places, strict=True)
        ]
        y = KernelForRows.formula(*own, kind)
        found = [y.detach(), *torch.autograd.grad(y, own, grad[places[0]])]
        for one, place, part in zip(want, (places[0], *places), found, strict=True):
            one[place] = part
    leaves = [one.requires_grad_() for one in leaves]
    out = attend_packed(*leaves, (of_q, of_k), Scores(RULES[kind], 1 / math.sqrt(D)))
    out.backward(grad)
    assert kernel == [(tokens, tokens)]
    for got, one in zip((out, *(leaf.grad for leaf in leaves)), want, strict=True):
        assert torch.allclose(got, one)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_nothing_is_read_behind_the_sequences_of_dense_heads(kind, fmt, is_masked):
    lengths, size = [3, 6, 1], 6
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    is_padding = torch.arange(size) >= torch.tensor(lengths)[:, None]
    heads = [torch.randn(3, size, HEADS, D, dtype=F64) for _ in "qkvg"]
    want = [torch.zeros_like(one) for one in (heads[3], *heads[:3])]
    for row, length in enumerate(lengths):
        own = [one[row, :length].clone().requires_grad_() for one in heads[:3]]
        y = KernelForRows.formula(*own, kind)
        found = [y.detach(), *torch.autograd.grad(y, own, heads[3][row, :length])]
        for one, part in zip(want, found, strict=True):
            one[row, :length] = part
    for one in heads:
        one[is_padding] = float("nan")
    order = (lambda one: one.transpose(0, 1)) if fmt == "sbhd" else (lambda one: one)
    *leaves, grad = (order(one).clone().requires_grad_() for one in heads)
    layer = te.DotProductAttention(HEADS, D, qkv_format=fmt, attn_mask_type=kind)
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    if is_masked:
        mask = is_padding[:, None, None]
        given = {"attention_mask": mask if kind == "padding" else (mask, mask)}
    out = layer(*leaves, **given)
    out.backward(grad.detach().flatten(2))
    found = [out.unflatten(2, (HEADS, D)), *(leaf.grad for leaf in leaves)]
    for got, one in zip(found, want, strict=True):
        assert torch.allclose(order(got), one)


def test_a_batch_without_sequences(kernel):
    none = Packing(torch.zeros(1).int(), torch.zeros(1).int(), 0)
    q = torch.ones(0, HEADS, D, requires_grad=True)
    out = attend_packed(q, q, q, (none, none), Scores(RULES["padding"], 1.0))
    out.sum().backward()
    assert (out.shape, q.grad.shape, kernel) == ((0, HEADS, D), (0, HEADS, D), [])
