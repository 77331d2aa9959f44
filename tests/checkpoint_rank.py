"""One of several ranks that write and read distributed checkpoints: ``checkpoint_rank.py RANK WORLD FOLDER SCENE ...``.

Models on other numbers of ranks read the checkpoints, and compute the same results as one rank. Run by
``unit/test_sharded_ranks.py``.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import te_fast
import te_fast.pytorch as te
from ranks import Scenes
from recipes import RECIPES
from te_fast.errors import DtypeError, StateError

HIDDEN, FFN, HEADS = 128, 256, 4
scenes = Scenes()
scene = scenes.scene


def alone():
    made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return made[dist.get_rank()]


@contextmanager
def folder():
    """A folder that all ranks know."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    yield names[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(Path(names[0]))


class Model(torch.nn.Module):
    """A model with every kind of share: by column, by row, of two matrices in one, of QKV products, of heads."""

    def __init__(self, group):
        super().__init__()
        shared = {"tp_group": group, "device": "cpu", "params_dtype": torch.bfloat16}
        size = dist.get_world_size(group)
        self.column = te.Linear(HIDDEN, FFN, parallel_mode="column", **shared)
        self.row = te.Linear(FFN, HIDDEN, parallel_mode="row", **shared)
        self.mlp = te.LayerNormMLP(
            HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, **shared
        )
        self.attention = te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, fuse_qkv_params=True, set_parallel_mode=True,
            tp_size=size, softmax_type="learnable", **shared,
        )  # fmt: skip
        mode = {"tensor_parallel_group": group, "device": "cpu", "dtype": torch.bfloat16}
        self.chain = te.ops.Sequential(
            te.ops.Linear(HIDDEN, FFN, tensor_parallel_mode="column", **mode),
            te.ops.Linear(FFN, HIDDEN, tensor_parallel_mode="row", **mode),
        )

    def forward(self, x):
        y = self.mlp(self.row(self.column(x)))
        return self.chain(self.attention(y.view(-1, 2, HIDDEN)))


def inputs():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(32, HIDDEN, generator=generator).bfloat16()


def made(group, seed):
    torch.default_generator.manual_seed(seed)
    model = Model(group)
    with torch.no_grad():  # biases and norms are zeros and ones
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    for name, parameter in model.named_parameters():  # those that every rank has whole
        is_shared = name.endswith("softmax_offset")  # Transformer Engine does not mark it
        if not (is_shared or getattr(parameter, "tensor_model_parallel", False)):
            dist.broadcast(parameter.data, dist.get_global_rank(group, 0), group=group)
    return model


def save(model, at):
    dcp.save(te_fast.sharded_state_dict(model), checkpoint_id=at)


def load(model, at, **options):
    state = te_fast.sharded_state_dict(model, **options)
    dcp.load(state, checkpoint_id=at)
    te_fast.load_sharded_state_dict(model, state)


def close(got, expected):
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < 2e-2, float(error)


@scene
def other_numbers_of_ranks():
    """Two ranks write what one reads, and one writes what two read."""
    world, one = dist.group.WORLD, alone()
    with torch.no_grad(), folder() as first, folder() as second:
        shared = made(world, 10 + dist.get_rank())
        expected = shared(inputs())
        save(copy.deepcopy(shared), first)  # averaged weights are a copy, for example
        whole = made(one, 20 + dist.get_rank())
        load(whole, first)
        close(whole(inputs()), expected)
        save(whole, second)
        other = made(world, 30 + dist.get_rank())
        load(other, second)
        for (name, parameter), own in zip(
            other.named_parameters(), shared.parameters(), strict=True
        ):
            assert torch.equal(parameter, own), name
        assert torch.equal(other(inputs()), expected)


@scene
def biases_that_ranks_add():
    """Each rank of a row-parallel operation adds its own bias; a checkpoint has their sum."""
    options = {"tensor_parallel_mode": "row", "device": "cpu"}
    with torch.no_grad(), folder() as first, folder() as second:
        shared = te.ops.Linear(FFN, HIDDEN, tensor_parallel_group=dist.group.WORLD, **options)
        shared.bias.copy_(torch.arange(HIDDEN) + 1.0 + dist.get_rank())
        total = shared.bias.clone()
        dist.all_reduce(total)
        save(shared, first)
        assert torch.equal(shared.bias, torch.arange(HIDDEN) + 1.0 + dist.get_rank())
        whole = te.ops.Linear(FFN, HIDDEN, tensor_parallel_group=alone(), **options)
        load(whole, first)
        assert torch.equal(whole.bias, total)
        again = te.ops.Linear(FFN, HIDDEN, tensor_parallel_group=dist.group.WORLD, **options)
        load(again, first)
        assert torch.equal(again.bias * dist.get_world_size(), total)
        save(whole, second)
        load(shared, second)
        assert torch.equal(shared.bias, again.bias)
        x = torch.randn(8, FFN, generator=torch.Generator().manual_seed(0))
        mine = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        close(shared(mine), torch.nn.functional.linear(x, whole.weight, total))


