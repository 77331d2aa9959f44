"""One of two ranks that train a compiled model: ``python compiled_rank.py RANK FOLDER SCENE:RECIPES:WAYS ...``.

Writes its results as JSON. Run by ``unit/test_compiled_ranks.py``, in two processes of their own.
"""

import datetime
import json
import sys
import warnings
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import te_fast.pytorch as te
from graphs import states_of
from recipes import RECIPES

ROWS, COLS, STEPS = 16, 32, 2


class Model(torch.nn.Module):
    """Blocks, as FSDP2 shards models."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Block(torch.nn.Module):
    """Two layers of te_fast's, with a residual and torch's code between them."""

    def __init__(self):
        super().__init__()
        self.mlp = te.LayerNormMLP(COLS, 64, device="cpu")
        self.linear = te.Linear(COLS, COLS, device="cpu")

    def forward(self, x):
        return x + torch.relu(self.linear(self.mlp(x)))


#: Operators of te_fast in compiled graphs.
operators = []


def compiled(function):
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph, inputs, **options):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        targets = [str(node.target) for part in parts for node in part.graph.nodes]
        operators.extend(target for target in targets if target.startswith("te_fast."))
        return aot_eager(graph, inputs, **options)

    return torch.compile(function, backend=backend)


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def compiled_blocks(model):
    for block in model.blocks:
        block.forward = compiled(block.forward)
    return fully_sharded(model)


#: How a model is run; the others of a list must compute the same as the first.
DATA_PARALLEL = {
    "eager": DistributedDataParallel,
    "compiled around": lambda model: compiled(DistributedDataParallel(model)),
    "compiled within": lambda model: DistributedDataParallel(compiled(model)),
}
SHARDED = {
    "eager": fully_sharded,
    "compiled blocks": compiled_blocks,
    "compiled around": lambda model: compiled(fully_sharded(model)),
}


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(rank, wrap, recipe):
    """Outputs, gradients, parameters and scales of a few steps."""
    torch.default_generator.manual_seed(0)
    model = Model()
    run = wrap(model)
    generator = torch.Generator().manual_seed(100 + rank)
    seen = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, COLS, generator=generator)
        with nullcontext() if recipe is None else te.autocast(recipe=recipe):
            y = run(x)
        y.backward(torch.randn(ROWS, COLS, generator=generator))
        seen.append(y.detach())
        with torch.no_grad():
            for p in model.parameters():
                seen.append(local(p.grad).clone())
                local(p).sub_(0.01 * local(p.grad).sign())
                p.grad = None
    seen += [tensor.clone() for tensor in states_of(model)]
    return [*seen, *(local(p).detach().clone() for p in model.parameters())]


def scene(rank, ways, kinds):
    """For each recipe and way: whether the results are those of eager code, and the operators in graphs."""
    results = {}
    for kind in kinds:
        expected = None
        for way, wrap in ways.items():
            torch.compiler.reset()
            operators.clear()
            got = train(rank, wrap, None if kind == "none" else RECIPES[kind]())
            if expected is None:
                expected = got
                continue
            alike = len(got) == len(expected) and all(map(torch.equal, got, expected))
            results[f"{kind}, {way}"] = [alike, len(operators)]
        gradients = expected[1 : 1 + len(list(Model().parameters()))]
        results[f"{kind}, first gradients"] = [float(grad.double().sum()) for grad in gradients]
    return results


def main() -> None:
    rank, folder, scenes = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    results = {}
    for wanted in scenes:
        name, kinds, count = wanted.split(":")
        ways = dict(islice({"ddp": DATA_PARALLEL, "fsdp": SHARDED}[name].items(), int(count)))
        results[name] = scene(rank, ways, kinds.split("+"))
    (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
