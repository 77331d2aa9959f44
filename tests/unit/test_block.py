"""A layer as one autograd node: the numbers of its layers one by one, and every case in which it must be several."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_fast
import te_fast.pytorch as te
from graphs import needs_compile
from recipes import RECIPES
from selection import sampled
from te_fast.attention.block import Block
from te_fast.errors import ShapeError, UnsupportedError

HIDDEN, FFN, HEADS, D = 32, 48, 4, 8
_q, _k = torch.zeros(1, HEADS, 8, D), torch.zeros(1, 2, 8, D)
#: Two, but where this torch computes groups on the CPU by plain products, which are not one node.
GROUPS = 2 if torch._fused_sdp_choice(_q, _k, _k, enable_gqa=True) == 1 else HEADS
ROWS = {"sbhd": (8, 2), "bshd": (2, 8)}
FAMILIES = {
    "gpt": {"fuse_qkv_params": True},
    "parts": {"num_gqa_groups": GROUPS},
    "llama": {
        "num_gqa_groups": GROUPS,
        "bias": False,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
    },
}
REGIONS = {None: nullcontext} | {
    name: partial(te.autocast, recipe=recipe()) for name, recipe in RECIPES.items()
}


def make(family="llama", dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype} | options
    return te.TransformerLayer(
        HIDDEN, FFN, HEADS, device="cpu", layer_number=1, **FAMILIES[family], **options
    )


def tokens(fmt="sbhd", dtype=torch.float32, seed=1, *, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*ROWS[fmt], HIDDEN, generator=generator).to(dtype)
    return x.requires_grad_(requires_grad)


def is_one_node(y):
    return type(y.grad_fn).__name__ == "CutBackward"


def trained(layer, x, region=nullcontext, *, angles=None, steps=1, **keywords):
    """Outputs, gradients of input and parameters, and the FP8 state of steps."""
    found = []
    for step in range(steps):
        layer.zero_grad()
        x.grad = None
        with region():
            y = layer(x, rotary_pos_emb=angles, **keywords)
        y.backward(tokens("sbhd", x.dtype, seed=9 + step, requires_grad=False).view_as(y))
        grads = {name: p.grad for name, p in layer.named_parameters()}
        found += [y.detach(), x.grad, *grads.values()]
    for module in layer.modules():
        states = getattr(module, "get_fp8_meta_tensors", lambda: None)()
        found += [part for parts in (states or {}).values() for part in parts]
    return y, found


@pytest.fixture
def one_by_one(monkeypatch):
    """A function that runs another with the layers one by one."""

    def run(function, *given, **keywords):
        with monkeypatch.context() as patch:
            patch.setattr(Block, "takes", staticmethod(lambda *_: False))
            y, found = function(*given, **keywords)
        assert not is_one_node(y)
        return found

    return run


@pytest.mark.parametrize(
    ("recipe", "family", "fmt", "rope"), sampled(REGIONS, FAMILIES, ROWS, [False, True])
)
def test_the_numbers_of_layers_one_by_one(one_by_one, recipe, family, fmt, rope):
    layer = make(family, attn_input_format=fmt)
    other, x = copy.deepcopy(layer), tokens(fmt)
    angles = te.RotaryPositionEmbedding(D)(8).cpu() if rope else None
    y, found = trained(layer, x, REGIONS[recipe], angles=angles, steps=3)
    wanted = one_by_one(trained, other, x, REGIONS[recipe], angles=angles, steps=3)
    assert is_one_node(y)
    assert len(found) == len(wanted) > 10
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", REGIONS)
def test_the_gradient_of_a_16_bit_input_is_rounded_once(one_by_one, recipe):
    layer = make(dtype=torch.bfloat16)
    other, x = copy.deepcopy(layer), tokens(dtype=torch.bfloat16)
    _, (y, dx, *others) = trained(layer, x, REGIONS[recipe])
    wanted_y, wanted_dx, *wanted = one_by_one(trained, other, x, REGIONS[recipe])
    assert torch.equal(y, wanted_y)
    assert all(torch.equal(*pair) for pair in zip(others, wanted, strict=True))
    # The layers one by one round the norm's gradient, and then its sum with that of the residual connection.
    assert not torch.equal(dx, wanted_dx)
    assert torch.allclose(dx.float(), wanted_dx.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("frozen", ["first", "second", "all but biases", "norm"])
@pytest.mark.parametrize("input_grad", [False, True])
def test_frozen_parameters(one_by_one, recipe, frozen, input_grad):
    layer = make("gpt")
    for name, parameter in layer.named_parameters():
        of_first = name.startswith("self_attention.layernorm_qkv")
        parameter.requires_grad_(
            {
                "first": not of_first,
                "second": of_first,
                "all but biases": name.endswith("bias"),
                "norm": not name.endswith("norm_weight"),
            }[frozen]
        )
    other, x = copy.deepcopy(layer), tokens(requires_grad=input_grad)
    y, found = trained(layer, x, REGIONS[recipe])
    wanted = one_by_one(trained, other, x, REGIONS[recipe])
    assert is_one_node(y)
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


def test_a_layer_without_gradients():
    layer, x = make(), tokens()
    wanted = layer(x).detach()
    with torch.no_grad():
        assert torch.equal(layer(x), wanted)
    layer.requires_grad_(False)
    y = layer(x.detach())
    assert torch.equal(y, wanted)
    assert y.grad_fn is None
    with torch.inference_mode():
        assert torch.equal(layer(x.detach().clone()), wanted)


def change(layer, what):
    """Change what a call in one node depends on."""
    attention = layer.self_attention
    core = attention.core_attention
    if what == "hidden dropout":
        layer.hidden_dropout = 0.5
    elif what == "attention dropout":
        core.attention_dropout = 0.5
    elif what == "mask":
        layer.self_attn_mask_type = "no_mask"
    elif what == "window":
        layer.window_size = (2, 0)
    elif what == "scale":
        core.softmax_scale = 1.0
    elif what == "cap":
        layer.softcap = 2.0
    elif what == "projection":
        torch.manual_seed(7)
        attention.proj = te.Linear(HIDDEN, HIDDEN, bias=False, device="cpu")
    elif what == "core":
        attention.core_attention = te.DotProductAttention(
            HEADS, D, num_gqa_groups=GROUPS, attn_mask_type="no_mask", softmax_scale=0.7
        )
    elif what == "block":
        torch.manual_seed(7)
        layer.layernorm_mlp = te.LayerNormMLP(
            *(HIDDEN, FFN),
            bias=False,
            activation="swiglu",
            normalization="RMSNorm",
            return_bias=True,
            device="cpu",
        )


CHANGES = ("hidden dropout", "attention dropout", "mask", "window", "scale", "cap")


@pytest.mark.parametrize("what", [*CHANGES, "projection", "core", "block"])
def test_changes_between_calls(what):
    """A call sees what has changed since the last one: a layer that was never called computes the same."""
    layer, x = make(), tokens()
    fresh = copy.deepcopy(layer)
    former = [layer(x) for _ in range(2)][-1]
    assert is_one_node(former)
    results = []
    for module in (layer, fresh):
        change(module, what)
        torch.manual_seed(3)
        y = module(x)
        y.sum().backward()
        results.append([y, *(p.grad for p in module.parameters())])
    assert not torch.equal(results[0][0], former)
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("where", ["layernorm_qkv", "core_attention", "proj", "", "layernorm_mlp"])
def test_hooks_that_come_later(where):
    layer, x = make(), tokens()
    wanted = [layer(x) for _ in range(2)][-1]
    assert is_one_node(wanted)
    seen = []
    owner = layer if where == "layernorm_mlp" else layer.self_attention
    module = getattr(owner, where) if where else owner
    handle = module.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(layer(x), wanted)
    assert seen == [1]
    handle.remove()
    assert is_one_node(layer(x))
    assert seen == [1]


def test_options_of_a_call():
    """Options that the last call did not have."""
    layer, x = make(), tokens()
    fresh = copy.deepcopy(layer)
    mask = torch.ones(1, 1, 8, 8).triu(2).bool()
    options = [
        {"self_attn_mask_type": "no_mask"},
        {"window_size": (2, 0)},
        {"checkpoint_core_attention": True},
        {"softcap": 0.01},
        {"attention_mask": mask, "self_attn_mask_type": "arbitrary"},
        {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.randn(1, 4, 8, 8),
        },
        {"alibi_slopes": torch.rand(4), "core_attention_bias_type": "alibi"},
        {"rotary_pos_emb": te.RotaryPositionEmbedding(D)(8).cpu()},
    ]
    for given in options:
        plain = layer(x)
        assert is_one_node(plain)
        y = layer(x, **given)
        assert torch.equal(y, fresh(x, **given))
        changes = "checkpoint_core_attention" not in given
        assert torch.allclose(y, plain, rtol=1e-5, atol=1e-6) is not changes


def test_the_users_choice_of_a_kernel():
    layer, x = make(), tokens()
    layer(x)
    with sdpa_kernel([SDPBackend.MATH]):
        y = layer(x)
        assert not is_one_node(y)
    assert is_one_node(layer(x))
    assert torch.allclose(y, layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("field", ["fp8_dpa", "fp8_mha"])
def test_a_recipe_that_then_asks_for_attention_in_fp8(field):
    layer, x, recipe = make(), tokens(), RECIPES["current"]()
    with te.autocast(recipe=recipe):
        assert is_one_node(layer(x))
    setattr(recipe, field, True)
    with (
        te.autocast(recipe=recipe),
        pytest.raises(UnsupportedError, match=f"attention in FP8 \\({field}=True"),
    ):
        layer(x)


def test_other_inputs():
    layer = make()
    reference = copy.deepcopy(layer)
    for shape in [(8, 2), (3, 1), (1, 1), (8, 2), (17, 3)]:
        x = torch.randn(*shape, HIDDEN, requires_grad=True)
        y = layer(x)
        assert is_one_node(y)
        with sdpa_kernel([SDPBackend.MATH]):
            assert torch.allclose(y, reference(x), rtol=1e-5, atol=1e-5)
    strided = torch.randn(HIDDEN, 2, 8).transpose(0, 2).requires_grad_()
    assert torch.equal(layer(strided), layer(strided.detach().contiguous()))
    layer(torch.randn(0, 2, HIDDEN, requires_grad=True)).sum().backward()
    assert layer.self_attention.proj.weight.grad.count_nonzero() == 0
    x = torch.randn(5, 1, HIDDEN)
    with te.autocast(recipe=RECIPES["current"]()):
        with pytest.raises(ShapeError, match="multiple of 8"):
            layer(x)
        te_fast.auto_pad(True)
        try:
            y = layer(x)
        finally:
            te_fast.auto_pad(False)
    assert (y - reference(x)).norm() < 0.1 * y.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(tokens()).dtype == torch.bfloat16


def test_padded_rows_are_padded_again_where_backward_repeats_a_forward():
    layer = make()
    te_fast.auto_pad(True)
    try:
        for rows in (16, 5):  # the first call is one node, the second goes by layers
            x = torch.randn(rows, 1, HIDDEN, requires_grad=True)
            with te.autocast(recipe=RECIPES["block"]()):
                expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
                y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)
    finally:
        te_fast.auto_pad(False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_padded_rows_of_a_first_call_are_padded_again(use_reentrant):
    """The first call goes by layers, so that the block's own first program has never run."""
    te_fast.auto_pad(True)
    try:
        layer, x = make(), torch.randn(5, 1, HIDDEN, requires_grad=True)
        twin = copy.deepcopy(layer)
        with te.autocast(recipe=RECIPES["block"]()):
            expected = torch.autograd.grad(twin(x).square().sum(), x)[0]
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
        assert torch.equal(x.grad, expected)
    finally:
        te_fast.auto_pad(False)


