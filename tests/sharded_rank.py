"""One of several ranks that train on shards of the data: ``python sharded_rank.py RANK WORLD FOLDER SCENE ...``.

Gradients are compared with the mean of the ranks' separate gradients. Run by ``unit/test_sharded_ranks.py``.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
import warnings
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_fast.pytorch as te
from checkpoint_rank import folder
from every_layer import LAYERS
from ranks import Scenes
from recipes import RECIPES

scenes = Scenes()
scene = scenes.scene
ROWS, COLS = 16, 32


def region(name, group=None):
    recipe = name and RECIPES[name]()
    return te.autocast(enabled=name is not None, recipe=recipe, amax_reduction_group=group)


def batch(step, rank):
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(10 * step + rank))


def made(make):
    torch.default_generator.manual_seed(0)
    return torch.nn.Sequential(make())


def step(model, recipe, x, group=None):
    with region(recipe, group):
        y = model(x)
    y.square().mean().backward()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(wrap, make, recipe, *, group=None):
    """Steps of a model that ranks share, beside those of a copy whose gradients are averaged by hand."""
    model, plain = made(make), made(make)
    wrapped = wrap(model)
    size = dist.get_world_size()
    for number in range(2):
        x = batch(number, dist.get_rank())
        step(wrapped, recipe, x, group)
        step(plain, recipe, x, group)
        for (name, parameter), other in zip(
            wrapped.named_parameters(), plain.parameters(), strict=True
        ):
            dist.all_reduce(other.grad)
            other.grad /= size
            got = whole(parameter.grad)
            assert torch.allclose(got, other.grad, rtol=1e-5, atol=1e-6), (name, number, recipe)
        with torch.no_grad():
            for one in (wrapped, plain):
                for parameter in one.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return wrapped


@contextlib.contextmanager
def raises(kind, message):
    try:
        yield
    except kind as error:
        assert message in str(error), error  # noqa: PT017
    else:
        raise AssertionError(message)


def every(offset):
    """Every layer with one of the recipes, and one layer with all recipes."""
    recipes = (None, *RECIPES)
    names = list(LAYERS)
    pairs = [(name, recipes[(number + offset) % 4]) for number, name in enumerate(names)]
    return dict.fromkeys([*pairs, *product(("LayerNormMLP",), recipes)])


@scene
def data_parallel():
    for name, recipe in every(0):
        train(torch.nn.parallel.DistributedDataParallel, LAYERS[name], recipe)


def shard(model, mesh=None, **options):
    from torch.distributed.fsdp import fully_shard

    for part in model:
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


@scene
def sharded():
    for name, recipe in every(2):
        train(shard, LAYERS[name], recipe)
    train(
        lambda model: shard(model, reshard_after_forward=False), LAYERS["LayerNormMLP"], "delayed"
    )


@scene
def checkpoints():
    """Distributed checkpoints of sharded models: parameters and scales come back."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    for name, recipe in product(("LayerNormMLP", "ops.Sequential"), ("delayed", None)):
        folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folders)
        saved = shard(made(LAYERS[name]))
        step(saved, recipe, batch(0, 0))
        dcp.save(states.get_model_state_dict(saved), checkpoint_id=folders[0])
        loaded = shard(made(LAYERS[name]))
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
        step(loaded, recipe, batch(0, 0))  # the model has scales already, of another step
        state = states.get_model_state_dict(loaded)
        dcp.load(state, checkpoint_id=folders[0])
        states.set_model_state_dict(loaded, state)
        x = batch(1, 0)
        with torch.no_grad(), region(recipe):
            assert torch.equal(loaded(x), saved(x))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folders[0]))


