"""One of two ranks whose FP8 parameters FSDP2 shards: ``python fsdp_rank.py RANK FOLDER`` writes its results as JSON.

Run by ``unit/test_fsdp_quantized.py``, in two processes of their own.
"""

import datetime
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import te_fast.pytorch as te
from recipes import RECIPES
from te_fast.errors import UnsupportedError
from te_fast.tensor.tensor import Float8TensorBase

WIDTH, STEPS = 256, 2


def build(recipe, width=WIDTH):
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        return torch.nn.Sequential(
            te.Linear(width, width, device="cpu", params_dtype=torch.bfloat16),
            te.LayerNormLinear(width, width, device="cpu", params_dtype=torch.bfloat16),
        )


def shard(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def step(model, x, recipe):
    model.zero_grad()
    with te.autocast(recipe=recipe):
        y = model(x)
    y.float().pow(2).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-0.5)
    return y.detach()


def gathered_bytes(model):
    """Count the bytes that the hooks hand to the all-gather meanwhile."""
    counted = [0]
    hook = Float8TensorBase.fsdp_pre_all_gather

    def count(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy):
        inputs, metadata = hook(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy)
        counted[0] += sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        return inputs, metadata

    Float8TensorBase.fsdp_pre_all_gather = count
    return counted


def whole(parameter):
    """Values of a sharded parameter."""
    local, (placement,) = parameter.to_local(), parameter.placements
    values = local.dequantize() if isinstance(local, Float8TensorBase) else local
    values = values.contiguous()
    parts = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(parts, values)
    return torch.cat(parts, placement.dim)


def trains_as_one(name, reshard, dim=0):
    """Results, and parameters after each step, equal those of one process bit for bit."""
    recipe, alike = RECIPES[name](), []
    options = {"reshard_after_forward": reshard}
    if dim != 0:
        options["shard_placement_fn"] = lambda one: Shard(dim) if one.dim() > 1 else None
    plain, model = build(recipe), shard(build(recipe), **options)
    classes = {type(parameter.to_local()).__name__ for parameter in model.parameters()}
    for number in range(STEPS):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        alike.append(torch.equal(step(plain, x, recipe), step(model, x, recipe)))
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            values = one.dequantize() if isinstance(one, Float8TensorBase) else one.detach()
            alike.append(torch.equal(values, whole(other)))
    return {"alike": alike, "classes": sorted(classes)}


def stays_flat(name):
    """Bytes of all tensors after each step, and those that a step has gathered."""
    recipe = RECIPES[name]()
    model = shard(build(recipe))
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    counted, memory, gathered = gathered_bytes(model), [], []
    for _ in range(4):
        counted[0] = 0
        step(model, x, recipe)
        gathered.append(counted[0])
        model.reshard()
        gc.collect()
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if type(tensor) is torch.Tensor
        }
        memory.append(sum(storages.values()))
    return {"memory": memory, "gathered": gathered}


def uneven(name):
    """Rows that do not divide evenly among the ranks."""
    recipe = RECIPES[name]()
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(
            64, 80 if name == "block" else 144, device="cpu", params_dtype=torch.bfloat16
        )
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with te.autocast(recipe=recipe), torch.no_grad():
        expected = layer(x)
    try:
        model = fully_shard(torch.nn.Sequential(layer))
        if name == "delayed":
            layer.reset_fp8_meta_tensors()
        with te.autocast(recipe=recipe), torch.no_grad():
            return torch.equal(expected, model(x))
    except UnsupportedError as error:
        return str(error)


def refuses_columns():
    """Blocks are gathered by rows alone."""
    recipe = RECIPES["block"]()
    model = shard(build(recipe), shard_placement_fn=lambda one: Shard(one.dim() - 1))
    try:
        step(model, torch.ones(32, WIDTH, dtype=torch.bfloat16), recipe)
    except UnsupportedError as error:
        return str(error)


def identity_of_uneven_rows():
    """A weight in high precision behind the interface of quantised tensors, with one row more on one rank."""
    torch.manual_seed(0)
    layer = te.Linear(64, 3, device="cpu", bias=False)
    x = torch.randn(16, 64)
    expected = layer(x).detach()
    layer.weight = torch.nn.Parameter(te.IdentityQuantizer()(layer.weight.detach()))
    model = fully_shard(torch.nn.Sequential(layer))
    model(x).sum().backward()
    return torch.equal(model(x), expected)


