"""One of several ranks that share the experts of a mixture: ``python expert_rank.py RANK WORLD FOLDER SCENE ...``.

Each scene compares with one rank that has all experts and all tokens: in high precision with plain torch in FP64, in
FP8 bit for bit with the block of a single rank. Run by ``unit/test_expert_ranks.py``.
"""

from __future__ import annotations

import copy
import re
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import te_fast.pytorch as te
from ranks import Scenes, Stop, device
from recipes import RECIPES
from te_fast.errors import RanksError, ShapeError

HIDDEN, FFN, EXPERTS, TOPK = 32, 48, 8, 2
scenes = Scenes()
scene = scenes.scene


@contextmanager
def raises(kind, part):
    with pytest.raises(kind, match=re.escape(part)):
        yield


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(device())


def fill(block, first=0):
    """Weights that depend on the number of the expert alone; `first` is the number of the block's first expert."""
    with torch.no_grad():
        block.router.copy_(random(*block.router.shape, seed=5) * HIDDEN**-0.5)
        for name, parameter in block.experts.named_parameters():
            place, kind = name.split(".")
            number = first + int("".join(letter for letter in kind if letter.isdigit()))
            seed = 100 * int(place) + number + 1000 * kind.startswith("bias")
            parameter.copy_(random(*parameter.shape, seed=seed) * HIDDEN**-0.5)
    return block


