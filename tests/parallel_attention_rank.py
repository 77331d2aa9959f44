"""One of several ranks that share the heads of attention: ``python parallel_attention_rank.py RANK WORLD FOLDER ...``.

Each scene compares with the whole layer by its formulas in FP64. Run by ``unit/test_parallel_ranks.py``.
"""

from __future__ import annotations

import copy
from itertools import product

import torch
import torch.distributed as dist
from torch.nn import functional

import te_fast.pytorch as te
from parallel_rank import close, fill, raises, random, rank_and_size, region, share
from ranks import Scenes, device
from recipes import RECIPES
from reference import QuantizedLinear
from transformer_reference import HEADS, HIDDEN, B, D, Plain, S
from transformer_reference import make as made

FFN = 64
scenes = Scenes()
scene = scenes.scene


def make(kind=te.TransformerLayer, **options):
    """A layer on this rank's device."""
    return made(kind, **({"device": device()} | options))


class Shared(Plain):
    """The formulas of a layer whose products ranks share: each part has scales of its own."""

    def __init__(self, layer, recipe):
        super().__init__(layer)
        self.quantized = QuantizedLinear(recipe)

    def linear(self, x, prefix, parts=("",), weight="weight", bias="bias"):
        """Multiply by column, or by row where the ranks have computed the input."""
        whole = torch.cat([self.own[f"{prefix}.{part}{weight}"] for part in parts])
        biases = torch.cat([self.own[f"{prefix}.{part}{bias}"] for part in parts])
        size = dist.get_world_size()
        if prefix.endswith("proj") or weight == "fc2_weight":
            pairs = zip(x.chunk(size, -1), whole.chunk(size, -1), strict=True)
            return sum(self.quantized(one, other) for one, other in pairs) + biases
        return torch.cat([self.quantized(x, part) for part in whole.chunk(size)], -1) + biases


def part_of(whole, name, tensor):
    """This rank's part of a parameter, or its gradient, of a whole layer."""
    owner, _, leaf = name.rpartition(".")
    module = whole.get_submodule(owner)
    if "norm_" in leaf or leaf == "fc2_bias" or (owner.endswith("proj") and leaf == "bias"):
        return tensor
    if isinstance(module, te.LayerNorm | te.RMSNorm):
        return tensor
    if owner.endswith("proj") or leaf == "fc2_weight":
        return share(tensor, 1)
    if leaf.startswith("fc1") and module.activation == "swiglu":
        return share(tensor.unflatten(0, (2, -1)), 1).flatten(0, 1)
    attention = whole.get_submodule(owner.rpartition(".")[0])
    if leaf in ("weight", "bias") and not getattr(attention, "qkv_weight_interleaved", True):
        q, kv = attention.hidden_size_q, attention.hidden_size_kv
        sizes = {"key_value": (kv, kv), "layernorm_query": (q,)}
        parts = tensor.split(sizes.get(owner.rpartition(".")[2], (q, kv, kv)))
        return torch.cat([share(part, 0) for part in parts])
    return share(tensor, 0)


def shared(whole, kind=te.TransformerLayer, **options):
    """This rank's part of a whole layer."""
    options = {"tp_group": dist.group.WORLD, "set_parallel_mode": True} | options
    layer = make(kind, ffn=FFN, **options)
    values = {name: part_of(whole, name, p.detach()) for name, p in whole.named_parameters()}
    assert values.keys() == dict(layer.named_parameters()).keys()
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        fill(layer.get_submodule(owner), **{leaf: value})
    return layer


def whole_of(kind=te.TransformerLayer, **options):
    """A layer that is the same on all ranks."""
    torch.manual_seed(0)
    return make(kind, ffn=FFN, **options)


