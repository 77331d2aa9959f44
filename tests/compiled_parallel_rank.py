"""One of two ranks that compile layers which they share: ``python compiled_parallel_rank.py RANK WORLD FOLDER ...``.

Each scene compares with the same layers called eagerly, which ``parallel_rank.py`` compares with plain torch. Run by
``unit/test_parallel_ranks.py``.
"""

from __future__ import annotations

import copy
import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist

import te_fast.pytorch as te
from graphs import compiled, refusal_of, states_of
from parallel_rank import random, region, share
from ranks import Scenes, device
from recipes import RECIPES
from te_fast.tensor.primary import is_quantized

# torch before 2.11 makes instances of autograd functions while it compiles, and then warns of its own instances.
warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
# torch 2.11's own code generation for GPUs
warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated", DeprecationWarning)
COLS, FFN = 32, 64
scenes = Scenes()
scene = scenes.scene


def assert_trains_alike(model, recipe, sequence, *, rows=(16, 32, 16), first=(None,), **options):
    """Train a copy compiled, without a break, beside the model: outputs, gradients and scales are equal bit for bit."""
    eager, graphed = model, copy.deepcopy(model)
    for module in (eager, graphed):
        if getattr(module, "fuse_wgrad_accumulation", False):
            for name, p in module.named_parameters():
                if name.endswith("weight") and p.dim() == 2:
                    p.main_grad = torch.zeros_like(p)
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run = compiled(graphed, **options)
    for step, number in enumerate(rows):
        whole = random(number, COLS, seed=step).float()
        given = share(whole, 0) if sequence else whole
        for is_first in first:
            xs = [given.clone().requires_grad_() for _ in range(2)]
            keywords = {} if is_first is None else {"is_first_microbatch": is_first}
            outs = []
            for module, x in zip((eager, run), xs, strict=True):
                with region(recipe):
                    y = module(x, **keywords)
                outs.append(y if isinstance(y, tuple) else (y,))
            for one, other in zip(*outs, strict=True):
                assert torch.equal(one, other)
            for y in outs:
                sum(part.float().square().sum() for part in y).backward()
            assert torch.equal(xs[0].grad, xs[1].grad)
        for module in (eager, graphed):
            for part in module.modules():
                if getattr(part, "delay_wgrad_compute", False):
                    part.backward_dw()
        for (name, one), other in zip(eager.named_parameters(), graphed.parameters(), strict=True):
            grads = [getattr(p, "main_grad", p.grad) for p in (one, other)]
            assert torch.equal(*grads), name
            with torch.no_grad():
                for p, grad in zip((one, other), grads, strict=True):
                    p -= 0.01 * grad
                    p.grad = None
        for one, other in zip(states_of(eager), states_of(graphed), strict=True):
            assert torch.equal(one, other)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] - count


def layers(sequence, **options):
    shared = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence, "device": device()}
    shared |= options
    torch.manual_seed(dist.get_rank())
    return {
        "column": te.Linear(COLS, FFN, parallel_mode="column", **shared),
        "norm": te.LayerNormLinear(COLS, FFN, parallel_mode="column", **shared),
        "mlp": te.LayerNormMLP(COLS, FFN, set_parallel_mode=True, **shared),
    }


class Row(torch.nn.Module):
    """A row-parallel layer behind a column-parallel one, with torch's code between."""

    def __init__(self, sequence):
        super().__init__()
        shared = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence, "device": device()}
        torch.manual_seed(dist.get_rank())
        self.column = te.Linear(COLS, FFN, parallel_mode="column", **shared)
        self.row = te.Linear(FFN, COLS, parallel_mode="row", **shared)

    def forward(self, x):
        return x + self.row(torch.relu(self.column(x)))


def check(name, sequence, recipe, **options):
    module = Row(sequence) if name == "row" else layers(sequence)[name]
    assert (
        assert_trains_alike(module, recipe, sequence, **options) <= 2
    )  # the second for any number of rows
    torch._dynamo.reset()


@scene
def layers_in_graphs():
    check("mlp", True, "delayed")
    check("row", True, "current", rows=(16, 16))
    check("norm", False, "block", rows=(16, 16))


@scene
def every_layer_in_graphs():
    names = "column", "row", "norm", "mlp"
    for name, sequence, recipe in product(names, (False, True), (None, *RECIPES)):
        check(name, sequence, recipe)


def check_options(kind, options):
    assert_trains_alike(layers(True, **options)[kind], "current", True)
    torch._dynamo.reset()