def shared(**options):
    rank, size = dist.get_rank(), dist.get_world_size()
    block = te.MoE(
        HIDDEN, FFN, EXPERTS, TOPK, device=device(), ep_group=dist.group.WORLD, **options
    )
    return fill(block, rank * EXPERTS // size)


def whole(**options):
    return fill(te.MoE(HIDDEN, FFN, EXPERTS, TOPK, device=device(), **options))


def tokens_of(rank, step=0, counts=None):
    """Tokens of a rank; the ranks have different numbers of them."""
    count = 10 + 7 * rank if counts is None else counts[rank]
    return random(count, HIDDEN, seed=50 + rank + 10 * step)


def reference(block, x):
    """The result in FP64, and the leaves that get gradients."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in block.named_parameters()}
    leaves["x"] = x.detach().double().requires_grad_()
    logits = leaves["x"] @ leaves["router"].t()
    best = logits.topk(TOPK).indices
    chosen = torch.zeros_like(logits).scatter_(1, best, 1).bool()
    weights = torch.softmax(logits.masked_fill(~chosen, -torch.inf), 1)
    y = 0
    for expert in range(EXPERTS):
        h = leaves["x"] @ leaves[f"experts.0.weight{expert}"].t()
        if f"experts.0.bias{expert}" in leaves:
            h = h + leaves[f"experts.0.bias{expert}"]
        a, b = h.chunk(2, -1)
        h = functional.silu(a) * b * weights[:, expert : expert + 1]
        y = y + h @ leaves[f"experts.2.weight{expert}"].t()
    return y, leaves


def own(name):
    """The name of this rank's parameter on a single rank with all experts."""
    if name == "router":
        return name
    place, kind = name.rsplit(".", 1)
    letters = kind.rstrip("0123456789")
    number = int(kind[len(letters) :]) + dist.get_rank() * EXPERTS // dist.get_world_size()
    return f"{place}.{letters}{number}"


def everyones(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def alone():
    """A group of this rank alone; all ranks make all groups."""
    made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return made[dist.get_rank()]


def compare(block, counts, close):
    """Compare one forward and backward with those of a single rank that has all tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [tokens_of(other, counts=counts) for other in range(size)]
    x = parts[rank].requires_grad_()
    y = block(x)
    dys = [random(*part.shape, seed=80 + other) for other, part in enumerate(parts)]
    y.backward(dys[rank])
    expected, leaves = close(torch.cat([part.detach() for part in parts]), torch.cat(dys))
    first = sum(len(part) for part in parts[:rank])
    mine = slice(first, first + len(x))
    yield "y", y, expected[mine]
    yield "dx", x.grad, leaves["x"].grad[mine]
    for name, parameter in block.named_parameters():
        grad = everyones(parameter.grad) if name == "router" else parameter.grad
        yield name, grad, leaves[own(name)].grad


@scene
def high_precision():
    for bias in (False, True):
        model = whole(bias=bias)

        def expect(x, dy, model=model):
            y, leaves = reference(model, x)
            y.backward(dy.double())
            return y, leaves

        size = dist.get_world_size()
        # The last two: one rank has no token, then no rank has one.
        for counts in (None, [0] + [12] * (size - 1), [5] + [0] * (size - 1), [0] * size):
            for what, got, wanted in compare(shared(bias=bias), counts, expect):
                assert got is not None, what
                assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
                wanted = wanted if wanted is not None else torch.zeros_like(got)
                error = (got.double() - wanted).norm() / (wanted.norm() + 1e-30)
                assert error < (1e-4 if got.is_cuda else 1e-5), (what, counts, float(error))


@scene
def fp8():
    """Rows arrive in a single rank's order, so that scales, results and gradients are the same."""
    group = alone()
    for name, make in RECIPES.items():
        mine, one = shared(dtype=torch.bfloat16), whole(dtype=torch.bfloat16)
        for step in range(2):
            for block in (mine, one):
                block.zero_grad()
            counts = None if step == 0 else [0] + [12] * (dist.get_world_size() - 1)
            parts = [
                tokens_of(rank, step, counts).bfloat16() for rank in range(dist.get_world_size())
            ]
            with te.autocast(recipe=make(), amax_reduction_group=group):
                y = mine(parts[dist.get_rank()])
            y.square().sum().backward()
            with te.autocast(recipe=make(), amax_reduction_group=group):
                expected = one(torch.cat(parts))
            expected.square().sum().backward()
            first = sum(len(part) for part in parts[: dist.get_rank()])
            assert torch.equal(y, expected[first : first + len(y)]), (name, step)
            wanted = dict(one.named_parameters())
            for key, parameter in mine.named_parameters():
                if key != "router":
                    assert torch.equal(parameter.grad, wanted[own(key)].grad), (name, step, key)


@scene
def one_expert_has_all():
    """Every row of all ranks goes to two experts of one rank."""
    mine, one = shared(), whole()
    for block in (mine, one):
        with torch.no_grad():
            block.router.zero_()
            block.router[:TOPK] = 1.0
    parts = [tokens_of(rank).abs() for rank in range(dist.get_world_size())]
    y = mine(parts[dist.get_rank()])
    y.sum().backward()
    one(torch.cat(parts)).sum().backward()
    wanted = dict(one.named_parameters())
    for key, parameter in mine.named_parameters():
        if key != "router":
            got, expected = parameter.grad, wanted[own(key)].grad
            assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5), key
            number = int(own(key).rsplit("weight", 1)[1])
            assert bool(got.any()) == (number < TOPK), key


@scene
def biases_follow_the_tokens_of_all_ranks():
    options = {"expert_bias": True, "score_function": "sigmoid"}
    mine, one = shared(**options), whole(**options)
    parts = [tokens_of(rank) for rank in range(dist.get_world_size())]
    mine(parts[dist.get_rank()])
    one(torch.cat(parts))
    for block in (mine, one):
        block.update_expert_bias(0.5)
    assert mine.expert_bias.any()
    assert torch.equal(mine.expert_bias, one.expert_bias)


@scene
def marks_and_copies():
    block = shared(aux_loss_coeff=0.1)
    assert not hasattr(block.router, "allreduce")
    assert all(parameter.allreduce is False for parameter in block.experts.parameters())
    x = tokens_of(dist.get_rank())
    y, loss = block(x)
    copied = copy.deepcopy(block)
    assert copied.ep_group is dist.group.WORLD
    assert torch.equal(copied(x)[0], y)
    assert loss.isfinite()
    one = te.MoE(HIDDEN, FFN, EXPERTS, TOPK, device=device(), ep_group=alone())
    assert one.experts[0].num_groups == EXPERTS
    assert not hasattr(next(one.experts.parameters()), "allreduce")
    with raises(ShapeError, "MoE: num_experts must be a multiple of the ranks of ep_group"):
        te.MoE(HIDDEN, FFN, EXPERTS + 1, TOPK, device=device(), ep_group=dist.group.WORLD)


@scene
def ranks_that_disagree():
    rank = dist.get_rank()
    block = shared()
    x = tokens_of(rank)
    with raises(RanksError, "MoE: the input's columns and type, the number of experts, the recipe"):
        block(x.bfloat16() if rank == 0 else x)
    with (
        te.autocast(enabled=rank == 0, amax_reduction_group=alone()),
        raises(RanksError, "must be the same on all ranks of ep_group"),
    ):
        block(x)
    block.router.requires_grad_(False)
    with raises(RanksError, "must be the same on all ranks of ep_group"):
        block(x.requires_grad_(rank == 0))
    block.router.requires_grad_()
    count = EXPERTS * (2 if rank == 0 else 1)
    other = te.MoE(HIDDEN, FFN, count, TOPK, device=device(), ep_group=dist.group.WORLD)
    for _ in range(2):
        with raises(RanksError, "MoE: the input's columns and type, the number of experts"):
            other(x)
    # Nothing is left behind.
    block(x)
    others = dist.new_group([0])
    if rank != 0:
        with raises(RanksError, "MoE: this rank is not in ep_group"):
            te.MoE(HIDDEN, FFN, EXPERTS, TOPK, device=device(), ep_group=others)


@scene
def a_rank_that_stops():
    """The last scene of a run: the group is gone."""
    block = shared()
    x = tokens_of(dist.get_rank())
    block(x)
    if dist.get_rank() == dist.get_world_size() - 1:
        raise Stop
    with raises(RanksError, "MoE: the exchange of counts of expert parallelism failed"):
        block(x)


if __name__ == "__main__":
    scenes.main()