@scene
def meshes():
    """Two dimensions: replicas of shards, and shards of tensors that tensor parallelism has split."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, recipe in (("LayerNormMLP", "delayed"), ("ops.Linear", "current"), ("Linear", None)):
        train(lambda model: shard(model, mesh=mesh), LAYERS[name], recipe)
    for name in ("current", "delayed"):
        made_sharded(name, mesh, mesh["shard"].get_group())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    everyone = mesh._flatten().get_group()
    group, data = mesh["tensor"].get_group(), mesh["data"].get_group()
    rank = dist.get_rank(group)
    options = {"device": "cpu", "set_parallel_mode": True, "sequence_parallel": True}
    for recipe in (None, *RECIPES):
        models = []
        for wraps in (False, True):
            torch.default_generator.manual_seed(rank)
            mlp = te.LayerNormMLP(COLS, 64, tp_group=group, **options)
            models.append(torch.nn.Sequential(mlp))
            if wraps:
                shard(models[-1], mesh=mesh["data"])
        plain, wrapped = models
        for number in range(2):
            x = batch(number, dist.get_rank(data)).chunk(2)[rank]
            for model in models:
                step(model, recipe, x, everyone)
            for parameter, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
                dist.all_reduce(other.grad, group=data)
                other.grad /= 2
                got = whole(parameter.grad)
                assert torch.allclose(got, other.grad, rtol=1e-5, atol=1e-6), (recipe, number)
                parameter.grad = other.grad = None
        if recipe == "delayed":
            for key in ("scaling_fwd", "scaling_bwd"):
                scale = wrapped[0].fp8_meta[key].scale
                largest = scale.clone()
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                assert torch.equal(scale, largest)


@scene
def quantised_weights_that_ranks_share():
    """Weights that are FP8 tensors from the start: gradients and steps equal those of plain weights of equal values."""
    group = dist.group.WORLD
    options = {"device": "cpu", "sequence_parallel": True, "tp_group": group, "bias": False}
    for recipe, (kind, mode) in product(
        ("current", "delayed"),
        (("Linear", "column"), ("Linear", "row"), ("LayerNormLinear", "column")),
    ):
        torch.default_generator.manual_seed(dist.get_rank())
        with te.quantized_model_init(enabled=True, recipe=RECIPES[recipe]()):
            layer = getattr(te, kind)(COLS, 64, parallel_mode=mode, **options)
        plain = getattr(te, kind)(COLS, 64, parallel_mode=mode, **options)
        with torch.no_grad():
            plain.weight.copy_(layer.weight.dequantize())
        x = torch.randn(ROWS, layer.in_features)
        ys = []
        for one in (layer, plain):
            local = x.clone().requires_grad_()
            with region(recipe):
                y = one(local)
            y.sum().backward()
            ys.append((y.detach(), local.grad, one.weight.grad))
        for got, expected in zip(*ys, strict=True):
            error = (got - expected).norm() / expected.norm()
            assert error < 5e-2, (recipe, kind, mode, error)


def fp8_layer(recipe, width, size):
    """A model with one FP8 weight, of values of a size."""
    with te.quantized_model_init(enabled=True, recipe=RECIPES[recipe]()):
        layer = te.Linear(
            width, width, device="cpu", bias=False, init_method=lambda w: w.normal_(std=size)
        )
    return torch.nn.Sequential(layer)


def loads(model, at):
    """Load a distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    state = states.get_model_state_dict(model)
    dcp.load(state, checkpoint_id=at)
    states.set_model_state_dict(model, state)


@scene
def checkpoints_of_other_meshes():
    """FP8 weights that four ranks have saved are loaded by pairs, and the other way, with bytes and scales."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    meshes = init_device_mesh("cpu", (4,)), pairs
    x = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(2))
    for name, (first, second) in product(RECIPES, (meshes, meshes[::-1])):
        torch.default_generator.manual_seed(0)
        saved = shard(fp8_layer(name, 512, 0.1), mesh=first)
        for size in (0.01, 1.0):
            loaded = shard(fp8_layer(name, 512, size), mesh=second)
            with folder() as at:
                dcp.save(states.get_model_state_dict(saved), checkpoint_id=at)
                loads(loaded, at)
            with torch.no_grad(), region(name):
                assert torch.equal(loaded(x), saved(x)), (name, size)


@scene
def shards_of_uneven_rows():
    """The last rank has fewer rows of an FP8 weight. It writes and loads them as the others do."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    for name in ("current", "delayed"):
        torch.default_generator.manual_seed(0)
        plain = fp8_layer(name, 80, 0.1)
        model, loaded = shard(copy.deepcopy(plain)), shard(fp8_layer(name, 80, 1.0))
        with torch.no_grad():
            plain[0].weight.mul_(2)
            model[0].weight.mul_(2)
        expected = plain[0].weight.dequantize().chunk(3)[dist.get_rank()]
        assert torch.equal(model[0].weight.to_local().dequantize(), expected), name
        with folder() as at:
            dcp.save(states.get_model_state_dict(model), checkpoint_id=at)
            loads(loaded, at)
        assert torch.equal(loaded[0].weight.to_local().dequantize(), expected), name