def test_gradients_of_gradients_are_refused():
    layer, x = make(), tokens()
    y = layer(x)
    assert is_one_node(y)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


def test_a_graph_that_is_used_twice():
    layer, x = make(), tokens()
    with te.autocast(recipe=RECIPES["current"]()):
        y = layer(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(*torch.autograd.grad(y.sum(), x), *first)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y.sum(), x)


def test_an_input_that_changes_before_backward():
    layer, x = make(), tokens(requires_grad=False)
    y = layer(x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", REGIONS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(recipe, reentrant):
    layer, x = make(), tokens()
    other = copy.deepcopy(layer)
    _, wanted = trained(other, x, REGIONS[recipe], steps=2)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, rotary_pos_emb=None):
            return te.checkpoint(self.layer, x, use_reentrant=reentrant)

    _, found = trained(Checkpointed(), x, REGIONS[recipe], steps=2)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


def test_hooks_on_saved_tensors():
    """What a hook returns is what backward reads; every tensor passes once."""
    layer, x = make(), tokens()
    _, wanted = trained(layer, x)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach().clone()

    def unpack(tensor):
        unpacked.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _, found = trained(layer, x)
    assert packed == unpacked
    assert len(packed) > 5
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_gradients_that_go_into_main_grad(one_by_one, recipe):
    results = []
    for run in (lambda f, *a, **k: f(*a, **k)[1], one_by_one):
        layer, x = make(fuse_wgrad_accumulation=True), tokens()
        weights = [p for p in layer.parameters() if p.dim() == 2]
        for weight in weights:
            weight.main_grad = torch.ones_like(weight)
        for first in (True, False):
            found = run(trained, layer, x, REGIONS[recipe], is_first_microbatch=first)
        results.append([*found[:2], *(weight.main_grad for weight in weights)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_microbatches_keep_weights():
    layer, x = make(), tokens()
    with te.autocast(recipe=RECIPES["current"]()):
        first = layer(x, is_first_microbatch=True)
        first.sum().backward()
        casts = te_fast.dispatch.counters()["weight_casts"]
        assert torch.equal(layer(x, is_first_microbatch=False), first)
        assert te_fast.dispatch.counters()["weight_casts"] == casts
        assert torch.equal(layer(x, is_first_microbatch=True), first)
        assert te_fast.dispatch.counters()["weight_casts"] > casts


@pytest.mark.parametrize("recipe", [name for name in REGIONS if name])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_weights_in_fp8(one_by_one, recipe, family):
    with te.quantized_model_init(recipe=RECIPES[recipe]()):
        layer = make(family, torch.bfloat16)
    other, x = copy.deepcopy(layer), tokens(dtype=torch.bfloat16)
    y, (out, _, *grads) = trained(layer, x, REGIONS[recipe])
    wanted_out, _, *wanted = one_by_one(trained, other, x, REGIONS[recipe])
    assert is_one_node(y)
    assert torch.equal(out, wanted_out)
    assert all(torch.equal(*pair) for pair in zip(grads, wanted, strict=True))


def test_layers_are_freed():
    layer = make()
    for _ in range(2):
        layer(tokens()).sum().backward()
    known = weakref.ref(layer)
    gc.disable()  # the layer's memory is free at once, not after a collection
    try:
        del layer
        assert known() is None
    finally:
        gc.enable()


def test_copies_have_their_own_programs():
    layer, x = make(), tokens()
    layer(x)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    y = copied(x)
    y.sum().backward()
    assert is_one_node(y)
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert not torch.equal(y, layer(x))


def test_transforms_are_refused():
    layer, x = make(), tokens(requires_grad=False)
    layer(x)
    for transformed in (torch.func.vmap(layer), torch.func.grad(lambda x: layer(x).sum())):
        with pytest.raises(UnsupportedError, match="torch.func"):
            transformed(x)
    assert torch.equal(torch.func.functional_call(layer, {}, (x,)), layer(x))


@pytest.mark.slow
@needs_compile
def test_eager_calls_compile_nothing_again(fresh_dynamo):
    layer, x = make(), tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    for _ in range(2):
        assert is_one_node(layer(x))
        assert torch.allclose(compiled(x), y, rtol=1e-6, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@needs_compile
def test_eager_calls_fix_no_sizes_of_traces():
    """A trace with symbolic sizes has them after an eager call of one of these sizes, too."""
    from torch.fx.experimental.proxy_tensor import make_fx

    layer = make().requires_grad_(False)
    x = tokens(requires_grad=False)
    layer(x)
    with torch.no_grad():
        traced = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
        longer = torch.randn(24, 3, HIDDEN)
        assert torch.allclose(traced(longer), layer(longer), rtol=1e-5, atol=1e-6)
