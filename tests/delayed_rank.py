"""One of two ranks with layers of delayed scaling: ``python delayed_rank.py RANK FOLDER`` writes its results as JSON.

Run by ``unit/test_delayed_ranks.py``, in two processes of their own: layers of other tests would take part.
"""

import copy
import datetime
import gc
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import te_fast.pytorch as te
from delayed_states import make_state, record
from te_fast.common.recipe import DelayedScaling, Format
from te_fast.errors import RanksError


def region(recipe, group=None):
    return te.autocast(recipe=recipe, amax_reduction_group=group)


def seen(*states):
    return [[state.scale.tolist(), state.amax_history.tolist()] for state in states]


def maxima_of_all_ranks(rank):
    reducing, local, idle = make_state(), make_state(reduce_amax=False), make_state()
    with region(reducing.recipe):
        record(reducing, [1.0 + rank, 4.0 - rank, 0.0])
        record(local, [1.0 + rank] * 3)
        if rank == 0:  # a layer that another rank alone has run, as experts do
            record(idle, [8.0, 8.0, 8.0])
    with region(
        reducing.recipe
    ):  # where nothing of the second rank runs, which the first waits for
        if rank == 0:
            record(reducing, [16.0] * 3)
    return seen(reducing, local, idle)


def groups(rank):
    both, alone = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])][rank]
    recipe = DelayedScaling(amax_history_len=2)
    states = [make_state(recipe, tensors=1, group=group) for group in (both, alone, None)]
    with region(recipe):
        for state in states:
            record(state, [1.0 + rank])
    states[1].use(recipe, both)
    with region(recipe):
        record(states[1], [3.0 + rank])
    return seen(*states)


def copies(rank):
    """Copies of layers on one rank alone, which has not run them."""
    layer = te.Linear(16, 16, device="cpu", bias=False)
    recipe = DelayedScaling(amax_history_len=2)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    with region(recipe):
        layer(torch.full((16, 16), 1.0 + rank))
    kept = [copy.deepcopy(layer) for _ in range(3 * rank)]
    with region(recipe):
        layer(torch.full((16, 16), 4.0 - rank))
    del kept
    return seen(layer.fp8_meta["scaling_fwd"])


def deaths(rank):
    recipe = DelayedScaling(amax_history_len=2)
    first, second, third = (make_state(recipe, tensors=tensors) for tensors in (1, 2, 1))
    with region(recipe):
        record(second, [1.0 + rank] * 2)
    del second
    with region(recipe):
        record(first, [1.0 + rank])
        record(third, [2.0 - rank])
    return seen(first, third)


class Watched:
    """Notes how many maxima are reduced, and how often ranks compare the layers that they have run."""

    def __init__(self):
        self.reduced, self.compared = [], 0
        self.originals = dist.all_reduce, dist.all_gather_into_tensor

    def __enter__(self):
        dist.all_reduce, dist.all_gather_into_tensor = self.all_reduce, self.all_gather
        return self

    def __exit__(self, *_):
        dist.all_reduce, dist.all_gather_into_tensor = self.originals

    def all_reduce(self, tensor, *, group, **options):
        if group is dist.group.WORLD:  # not those of other scenes
            self.reduced.append(tensor.numel())
        return self.originals[0](tensor, group=group, **options)

    def all_gather(self, *tensors, group):
        self.compared += group is dist.group.WORLD
        return self.originals[1](*tensors, group=group)


def garbage(rank):
    """A layer that one rank frees at once, and the other only when its garbage collector runs."""
    gc.collect()
    gc.disable()
    recipe = DelayedScaling(amax_history_len=2)
    first, last = (make_state(recipe, tensors=1, group=dist.group.WORLD) for _ in range(2))
    between = te.Linear(16, 16, device="cpu", bias=False)
    if rank == 1:
        between.itself = between  # a reference cycle
    with Watched() as watched:
        with region(recipe, dist.group.WORLD):
            between(torch.full((16, 16), 8.0 + rank))
        between = te.Linear(16, 16, device="cpu", bias=False)
        for step in range(40):
            with region(recipe, dist.group.WORLD):
                between(torch.full((16, 16), 4.0 - rank))
                record(first, [1.0 + rank])
                record(last, [3.0 - rank])
            if step == 19:
                gc.collect()
    gc.enable()
    scales = [between.fp8_meta["scaling_fwd"].scale[0].item()]
    return [*seen(first, last), scales, watched.reduced, watched.compared]


def others(rank):
    """A layer that one rank alone runs."""
    layers = {name: te.Linear(16, 16, device="cpu", bias=False, name=name) for name in "abc"}
    recipe = DelayedScaling(amax_history_len=3)
    x = torch.full((16, 16), 1.0 + rank)
    try:
        with region(recipe, dist.group.WORLD):
            for name in "abc" if rank == 0 else "ac":
                layers[name](x)
    except RanksError as error:
        return str(error)
    return "nothing"


def changes(rank):
    """Changes of recipes between regions (length, margin, format, reduction), and changes of the histories alone."""
    state, other = make_state(), make_state(amax_compute_algo="most_recent")
    steps = []
    for recipe in (
        DelayedScaling(amax_history_len=4, margin=1),
        DelayedScaling(amax_history_len=2),
        DelayedScaling(amax_history_len=3, reduce_amax=False),
        DelayedScaling(amax_history_len=3, fp8_format=Format.E4M3),
    ):
        state.use(recipe, None)
        with region(recipe):
            record(state, [1.0 + rank, 4.0 - rank, 0.0])
            record(other, [0.5, rank, 1.0 - rank])
        steps += seen(state)
    state.amax_history = torch.zeros(5, 3)
    with region(state.recipe):
        record(state, [2.0 + rank, 0.0, 0.0])
    return [*steps, *seen(state, other)]


def own_algorithms(rank):
    def largest(amax_history):
        return amax_history.amax(0) * 2

    own = make_state(amax_compute_algo=largest)
    plain = make_state()
    with region(own.recipe):
        record(own, [1.0 + rank, 4.0 - rank, 0.0])
        record(plain, [1.0 + rank, 4.0 - rank, 0.0])
    return seen(own, plain)


def layers(rank):
    """Steps of a model: the maxima of both directions are reduced, and the states agree after each step."""
    torch.default_generator.manual_seed(0)
    model = torch.nn.Sequential(
        te.Linear(32, 32, device="cpu"),
        te.LayerNormMLP(32, 32, device="cpu"),
        te.ops.BasicLinear(32, 32, device="cpu"),
    )
    recipe = DelayedScaling(amax_history_len=3)
    for step in range(4):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        with region(recipe):
            y = model(x)
        (y * (1.0 + rank)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    states = [
        module.fp8_meta[key] for module in model[:2] for key in ("scaling_fwd", "scaling_bwd")
    ]
    states += [model[2]._delayed_state(mode) for mode in ("forward", "backward")]
    return seen(*states)


SCENES = (
    maxima_of_all_ranks,
    groups,
    copies,
    deaths,
    garbage,
    changes,
    own_algorithms,
    layers,
    others,
)


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for scene in SCENES:
        results[scene.__name__] = scene(rank)
        dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