def uneven(weight):
    """Initial values; those of the last rank are the largest by far."""
    torch.nn.init.normal_(weight)
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    local.mul_(1 + 9 * dist.get_rank())


def made_sharded(recipe, mesh=None, group=None):
    """Weights are made after `fully_shard`: together they equal those of a layer that one rank makes."""
    width, recipe = 256, RECIPES[recipe]
    options = {"enabled": True, "recipe": recipe(), "preserve_high_precision_init_val": True}
    layer = {"bias": False, "init_method": uneven}
    with te.quantized_model_init(**options):
        model = torch.nn.Sequential(te.Linear(width, width, device="meta", **layer))
    shard(model, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's DTensor, on a CPU
        torch.default_generator.manual_seed(0)
        model[0].reset_parameters()
    values = model[0].weight._local_tensor.get_high_precision_init_val()
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, values, group=group)
    with te.quantized_model_init(enabled=True, recipe=recipe()):
        plain = te.Linear(width, width, device="cpu", **layer)
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), te.autocast(recipe=recipe()):
        plain.weight.quantize_(torch.cat(rows))
        assert torch.equal(model(x), plain(x)), recipe


@scene
def weights_that_are_made_sharded():
    for name in RECIPES:
        made_sharded(name)


@scene
def weights_that_are_loaded_before_the_first_forward():
    """Values in high precision are quantised as in one process, though no rank has gathered a weight yet."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states

    def layer(kind, recipe):
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
            return torch.nn.Sequential(kind(256, 256, device="cpu", bias=False))

    options = states.StateDictOptions(strict=False)
    for name, kind in product(("current", "delayed"), (te.Linear, te.ops.Linear)):
        recipe = RECIPES[name]()
        saved = layer(kind, None)
        with torch.no_grad():
            for parameter in saved.parameters():
                torch.nn.init.normal_(
                    parameter, std=1e-4, generator=torch.Generator().manual_seed(1)
                )
                parameter[128:] *= 10
        x = torch.randn(ROWS, 256, generator=torch.Generator().manual_seed(2))
        with te.autocast(recipe=recipe):
            saved(x).sum().backward()
        plain = layer(kind, recipe)
        plain.load_state_dict(saved.state_dict())
        shard(saved)
        expected = plain.state_dict()
        weight = next(key for key in expected if key.endswith("weight"))
        for in_place in (False, True) if name == "current" else (False,):
            model = shard(layer(kind, recipe))
            state = states.get_model_state_dict(saved)
            if in_place:
                folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
                dist.broadcast_object_list(folders)
                dcp.save({weight: state[weight]}, checkpoint_id=folders[0])
                state = {weight: states.get_model_state_dict(model)[weight]}
                dcp.load(state, checkpoint_id=folders[0])
            states.set_model_state_dict(model, state, options=options)
            local = next(model.parameters()).to_local()
            rows = expected[weight].dequantize().chunk(2)[dist.get_rank()]
            assert torch.equal(local.dequantize(), rows), (name, kind, in_place)


@scene
def weights_that_each_rank_has_made():
    """Ranks may draw other initial values, each of which keeps its own rows; all gather the same weight."""
    for name in ("current", "delayed"):
        torch.default_generator.manual_seed(dist.get_rank())
        with te.quantized_model_init(enabled=True, recipe=RECIPES[name]()):
            layer = te.Linear(COLS, COLS, device="cpu", init_method=uneven)
        rows = layer.weight.dequantize().chunk(2)[dist.get_rank()]
        shard(torch.nn.Sequential(layer))
        of_all = [torch.empty_like(rows) for _ in range(2)]
        dist.all_gather(of_all, rows)
        layer.unshard()
        values, expected = layer.weight.dequantize(), torch.cat(of_all)
        assert (values - expected).norm() < 0.05 * expected.norm(), name


@scene
def stacks_of_experts_that_are_made_sharded():
    """One parameter for all experts is initialised after `fully_shard` as a layer that one rank makes."""
    for kind, split in (
        (te.GroupedLinear, [8, 8, 0]),
        (te.ops.GroupedLinear, torch.tensor([8, 8, 0])),
    ):
        layers = []
        for device in ("cpu", "meta"):
            layers.append(kind(3, COLS, COLS, single_grouped_weight=True, device=device))
            if device == "meta":
                shard(torch.nn.Sequential(layers[-1]))
            torch.default_generator.manual_seed(0)
            layers[-1].reset_parameters()
        plain, sharded_layer = layers
        for one, other in zip(sharded_layer.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(one), other), kind
        x = batch(0, 0)
        assert torch.equal(sharded_layer(x, split), plain(x, split)), kind
        for name in RECIPES:
            with te.quantized_model_init(enabled=True, recipe=RECIPES[name]()):
                layer = kind(3, COLS, COLS, single_grouped_weight=True, device="meta")
            shard(torch.nn.Sequential(layer))
            with raises(NotImplementedError, "FSDP2 gathers no stack"):
                layer.reset_parameters()


@scene
def copies_of_models():
    """A wrapped model, with its process groups, may be copied before it is sharded."""
    layer = te.Linear(COLS, COLS, device="cpu", tp_group=dist.group.WORLD, parallel_mode="row")
    model = copy.deepcopy(torch.nn.Sequential(layer, te.ops.AllReduce(dist.group.WORLD)))
    assert model[0].tp_group is layer.tp_group
    model(torch.ones(4, COLS // dist.get_world_size())).sum().backward()


@scene
def maxima_of_a_part_of_the_ranks():
    """Copies of FP8 tensors are measured by their own ranks: a stage of a pipeline steps while another one does not."""
    rank = dist.get_rank()
    group = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    quantizer = te.Float8CurrentScalingQuantizer(
        te.DType.kFloat8E4M3, "cpu", with_amax_reduction=True, amax_reduction_group=group
    )
    tensor = quantizer(batch(0, rank))
    tensors = tensor, tensor.detach(), tensor.clone(), copy.deepcopy(tensor)
    quantizers = quantizer.copy(), copy.copy(quantizer), copy.deepcopy(quantizer)
    for one in (*quantizers, *(each._quantizer for each in tensors)):
        assert one.amax_reduction_group is group
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("stage", "data"))
    if rank == 0:
        model = shard(fp8_layer("current", COLS, 0.1), mesh=mesh["data"])
        with torch.no_grad():
            model[0].weight.mul_(3)


@scene
def optimizers_of_shards():
    """Optimizers step shards, of no rows, too, as torch's step whole parameters."""
    kinds = {
        te.optimizers.FusedAdam: torch.optim.AdamW,
        te.optimizers.FusedSGD: torch.optim.SGD,
    }
    for ours, torchs in kinds.items():
        sets: list[dict] = [{"weight_decay": 0.1}]
        if ours is te.optimizers.FusedSGD:
            sets += [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}]
        for options in sets:
            models = [made(lambda: te.Linear(COLS, 3, device="cpu")) for _ in range(2)]
            models[0].append(te.Linear(3, 1, device="cpu"))
            models[1].append(copy.deepcopy(models[0][1]))
            shard(models[0])
            optimizers = [
                kind(model.parameters(), lr=0.01, **options)
                for kind, model in zip((ours, torchs), models, strict=True)
            ]
            for number in range(3):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    step(model, None, batch(number, 0))
                    optimizer.step()
            state = optimizers[0].state_dict()["state"].values()
            assert all(hasattr(one, "to_local") for each in state for one in each.values())
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                assert torch.allclose(whole(one), other, rtol=1e-4, atol=1e-6), (ours, options)


@scene
def gradients_that_are_sums_over_ranks():
    """The gradient of a parameter that all ranks have whole may be the sum of the ranks' terms."""
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in (te.optimizers.FusedAdam, te.optimizers.FusedSGD):
        plain = torch.nn.Parameter(torch.ones(COLS))
        shared = torch.nn.Parameter(distribute_tensor(torch.ones(COLS), mesh))
        terms = [batch(number, 0)[0] for number in range(dist.get_world_size())]
        plain.grad = torch.stack(terms).sum(0)
        shared.grad = DTensor.from_local(terms[dist.get_rank()], mesh, [Partial()])
        for parameter in (plain, shared):
            kind([parameter], lr=0.1).step()
        assert torch.allclose(shared.to_local(), plain, rtol=1e-5, atol=1e-6), kind


if __name__ == "__main__":
    scenes.main()