@scene
def every_option_in_graphs():
    assert_trains_alike(layers(True)["mlp"], "current", True, first=(True, False))
    torch._dynamo.reset()
    options = "delay_wgrad_compute", "return_bias", "fuse_wgrad_accumulation"
    for kind, option in product(("column", "mlp"), options):
        check_options(kind, {option: True})
    shared = {"tp_group": dist.group.WORLD, "sequence_parallel": True, "device": device()}
    for gathered in (False, True):
        module = te.LayerNormLinear(
            COLS, FFN, parallel_mode="column", return_layernorm_output=True,
            return_layernorm_output_gathered=gathered, **shared,
        )  # fmt: skip
        assert_trains_alike(module, "current", True)
        torch._dynamo.reset()
    module = te.LayerNormMLP(COLS, FFN, set_parallel_mode=True, checkpoint=True, **shared)
    assert_trains_alike(module, "current", True)


def operations(sequence):
    options = {
        "device": device(),
        "tensor_parallel_group": dist.group.WORLD,
        "sequence_parallel": sequence,
    }
    torch.manual_seed(dist.get_rank())
    return te.ops.Sequential(
        te.ops.LayerNorm(COLS, device=device()),
        te.ops.BasicLinear(COLS, FFN, tensor_parallel_mode="column", **options),
        te.ops.GELU(),
        te.ops.BasicLinear(FFN, COLS, tensor_parallel_mode="row", **options),
    )


def check_operations(sequence, recipe, **steps):
    assert_trains_alike(operations(sequence), recipe, sequence, **steps)
    torch._dynamo.reset()


@scene
def operations_in_graphs():
    check_operations(True, "current", rows=(16, 16))
    linear = te.ops.BasicLinear(COLS, COLS, device=device())
    ops = te.ops.AllGather(), te.ops.GELU(), te.ops.AllReduce(), te.ops.ReduceScatter()
    assert_trains_alike(te.ops.Sequential(linear, *ops), None, False, rows=(16, 16))
    torch._dynamo.reset()


@scene
def every_operation_in_graphs():
    for sequence, recipe in product((False, True), (None, "current", "delayed")):
        check_operations(sequence, recipe)


def quantized(make, recipe):
    with te.quantized_model_init(recipe=RECIPES[recipe]()):
        module = make()
    assert any(is_quantized(parameter) for parameter in module.parameters())
    return module


def check_quantized(make, sequence, recipe, inside=True, **options):
    module = quantized(make, recipe)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the weights are quantised, and dequantised")
        assert assert_trains_alike(module, recipe if inside else None, sequence, **options) <= 2
    torch._dynamo.reset()


@scene
def quantised_weights_in_graphs():
    check_quantized(lambda: layers(True)["mlp"], True, "delayed")
    check_quantized(lambda: operations(True), True, "block", rows=(16, 16))


@scene
def every_quantised_weight_in_graphs():
    steps = {"rows": (16, 16)}
    for sequence, recipe in ((False, "delayed"), (True, "current"), (False, "block")):
        check_quantized(lambda s=sequence: layers(s)["norm"], sequence, recipe, **steps)
        check_quantized(lambda s=sequence: Row(s), sequence, recipe, **steps)
    check_quantized(lambda: layers(True)["mlp"], True, "current", inside=False, **steps)
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
    check_quantized(lambda: layers(True, **options)["mlp"], True, "current", **steps)


@scene
def every_whole_layer_in_graphs():
    torch.manual_seed(dist.get_rank())
    layer = te.TransformerLayer(
        COLS, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True, sequence_parallel=True,
        tp_group=dist.group.WORLD, device=device(), self_attn_mask_type="causal",
    )  # fmt: skip

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x.unsqueeze(1)).squeeze(1)

    assert_trains_alike(Model(), "delayed", True)
    torch._dynamo.reset()


@scene
def what_graphs_refuse():
    module = layers(True)["column"]
    run = compiled(module)
    row = te.Linear(
        COLS, FFN, parallel_mode="row", sequence_parallel=True, tp_group=dist.group.WORLD, device=device(), name="row"
    )  # fmt: skip
    size = dist.get_world_size()
    # torch 2.8 may give the error's name without its message.
    message = refusal_of(row, torch.ones(size + 1, COLS // size))
    assert "row: sequence_parallel" in message or "ShapeError" in message
    late = te.Linear(COLS, FFN, parallel_mode="row", tp_size=size, device=device(), name="late")
    message = refusal_of(late, torch.ones(4, COLS // size))
    assert "set_tensor_parallel_group" in message or "StateError" in message
    with torch.no_grad(), pytest.raises(Exception, match="torch.export takes no layer that ranks"):
        torch.export.export(module, (torch.ones(4, COLS),), strict=True)
    assert run(torch.ones(8, COLS)).shape == (8 * size, FFN // size)
    assert run(torch.ones(0, COLS)).shape == (0, FFN // size)


if __name__ == "__main__":
    scenes.main()