def resumes(name):
    """Losses after a distributed checkpoint, and of the run that wrote it."""
    # So that the next scale follows from the maximum that the checkpoint has.
    options = {"amax_compute_algo": "most_recent"} if name == "delayed" else {}
    recipe, at = RECIPES[name](**options), str(Path(sys.argv[2]) / name)

    def train(model, optimizer, numbers):
        losses = []
        for number in numbers:
            x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
            optimizer.zero_grad()
            with te.autocast(recipe=recipe):
                loss = model(x).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def fresh():
        model = shard(build(recipe))
        with torch.no_grad():  # no rank has the larger maxima of both layers
            for number, layer in enumerate(model):
                local = layer.weight.to_local()
                local.copy_(local.dequantize() * (1 + (number + dist.get_rank()) % 2))
        options = {"lr": 1e-2, "master_weights": True}
        return model, te.optimizers.FusedAdam(model.parameters(), **options)

    # The first model has trained on before the second one exists: the end of a region updates the scales of both.
    saved, first = fresh()
    train(saved, first, range(3))
    model_state, states = get_state_dict(saved, first)
    dcp.save({"model": model_state, "optimizer": states}, checkpoint_id=at)
    expected = train(saved, first, range(3, 8))
    loaded, second = fresh()
    train(loaded, second, [20])  # it has scales already, of another step
    model_state, states = get_state_dict(loaded, second)
    state = {"model": model_state, "optimizer": states}
    dcp.load(state, checkpoint_id=at)
    set_state_dict(
        loaded, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    runs = [expected, train(loaded, second, range(3, 8))]
    pairs = zip(saved.parameters(), loaded.parameters(), strict=True)
    return {"losses": runs, "alike": all(torch.equal(*map(whole, pair)) for pair in pairs)}


def of_rows(rows, columns):
    quantizers = {
        "tensor": lambda: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu"),
        "block": lambda: te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2
        ),
        "identity": te.IdentityQuantizer,
    }
    if columns is None:
        return quantizers[rows]()
    return te.HybridQuantizer(
        rowwise_quantizer=quantizers[rows](), columnwise_quantizer=quantizers[columns]()
    )


def halves(tensor):
    """Values of both halves of a tensor of two values; else the values of the tensor."""
    if isinstance(tensor, te.HybridQuantizedTensor):
        return [tensor.rowwise_sub_storage.dequantize(), tensor.columnwise_sub_storage.dequantize()]
    is_identity = type(tensor).__name__ == "IdentityTensor"
    return [tensor.dequantize() if is_identity else tensor.detach()]


def trains_two_values(rows, columns, recipe):
    """Results and both halves after each step equal those of one process bit for bit."""
    plain, model = build(None), build(None)
    for layer in (*plain, *model):
        layer.weight = torch.nn.Parameter(of_rows(rows, columns)(layer.weight.detach()))
    shard(model)
    region, alike = RECIPES[recipe](), []
    classes = {type(one.to_local()).__name__ for one in model.parameters() if one.dim() == 2}
    for number in range(STEPS):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        alike.append(torch.equal(step(plain, x, region), step(model, x, region)))
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            for values, local in zip(halves(one), halves(other.to_local()), strict=True):
                parts = [torch.empty_like(local) for _ in range(2)]
                dist.all_gather(parts, local.contiguous())
                alike.append(torch.equal(values, torch.cat(parts)))
    return {"alike": alike, "classes": sorted(classes)}


def loads_two_values(made_alone):
    """Rows that are written before the first gather are measured by both ranks; so are rows that each rank has made."""
    rank = dist.get_rank()
    rows = torch.randn(2, WIDTH // 2, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows[1] *= 10
    quantizer = of_rows("tensor", "identity")
    layer, plain = (
        te.Linear(WIDTH, WIDTH, device="cpu", bias=False, params_dtype=torch.bfloat16)
        for _ in range(2)
    )
    plain.weight = torch.nn.Parameter(quantizer(rows.flatten(0, 1)))
    made = rows[rank].repeat(2, 1) if made_alone else plain.weight.dequantize() / 8
    layer.weight = torch.nn.Parameter(of_rows("tensor", "identity")(made))
    fully_shard(layer)
    local = layer.weight.to_local()
    if not made_alone:
        with torch.no_grad():
            local.copy_(rows[rank])

    def same(one, other):
        # Values that were in FP8 before are rounded twice.
        is_close = (one - other).norm() < 0.05 * one.norm()
        return bool(is_close) if made_alone else torch.equal(one, other)

    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    with te.autocast(recipe=RECIPES["current"]()):
        alike = [same(plain(x), layer(x))]
    layer.reshard()
    for one, other in zip(halves(plain.weight), halves(layer.weight.to_local()), strict=True):
        alike.append(same(one.chunk(2)[rank], other))
    return alike


PAIRS = [
    ("tensor", "identity"),
    ("block", "identity"),
    ("identity", "identity"),
    ("identity", None),
]

SCENES = {
    **{f"resumes {name}": (resumes, name) for name in RECIPES},
    **{
        f"two {rows} {columns}": (trains_two_values, rows, columns, "current")
        for rows, columns in PAIRS
    },
    **{f"trains {name} True": (trains_as_one, name, True) for name in RECIPES},
    "trains current False": (trains_as_one, "current", False),
    **{f"columns {name}": (trains_as_one, name, True, 1) for name in ("delayed", "current")},
    "columns block": (refuses_columns,),
    "uneven identity": (identity_of_uneven_rows,),
    "loads two": (loads_two_values, False),
    "makes two": (loads_two_values, True),
    **{f"flat {name}": (stays_flat, name) for name in RECIPES},
    **{f"uneven {name}": (uneven, name) for name in RECIPES},
}

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit
    )
    found = {name: scene(*arguments) for name, (scene, *arguments) in SCENES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
