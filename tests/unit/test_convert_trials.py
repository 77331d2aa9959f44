"""convert: the trial of a block sees what the block does, also where the parameters of a new model are too small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_fast
from llama_like import Attention, Experts, Layer, MixtureOfExperts, Model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Interleaved(Attention):
    """Ernie's attention: neighbouring channels turn together."""

    def forward(self, x, position_embeddings, *args, **given):
        half = [wave[..., : wave.shape[-1] // 2] for wave in position_embeddings]
        waves = tuple(wave.repeat_interleave(2, -1) for wave in half)
        return super().forward(x, waves, *args, **given)


class WithoutPositions(Attention):
    """SmolLM's attention in each fourth layer."""

    def forward(self, x, position_embeddings, *args, **given):
        cos, sin = position_embeddings
        return super().forward(x, (torch.ones_like(cos), torch.zeros_like(sin)), *args, **given)


class OtherScale(Attention):
    """Attention whose scale is not in its attributes."""

    def forward(self, x, *args, **given):
        self.scaling *= 2
        y = super().forward(x, *args, **given)
        self.scaling /= 2
        return y


def small(model, dtype):
    """Give a model the parameters of a new one: normal numbers of size 0.02."""
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.02)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Interleaved, WithoutPositions, OtherScale])
def test_attention_of_another_kind_is_left(kind, dtype):
    model = Model(1)
    for layer in model.layers:
        layer.self_attn.__class__ = kind
    report = te_fast.convert(small(model, dtype))
    assert report.left["layers.0"] == "layers.0 computes something else than Llama's layer"


class Bounded(nn.Module):
    """A feed-forward block whose halves have bounds."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=10), self.up_proj(x).clamp(-10, 10)
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_feed_forward_blocks_with_bounds_are_left(dtype):
    report = te_fast.convert(small(Model(1, mlp=Bounded), dtype))
    assert report.left["layers.0"] == "layers.0 computes something else than Llama's layer"


class BoundedExperts(Experts):
    """DeepSeek's experts, whose halves have bounds."""

    def forward(self, x, numbers, weights):
        y = torch.zeros_like(x)
        for number, (first, last) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, up = (x @ first.T).chunk(2, -1)
            weight = (weights * (numbers == number)).sum(-1, keepdim=True)
            gate, up = gate.clamp(max=10), up.clamp(-10, 10)
            y += weight * ((self.act_fn(gate) * up) @ last.T)
        return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [Experts, BoundedExperts])
def test_experts_with_bounds_are_left(kind, dtype):
    experts = small(kind(4, 64, 48), dtype)
    report = te_fast.convert(nn.Sequential(experts))
    assert report.converted == ({} if kind is BoundedExperts else {"0": "experts"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layernorm_without_a_bias_is_no_rmsnorm(dtype):
    """The larger the norm, the nearer to zero is the mean of random numbers, which only LayerNorm takes away."""
    model = nn.Sequential(nn.LayerNorm(1024, bias=False), nn.Linear(1024, 32)).to(dtype)
    assert te_fast.convert(model).converted == {"1": "linear layer"}


class NormOfSequences(nn.Module):
    """A norm over all tokens, which looks like an RMSNorm where there is one."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        dims = tuple(range(1, x.dim()))
        return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + self.eps) * self.weight


@pytest.mark.parametrize(
    "make",
    [
        NormOfSequences,
        lambda: nn.GroupNorm(1, 64),
        lambda: nn.BatchNorm1d(64),
        lambda: nn.BatchNorm1d(64, track_running_stats=False),
        lambda: nn.InstanceNorm1d(64, affine=True),
    ],
)
def test_norms_over_other_dimensions_are_left_as_they_were(make):
    model = nn.Sequential(make(), nn.Linear(64, 64))
    x = torch.randn(8, 64, 64) + 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert te_fast.convert(model).converted == {"1": "linear layer"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    expected = nn.functional.linear(model[0](x), model[1].weight, model[1].bias)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"centred": True}, {"head_norms": True}], ids=str)
def test_models_are_as_they_were_after_a_trial(options, dtype):
    model = small(Model(1, mlp=MixtureOfExperts if not options else None, **options), dtype)
    before = {name: (p, p.clone(), p._version) for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    report = te_fast.convert(model, dry_run=True)
    assert report.converted["layers.0"] in {"decoder layer", "attention of a decoder layer"}
    assert report.left.keys() <= {"lm_head", "layers.0.mlp", "layers.0.mlp.router"}
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        known, values, version = before[name]
        assert parameter is known
        assert torch.equal(parameter, values)
        assert parameter._version == version


class Counting(nn.Module):
    """A feed-forward block that counts its tokens, as experts do whose router balances them."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x):
        self.tokens += x[..., 0].numel()
        return self.proj(x)


@pytest.mark.parametrize("dry_run", [True, False])
def test_buffers_are_as_they_were_after_a_trial(dry_run):
    model = Model(1)
    block = model.layers[0].mlp = Counting()
    tokens = block.tokens
    report = te_fast.convert(model, dry_run=dry_run)
    assert report.converted["layers.0"] == "attention of a decoder layer"
    assert block.tokens is tokens
    assert (tokens.item(), tokens._version) == (0, 0)


def test_parameters_are_restored_after_a_trial_that_fails(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError

    model = Model(1)
    before = {name: p for name, p in model.named_parameters()}
    monkeypatch.setattr(Layer, "forward", refuse)
    assert "cannot be called" in te_fast.convert(model).left["layers.0"]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
