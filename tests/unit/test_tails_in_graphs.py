"""Graphs that hold the part behind attention as one program serve only layers that compute the same."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch

import te_fast.pytorch as te
from te_fast.attention.rope import Heads, split_rotated
from te_fast.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fast.runtime.compiling import CAN_COMPILE

pytestmark = pytest.mark.slow
compiles = pytest.mark.skipif(not CAN_COMPILE, reason="torch cannot trace native calls")
X = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(0))


def layer(seed=1, **options):
    torch.manual_seed(seed)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0} | options
    return te.TransformerLayer(64, 128, 4, device="cpu", **options)


def run(module, recipe=None):
    with te.autocast(enabled=True, recipe=recipe or Float8CurrentScaling()):
        return module(X)


def is_random(module):
    return not torch.equal(run(module), run(module))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@compiles
def test_layers_that_share_a_graph_have_their_own_dropout():
    layers = [layer(seed, hidden_dropout=p) for seed, p in enumerate((0.0, 0.5))]
    assert [is_random(torch.compile(each, backend="eager")) for each in layers] == [False, True]


@compiles
def test_layers_that_share_a_graph_drop_their_own_paths():
    layers = [layer(seed, drop_path_rate=p) for seed, p in enumerate((0.0, 0.9))]
    compiled = [torch.compile(each, backend="eager") for each in layers]
    for each in layers:
        each.eval()
    assert not any(map(is_random, compiled))
    for each in layers:
        each.train()
    assert [is_random(each) for each in compiled] == [False, True]


@compiles
def test_dropout_may_change():
    each = layer()
    compiled = torch.compile(each, backend="eager")
    assert not is_random(compiled)
    each.hidden_dropout = 0.5
    assert is_random(compiled)


@compiles
@pytest.mark.parametrize("recipe", [Float8CurrentScaling, DelayedScaling])
@pytest.mark.parametrize("part", ["proj", "layernorm_mlp"])
def test_parts_may_be_replaced(recipe, part):
    each, region = layer(), recipe()
    other = copy.deepcopy(each)
    compiled = torch.compile(each, backend="eager")
    run(compiled, region), run(other, region)
    fresh = layer(2, activation="relu")
    for owner in (each, other):
        mine = copy.deepcopy(fresh)
        if part == "proj":
            owner.self_attention.proj = mine.self_attention.proj
        else:
            owner.layernorm_mlp = mine.layernorm_mlp
    for _ in range(2):
        assert torch.equal(run(compiled, region), run(other, region))


@compiles
@pytest.mark.parametrize("recipe", [Float8CurrentScaling, DelayedScaling])
@pytest.mark.parametrize(
    ("name", "value"), [("eps", 0.5), ("activation", "relu"), ("zero_centered_gamma", True)]
)
def test_parts_may_change(recipe, name, value):
    each, region = layer(), recipe()
    other = copy.deepcopy(each)
    compiled = torch.compile(each, backend="eager")
    run(compiled, region), run(other, region)
    for owner in (each, other):
        setattr(owner.layernorm_mlp, name, value)
    for _ in range(2):
        assert torch.equal(run(compiled, region), run(other, region))


class Wrapped(torch.nn.Module):
    """As adapters wrap a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **options):
        return self.inner(*args, **options)


def test_a_layer_with_a_wrapped_projection_runs_and_is_copied():
    each = layer()
    wanted = run(each)
    each.self_attention.proj = Wrapped(each.self_attention.proj)
    assert torch.equal(run(each), wanted)
    assert torch.equal(run(copy.deepcopy(each)), wanted)
    del each.self_attention
    assert "layernorm_mlp" in copy.deepcopy(each)._modules
    assert "layernorm_mlp" in pickle.loads(pickle.dumps(each))._modules


def test_a_part_that_refers_to_its_layer_is_copied():
    each = layer()
    hook = types.MethodType(lambda *_: None, each)
    each.self_attention.register_forward_hook(hook)
    assert type(copy.deepcopy(each.self_attention)) is te.MultiheadAttention


@compiles
def test_a_trace_leaves_chains_on_the_meta_device():
    used, later = (
        te.ops.Sequential(te.ops.Linear(32, 32, device=device)) for device in ("cpu", "meta")
    )
    torch.compile(used, backend="eager")(torch.ones(16, 32))
    assert all(parameter.is_meta for parameter in later.parameters())


@compiles
def test_second_derivatives_of_a_traced_rotation():
    heads, angles = Heads(2, 1, 8), torch.randn(4, 1, 1, 8)
    waves = angles.cos(), angles.sin()

    def cubes(packed):
        parts = split_rotated(packed, (waves, waves), heads, in_place=False)
        return sum(part.pow(3).sum() for part in parts)

    found = []
    for function in (cubes, torch.compile(cubes, backend="eager")):
        packed = torch.ones(4, 3, heads.columns, requires_grad=True)
        (grad,) = torch.autograd.grad(function(packed), packed, create_graph=True)
        grad.pow(2).sum().backward()
        found.append(packed.grad)
    assert torch.equal(*found)


class Rotating(torch.nn.Module):
    """A layer and its angles."""

    def __init__(self):
        super().__init__()
        self.layer = layer()
        self.register_buffer("angles", te.RotaryPositionEmbedding(16)(8).cpu())

    def forward(self, x):
        return self.layer(x, rotary_pos_emb=self.angles)


@compiles
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_rotation_needs_no_operator_that_te_fast_pytorch_lacks(strict):
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        saved = torch.export.export(Rotating(), (X,), strict=strict)
    found = {str(node.target) for node in saved.graph.nodes if "te_fast" in str(node.target)}
    assert found == {"te_fast.inference.default"}


@compiles
def test_a_trace_leaves_the_scales_of_a_layer_whose_neighbour_has_none():
    first, second = layer(1), layer(2)
    proj = second.self_attention.proj
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        proj(X)
    run(torch.compile(first, backend="eager"), DelayedScaling(amax_history_len=16))
    assert proj.fp8_meta["scaling_fwd"].amax_history.shape[0] == 4
