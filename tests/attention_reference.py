"""Attention by its formula, in FP64 and sequence by sequence, without te_fast and without torch's attention."""

from __future__ import annotations

import math

import torch

F64 = torch.float64


def attends(kind, queries, keys, window=(-1, -1), bottom_right=True):
    """Which keys each query attends to, entry by entry; lengths are those of one sequence."""
    left, right = window
    if "causal" in kind:
        right = 0
        bottom_right = "bottom_right" in kind
    shift = keys - queries if bottom_right else 0
    found = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            far = j - (i + shift)
            found[i, j] = (left < 0 or far >= -left) and (right < 0 or far <= right)
    return found


def attend_one(q, k, v, mask, scale, bias=None, pre_bias=None, sink=None, softcap=0.0):
    """One sequence: ``(queries, heads, d)``, ``(keys, groups, d)``; the result ``(queries, heads, d_v)``."""
    repeats = q.shape[1] // k.shape[1]
    outs = []
    for head in range(q.shape[1]):
        key, value = k[:, head // repeats], v[:, head // repeats]
        scores = q[:, head] @ key.T
        if pre_bias is not None:
            scores = scores + pre_bias[head]
        scores = scores * scale
        if softcap:  # tanh by its definition; scores are small here
            grown = torch.exp(2 * scores / softcap)
            scores = softcap * (grown - 1) / (grown + 1)
        if bias is not None:
            scores = scores + bias[head]
        weights = torch.where(mask, scores, -math.inf)
        top = weights.amax(1, keepdim=True)
        if sink is not None:
            top = torch.maximum(top, sink[head].detach())
        top = torch.where(torch.isinf(top), 0.0, top)
        weights = torch.exp(weights - top)
        total = weights.sum(1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink[head] - top)
        weights = torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 0.0)
        outs.append(weights @ value)
    return torch.stack(outs, 1)


def slopes_of(heads):
    """ALiBi's slopes as the paper has them."""
    whole = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    extra = [2 ** (-8 * (i + 1) / (2 * whole)) for i in range(2 * whole)][0::2]
    return torch.tensor((slopes + extra)[:heads], dtype=F64)


def rotate(t, freqs, interleaved):
    """Every pair of channels turned by its angle, as complex numbers; ``(..., heads, d)`` by ``(..., 1, d_rot)``."""
    width = freqs.shape[-1]
    part, rest = t[..., :width], t[..., width:]
    angles = freqs[..., ::2] if interleaved else freqs[..., : width // 2]
    pairs = (
        (part[..., ::2], part[..., 1::2])
        if interleaved
        else (part[..., : width // 2], part[..., width // 2 :])
    )
    turned = torch.complex(*pairs) * torch.polar(torch.ones_like(angles), angles)
    if interleaved:
        out = torch.stack((turned.real, turned.imag), -1).flatten(-2)
    else:
        out = torch.cat((turned.real, turned.imag), -1)
    return torch.cat((out, rest), -1)


def rotate_exactly(t, angles, interleaved, *, back=False):
    """Heads ``(..., heads, d)`` turned by the angles of every channel: products and sums in FP32, rounded at the end.

    Channels of a pair may have angles that differ; `back` is the transpose.
    """
    width = angles.shape[-1]
    partner = torch.arange(width)
    partner = (partner ^ 1) if interleaved else (partner + width // 2) % width
    is_first = (partner > torch.arange(width)).float()
    cos, sin = angles.cos(), angles.sin() * (1 - 2 * is_first)
    if back:
        sin = sin[..., partner]
    wide = t.float()
    turned = wide[..., :width] * cos + wide[..., partner] * sin
    return torch.cat((turned.to(t.dtype), t[..., width:]), -1)