@scene
def a_share_is_not_the_whole():
    """A layer's own state holds one rank's share, which a checkpoint of several ranks must refuse."""
    layer = te.Linear(HIDDEN, FFN, parallel_mode="column", tp_group=dist.group.WORLD, device="cpu")
    state = te_fast.sharded_state_dict(layer)
    assert tuple(layer.state_dict()["weight"].shape) == (FFN // 2, HIDDEN)
    assert tuple(state["weight"].shape) == (FFN, HIDDEN)
    assert torch.equal(
        state["weight"].full_tensor().chunk(2)[dist.get_rank()], layer.weight.detach()
    )
    assert state["weight"].to_local().data_ptr() == layer.weight.data_ptr()
    with folder() as at:  # what was written as the whole is refused by the parameter's name
        dcp.save(layer.state_dict(), checkpoint_id=at)
        with pytest.raises(CheckpointException, match=r"(?s)Size mismatch .* for (weight|bias)"):
            dcp.load(state, checkpoint_id=at)
    joined = te.MultiheadAttention(
        HIDDEN, HEADS, fuse_qkv_params=True, qkv_weight_interleaved=False, set_parallel_mode=True,
        tp_group=dist.group.WORLD, tp_size=2, device="cpu",
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="qkv.weight has this rank's queries"):
        te_fast.sharded_state_dict(joined)
    other = te.Linear(
        HIDDEN, HIDDEN, parallel_mode="column", tp_group=dist.group.WORLD, device="cpu"
    )
    with pytest.raises(StateError, match="this rank's share of weight must have the shape"):
        te_fast.load_sharded_state_dict(other, te_fast.sharded_state_dict(layer))
    with pytest.raises(DtypeError, match="state must be a mapping"):
        te_fast.load_sharded_state_dict(layer, 5)
    with pytest.raises(DtypeError, match="model must be a torch.nn.Module, got int"):
        te_fast.sharded_state_dict(5)
    # Nothing is split: the same on all ranks.
    plain = te.Linear(HIDDEN, FFN, device="cpu")
    assert type(te_fast.sharded_state_dict(plain)["weight"]) is torch.Tensor


@scene
def weights_in_fp8():
    """FP8 weights are read from a checkpoint in BF16, and written to such a checkpoint."""
    world = dist.group.WORLD
    for name, make in RECIPES.items():
        with torch.no_grad(), folder() as first, folder() as second:
            high = made(world, 10 + dist.get_rank())
            save(high, first)
            with te.quantized_model_init(recipe=make()):
                low = Model(world)
            assert isinstance(low.mlp.fc1_weight, te.QuantizedTensor)
            load(low, first, scaling_states=False)
            for (key, parameter), wanted in zip(
                low.named_parameters(), high.parameters(), strict=True
            ):
                given = parameter
                if isinstance(parameter, te.QuantizedTensor):
                    given = parameter.dequantize()
                    again = parameter._quantizer(wanted).dequantize()
                    assert torch.equal(given, again), (name, key)
                else:
                    assert torch.equal(given, wanted), (name, key)
            with te.autocast(recipe=make()):
                y = low(inputs())
            close_in_fp8 = (y.double() - high(inputs()).double()).norm() / y.double().norm()
            assert close_in_fp8 < 0.2, (name, float(close_in_fp8))
            save(low, second)
            back = made(world, 20 + dist.get_rank())
            load(back, second)
            for (key, parameter), wanted in zip(
                back.named_parameters(), low.parameters(), strict=True
            ):
                given = wanted
                if isinstance(wanted, te.QuantizedTensor):
                    given = wanted.dequantize()
                assert torch.equal(parameter, given), (name, key)


@scene
def weights_that_fsdp2_shards():
    """Without tensor parallelism one rank reads what FSDP2's ranks write, in FP8 or not, and they read its own."""
    from torch.distributed.fsdp import fully_shard

    def model(recipe, seed, activation="gelu"):
        torch.default_generator.manual_seed(seed)
        options = {"device": "cpu", "params_dtype": torch.bfloat16}
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
            return te.LayerNormMLP(HIDDEN, FFN, activation=activation, **options)

    def values(parameter):
        local = getattr(parameter, "_local_tensor", parameter)
        plain = local.dequantize() if isinstance(local, te.QuantizedTensor) else local.detach()
        if local is parameter:
            return plain
        return torch.distributed.tensor.DTensor.from_local(
            plain, parameter.device_mesh, parameter.placements
        ).full_tensor()

    for recipe in (None, RECIPES["current"](), RECIPES["delayed"]()):
        with torch.no_grad(), folder() as first, folder() as second:
            sharded, whole = fully_shard(model(recipe, 1)), model(None, 2)
            save(sharded, first)
            load(whole, first, scaling_states=False)
            for one, other in zip(sharded.parameters(), whole.parameters(), strict=True):
                assert torch.equal(values(one), other), recipe
            other = model(None, 3)
            save(other, second)
            load(sharded, second, scaling_states=False)
            for one, wanted in zip(sharded.parameters(), other.parameters(), strict=True):
                error = (values(one) - wanted).norm() / wanted.norm().clamp(min=1e-6)
                assert error <= (0.05 if recipe else 0.0), (recipe, float(error))
    gated = fully_shard(model(None, 1, "swiglu"))
    with pytest.raises(NotImplementedError, match="fc1_weight is of two matrices and sharded by"):
        te_fast.sharded_state_dict(gated)


@scene
def experts():
    """Experts are numbered across all ranks, in separate parameters and in a stacked one."""
    for stacked in (False, True):
        sizes = (HIDDEN, FFN, 4, 2)
        options = {"device": "cpu", "single_grouped_weight": stacked}
        with torch.no_grad(), folder() as at:
            torch.default_generator.manual_seed(dist.get_rank())
            shared = te.MoE(*sizes, ep_group=dist.group.WORLD, **options)
            dist.broadcast(shared.router.data, 0)
            save(shared, at)
            whole = te.MoE(*sizes, **options)
            load(whole, at)
            x = inputs().float()
            close(whole(x), shared(x))


if __name__ == "__main__":
    scenes.main()