def compare(layer, whole, plain, out, wanted, leaves, sequence, tolerance):
    """Compare results and gradients; `leaves` are pairs of inputs, the layer's and the formulas'."""
    rows = (lambda t: share(t, 0)) if sequence else (lambda t: t)
    close(out.detach(), rows(wanted.detach()), tolerance, "y")
    grad = random(*wanted.shape, seed=9)
    out.backward(rows(grad).to(out.dtype))
    names, wides = list(plain.own), [wide for _, wide in leaves]
    found = torch.autograd.grad(wanted, [*wides, *plain.own.values()], grad, allow_unused=True)
    for (mine, _), theirs in zip(leaves, found, strict=False):
        close(mine.grad, rows(theirs), tolerance, "dx")
    for name, theirs in zip(names, found[len(leaves) :], strict=True):
        parameter = layer.get_parameter(name)
        got = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):  # the framework sums these
            dist.all_reduce(got)
        if theirs is None or theirs.norm() < 1e-9:  # biases of keys change nothing
            assert got.norm() < 1e-3 * grad.norm(), name
        else:
            close(got, part_of(whole, name, theirs), tolerance, f"gradient of {name}")


OPTIONS = (
    {},
    {"fuse_qkv_params": True},
    {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "num_gqa_groups": 2},
    {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    {"apply_residual_connection_post_layernorm": True},
    {"output_layernorm": True},
    {"parallel_attention_mlp": True},
    {"qk_norm_type": "L2Normalization"},
    {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
    {"qk_norm_type": "LayerNorm"},
)


@scene
def transformer_layers():
    """Every arrangement in high precision, with and without rows of a rank's own."""
    angles = te.RotaryPositionEmbedding(D)(S).to(device())
    x = random(S, B, HIDDEN, seed=1).float()
    for options, sequence in product(OPTIONS, (False, True)):
        whole = whole_of(**options)
        layer = shared(whole, sequence_parallel=sequence, **options)
        plain = Plain(whole)
        local = (share(x, 0) if sequence else x).clone().requires_grad_()
        wide = x.double().requires_grad_()
        out = layer(local, rotary_pos_emb=angles)
        wanted = plain(wide, rope=angles)
        compare(layer, whole, plain, out, wanted, [(local, wide)], sequence, 2e-5)


@scene
def decoders():
    encoder, x = random(8, B, HIDDEN, seed=2).float(), random(S, B, HIDDEN, seed=1).float()
    for fused, sequence in product((False, True), (False, True)):
        options = {"layer_type": "decoder", "fuse_qkv_params": fused, "num_gqa_groups": 2}
        whole = whole_of(**options)
        layer = shared(whole, sequence_parallel=sequence, **options)
        plain = Plain(whole)
        wides = [tensor.double().requires_grad_() for tensor in (x, encoder)]
        locals_ = [(share(t, 0) if sequence else t).clone().requires_grad_() for t in (x, encoder)]
        out = layer(locals_[0], encoder_output=locals_[1])
        wanted = plain(wides[0], encoder=wides[1])
        leaves = list(zip(locals_, wides, strict=True))
        compare(layer, whole, plain, out, wanted, leaves, sequence, 2e-5)


@scene
def transformer_layers_in_fp8():
    """FP8 layers beside the formulas on quantised operands; BF16 layers beside the formulas in high precision."""
    x = random(16, B, HIDDEN, seed=1).float()
    options = {"fuse_qkv_params": True, "fuse_wgrad_accumulation": False}
    for recipe, sequence in product((*RECIPES, None), (False, True)):
        dtype = torch.float32 if recipe else torch.bfloat16
        whole = whole_of(dtype=dtype, **options)
        layer = shared(whole, sequence_parallel=sequence, dtype=dtype, **options)
        plain = Shared(whole, recipe) if recipe else Plain(whole)
        local = (share(x, 0) if sequence else x).to(dtype).clone().requires_grad_()
        wide = x.to(dtype).double().requires_grad_()
        with region(recipe):
            out = layer(local)
        # Operands that round to another side in FP8 are quantised again later. One rank differs as much.
        tolerance = 8e-2 if recipe else 3e-2
        compare(layer, whole, plain, out, plain(wide), [(local, wide)], sequence, tolerance)


@scene
def attention_has_one_ranks_scales():
    """Under current scaling queries, keys and values equal those of one rank, bit for bit."""
    options = {"fuse_qkv_params": True, "attn_mask_type": "causal", "input_layernorm": True}
    whole = whole_of(te.MultiheadAttention, **options)
    x = random(16, B, HIDDEN, seed=1).float()
    x[0, 0, 0] = 40.0
    with torch.no_grad():
        # Every part of the weight has the same largest value, and so the same scale.
        whole.layernorm_qkv.weight.clamp_(-0.25, 0.25)[::8] = 0.25
    layer = shared(whole, te.MultiheadAttention, sequence_parallel=True, **options)
    seen = []
    for module in (whole, layer):
        module.layernorm_qkv.register_forward_hook(lambda _m, _x, out: seen.append(out.clone()))
    with region("current"), torch.no_grad():
        whole(x)
        layer(share(x, 0))
    assert torch.equal(seen[1], share(seen[0], -1))


@scene
def options_of_layers():
    rank, size = rank_and_size()
    group = dist.group.WORLD
    x = random(S, B, HIDDEN, seed=1).float()
    # A group that comes later, copies, and attributes that Transformer Engine's layer has.
    options = {"tp_size": size, "set_parallel_mode": True, "sequence_parallel": True}
    layer = make(tp_group=None, num_gqa_groups=2, ffn=FFN, **options)
    with raises(RuntimeError, "set_tensor_parallel_group"):
        layer(share(x, 0))
    with raises(RuntimeError, f"TransformerLayer: .*tp_size = {size}"):
        layer.set_tensor_parallel_group(dist.new_group([rank], use_local_synchronization=True))
    layer.set_tensor_parallel_group(group)
    attention = layer.self_attention
    assert attention.tp_group is attention.proj.tp_group is attention.core_attention.tp_group
    assert (attention.num_attention_heads, attention.num_attention_heads_per_partition) == (
        HEADS,
        HEADS // size,
    )
    assert (attention.num_gqa_groups, attention.num_gqa_groups_per_partition) == (2, 2 // size)
    assert (layer.tp_size, layer.sequence_parallel) == (size, True)
    y = layer(share(x, 0))
    copied = copy.deepcopy(layer)
    assert copied.tp_group is copied.self_attention.tp_group is group
    assert torch.equal(copied(share(x, 0)), y)
    # Gradients into main_grad, and recomputation of attention.
    fused = make(
        fuse_qkv_params=True, fuse_wgrad_accumulation=True, tp_group=group, ffn=FFN, **options
    )
    plain = make(fuse_qkv_params=True, tp_group=group, ffn=FFN, **options)
    plain.load_state_dict(fused.state_dict())
    weights = {name: p for name, p in fused.named_parameters() if p.dim() == 2}
    for weight in weights.values():
        weight.main_grad = torch.zeros_like(weight)
    for module in (fused, plain):
        module(share(x, 0), checkpoint_core_attention=True).square().sum().backward()
    for name, weight in weights.items():
        close(weight.main_grad, plain.get_parameter(name).grad.double(), 1e-6, name)
    # Dropout of attention draws from each rank's own generator, unless rows are a rank's own.
    assert plain.self_attention.core_attention.get_rng_state_tracker is None
    # These rows are not a share of seq_length.
    layer = make(tp_group=group, ffn=FFN, seq_length=S, **options)
    layer(share(x, 0))
    with raises(AssertionError, f"seq_length = {S}"):
        layer(x)
    with raises(ValueError, "num_gqa_groups must be a multiple of tp_size"):
        make(te.MultiheadAttention, num_gqa_groups=1, tp_group=group, set_parallel_mode=True)
    with raises(ValueError, "set_parallel_mode=True"):
        make(te.MultiheadAttention, tp_group=group)


@scene
def heads_of_attention():
    """Attention alone: each rank has its heads, and there is no collective."""
    size = dist.get_world_size()
    q, k, v = (random(S, B, heads, D, seed=heads).float() for heads in (HEADS, 2, 2))
    module = te.DotProductAttention(HEADS, D, num_gqa_groups=2, tp_group=dist.group.WORLD)
    out = module(*(share(t, 2).contiguous() for t in (q, k, v)))
    heads = [t.double().permute(1, 2, 0, 3) for t in (q, k, v)]
    keys, values = (t.repeat_interleave(HEADS // 2, 1) for t in heads[1:])
    wanted = functional.scaled_dot_product_attention(heads[0], keys, values, is_causal=True)
    close(out, share(wanted.permute(2, 0, 1, 3).flatten(2), -1), 1e-5, "y")
    with raises(ValueError, f"{HEADS // size} heads"):
        module(q, k, v)


if __name__ == "__main__":
    scenes.main()
