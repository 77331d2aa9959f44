"""Layers that ranks share, beside Transformer Engine's where that can be imported: time, hidden communication, host.

    NCCL_NVLS_ENABLE=0 python benches/ranks.py --ranks 2 [--hidden 8192] [--rows 8192] [--seconds 60] \
        [--parts layers] [--kinds column LayerNormMLP] [--recipes current] [--chunks 1] [--connections 8]

Every case is printed as a line of JSON when it is done. With ``--seconds`` the cases share that time. Each case makes
as many rounds as its share allows, 3 at least. Cases that find no time left are named and left out.

``layers``: GPU time of forward and backward with sequence parallelism, in turn with Transformer Engine's layers, and
the share of the collectives' own time that is hidden. The time without collectives is that of the same layer with
collectives that do nothing and no product that is cut. ``--chunks 1`` cuts none at all. ``host``: the host time
of forward and backward of 100 ``Linear(256)`` under delayed scaling, whose maxima are reduced over the ranks, over that
of ``nn.Linear``. ``scaling``: steps of DDP and FSDP2 in BF16 with layers of te_fast and of torch, on all ranks and, in
turn with that, by each rank alone on the same rows. Weak scaling is the time alone over the time together.
``weights``: up to 1,000 steps of FSDP2 with FP8 weights and with BF16 weights: bytes that are gathered, peak memory,
and what the steps leave in memory.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import te_fast
import te_fast.pytorch as te
from _harness import DTYPES, RECIPES, as_in_training, options, show, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

BAR_LAYERS, BAR_HIDDEN, BAR_HOST, BAR_GATHERED = 0.90, 0.60, 1.0, 0.55
#: Weak scaling of torch's layers over that of te_fast's: te_fast's is at most 3 % lower.
BAR_SCALING = 1.03
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
PARTS = ("layers", "host", "scaling", "weights")
KINDS = ("column", "row", "norm + column", "LayerNormMLP")
#: A case: its part, its name, and the function that measures it within a number of seconds.
Case = tuple[str, str, "Callable[[argparse.Namespace, float], dict[str, float]]"]
LEAST_ROUNDS, WARM_UP = 3, 2
#: Steps of `weights`, and those after which memory is read first.
STEPS, FIRST_STEPS = 1000, 20


def transformer_engine() -> Any:
    """Return Transformer Engine's module, None where it cannot be imported."""
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError):
        return None


class _Done:
    """The handle of a collective that does nothing."""

    def wait(self) -> None:
        """There is nothing to wait for."""


@contextmanager
def replaced(names: Iterable[str], function: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of torch.distributed: `function` takes the replaced one before the arguments."""
    originals = {name: getattr(dist, name) for name in names}
    for name, original in originals.items():
        setattr(dist, name, partial(function, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def without_communication(
    seen: list[tuple[str, list[torch.Tensor]]],
) -> AbstractContextManager[None]:
    """Replace the collectives by functions that only note their calls."""

    def idle(original: Any, *tensors: torch.Tensor, async_op: bool = False, **given: Any) -> Any:
        if tensors[0].dtype == torch.int64:  # the comparison of calls must still run
            return original(*tensors, async_op=async_op, **given)
        seen.append((original.__name__, list(tensors)))
        return _Done() if async_op else None

    return replaced(COLLECTIVES, idle)


@contextmanager
def whole_products() -> Iterator[None]:
    """Cut no product."""
    former = te_fast.communication_chunks(1)
    try:
        yield
    finally:
        te_fast.communication_chunks(former)


def burst_us(body: Callable[[], object], calls: int, device: torch.device) -> float:
    """Microseconds per call: of the GPU by events, of the CPU by the clock."""
    dist.barrier()
    if device.type != "cuda":
        begin_s = time.perf_counter()
        for _ in range(calls):
            body()
        return (time.perf_counter() - begin_s) * 1e6 / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        body()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / calls


def slowest(values: list[float], arguments: argparse.Namespace) -> list[float]:
    """Return the largest value of all ranks for each number."""
    found = torch.tensor(values, dtype=torch.float64, device=arguments.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return list(map(float, found.tolist()))


def medians(
    bodies: dict[str, Callable[[], object]], arguments: argparse.Namespace, seconds: float
) -> dict[str, float]:
    """Median microseconds of each body, in turn, on the slowest rank. All ranks make the same number of rounds."""
    for _ in range(WARM_UP):
        once = [burst_us(body, 1, arguments.device) for body in bodies.values()]
    call_s = sum(slowest(once, arguments)) * 1e-6
    calls = max(1, min(arguments.calls, int(min(1e6, seconds / (LEAST_ROUNDS * call_s)))))
    rounds = max(LEAST_ROUNDS, min(arguments.rounds, int(min(1e6, seconds / (calls * call_s)))))
    samples: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(rounds):
        for name, body in bodies.items():
            samples[name].append(burst_us(body, calls, arguments.device))
    found = slowest([statistics.median(values) for values in samples.values()], arguments)
    return dict(zip(samples, found, strict=True)) | {"rounds": rounds}


# Layers ---------------------------------------------------------------------------------------------


def make_layer(
    module: Any, kind: str, arguments: argparse.Namespace
) -> tuple[torch.nn.Module, torch.Tensor]:
    """Make a layer of te_fast's or Transformer Engine's, and this rank's input."""
    hidden, rows, size = arguments.hidden, arguments.rows, dist.get_world_size()
    common = {
        "sequence_parallel": True,
        "tp_group": dist.group.WORLD,
        "tp_size": size,
        "params_dtype": DTYPES[arguments.dtype],
        "device": arguments.device,
        "bias": False,
    }
    if kind == "LayerNormMLP":
        layer = module.LayerNormMLP(hidden, 4 * hidden, set_parallel_mode=True, **common)
        shape = (rows // size, hidden)
    elif kind == "row":
        layer = module.Linear(hidden, hidden, parallel_mode="row", **common)
        shape = (rows, hidden // size)
    else:
        name = {"column": "Linear", "norm + column": "LayerNormLinear"}[kind]
        layer = getattr(module, name)(hidden, hidden, parallel_mode="column", **common)
        shape = (rows // size, hidden)
    return layer, torch.randn(shape, dtype=DTYPES[arguments.dtype], device=arguments.device)


def step_of(
    module: Any, layer: torch.nn.Module, x: torch.Tensor, recipe: Any
) -> Callable[[], None]:
    """Forward and backward of a layer."""
    leaf = x.clone().requires_grad_()

    def region() -> Any:
        return nullcontext() if recipe is None else module.autocast(enabled=True, recipe=recipe)

    with region():
        gradient = torch.randn_like(layer(leaf))

    def step() -> None:
        with region():
            y = layer(leaf)
        y.backward(gradient)
        leaf.grad = None
        layer.zero_grad(set_to_none=True)

    return step


def run_collectives(seen: list[tuple[str, list[torch.Tensor]]]) -> None:
    """Run collectives one after the other."""
    for name, tensors in seen:
        getattr(dist, name)(*tensors)


def measure_layer(
    kind: str, name: str | None, arguments: argparse.Namespace, seconds: float
) -> dict[str, float]:
    """Time and hidden communication of a layer under a recipe."""
    other = transformer_engine()
    layer, x = make_layer(te, kind, arguments)
    own = step_of(te, layer, x, None if name is None else RECIPES[name]())
    for _ in range(3):
        own()
    seen: list[tuple[str, list[torch.Tensor]]] = []
    with whole_products(), without_communication(seen):
        own()
    travels = [(what, [torch.empty_like(tensor) for tensor in tensors]) for what, tensors in seen]

    def alone() -> None:
        with whole_products(), without_communication([]):
            own()

    bodies: dict[str, Callable[[], object]] = {
        "te_fast": own,
        "without": alone,
        "collectives": partial(run_collectives, travels),
    }
    if other is not None:
        theirs = importlib.import_module("transformer_engine.common.recipe")
        recipe = None if name is None else getattr(theirs, RECIPES[name].__name__)()
        bodies["transformer_engine"] = step_of(other, *make_layer(other, kind, arguments), recipe)
    found = medians(bodies, arguments, seconds)
    exposed = max(0.0, found["te_fast"] - found["without"])
    row = {f"{what}_us": round(found[what], 1) for what in bodies} | {"rounds": found["rounds"]}
    row["hidden"] = round(1 - min(1.0, exposed / max(found["collectives"], 1e-9)), 3)
    if other is not None:
        row["ratio"] = round(found["te_fast"] / found["transformer_engine"], 3)
    return row


# Host -----------------------------------------------------------------------------------------------


def measure_host(arguments: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Host time of forward and backward of 100 small layers in a chain, over ``nn.Linear``.

    They train under delayed scaling, whose maxima are reduced at the end of the region.
    """
    dtype, device = DTYPES[arguments.dtype], arguments.device
    x = torch.randn(16, 256, dtype=dtype, device=device)
    own = [te.Linear(256, 256, bias=False, params_dtype=dtype, device=device) for _ in range(100)]
    plain = [torch.nn.Linear(256, 256, bias=False, dtype=dtype, device=device) for _ in range(100)]
    recipe = RECIPES["delayed"]()

    gradient = torch.randn_like(x)

    def run(layers: list[torch.nn.Module], region: Any) -> float:
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        y = x
        with region():
            for layer in layers:
                y = layer(y)
        y.backward(gradient)
        return (time.perf_counter() - begin) * 1e6

    regions = {
        "te_fast": (own, partial(te.autocast, recipe=recipe)),
        "nn.Linear": (plain, nullcontext),
    }
    samples: dict[str, list[float]] = {name: [] for name in regions}
    rounds = arguments.rounds
    for number in range(3 + arguments.rounds):
        begin = time.perf_counter()
        for name, (layers, region) in regions.items():
            value = run(layers, region)  # type: ignore[arg-type]
            if number >= 3:
                samples[name].append(value)
        if number == 2:
            (round_s,) = slowest([time.perf_counter() - begin], arguments)
            rounds = max(LEAST_ROUNDS, min(rounds, int(min(1e6, seconds / round_s))))
        if number == 2 + rounds:
            break
    found = {name: statistics.median(values) for name, values in samples.items()}
    figures = {f"{name}_us": round(value, 1) for name, value in found.items()}
    figures["rounds"] = rounds
    return figures | {"ratio": round(found["te_fast"] / found["nn.Linear"], 3)}


# Data parallel --------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A feed-forward block with a residual, of te_fast's layers or torch's."""

    def __init__(self, arguments: argparse.Namespace, *, own: bool) -> None:
        super().__init__()
        hidden = arguments.hidden
        options = {"device": arguments.device, "dtype": DTYPES[arguments.dtype]}
        if own:
            self.body: torch.nn.Module = te.LayerNormMLP(
                hidden, 4 * hidden, device=arguments.device, params_dtype=DTYPES[arguments.dtype]
            )
        else:
            self.body = torch.nn.Sequential(
                torch.nn.LayerNorm(hidden, **options),
                torch.nn.Linear(hidden, 4 * hidden, **options),
                torch.nn.GELU(approximate="tanh"),
                torch.nn.Linear(4 * hidden, hidden, **options),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block."""
        result: torch.Tensor = x + self.body(x)
        return result


def replicated(
    arguments: argparse.Namespace, *, own: bool, group: dist.ProcessGroup | None = None
) -> torch.nn.Module:
    """Return blocks inside of DDP, by default over all ranks."""
    blocks = [Block(arguments, own=own) for _ in range(arguments.blocks)]
    return torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*blocks), process_group=group
    )


def sharded(
    arguments: argparse.Namespace, *, own: bool, group: dist.ProcessGroup | None = None
) -> torch.nn.Module:
    """Return blocks that FSDP2 shards, by default over all ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = None if group is None else DeviceMesh.from_group(group, arguments.device.type)
    model = torch.nn.Sequential(*[Block(arguments, own=own) for _ in range(arguments.blocks)])
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


WRAPS = {"DDP": replicated, "FSDP2": sharded}


def measure_scaling(name: str, arguments: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Time of steps under DDP or FSDP2 on all ranks and by each rank alone, with the same rows for each rank.

    All four models stay in memory and take turns, so that a slow spell of the machine is no difference in scaling.
    Between its steps a model has its weights, and under DDP the buckets of its gradients: 9 GB with the default sizes.
    """
    size, dtype = (arguments.rows, arguments.hidden), DTYPES[arguments.dtype]
    x = torch.randn(size, dtype=dtype, device=arguments.device)

    def step(model: torch.nn.Module) -> None:
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    # Every rank makes all groups, and is in one.
    alone, _ = dist.new_subgroups(group_size=1)
    bodies: dict[str, Callable[[], object]] = {}
    for what, own in {"te_fast": True, "torch": False}.items():
        bodies[what] = partial(step, WRAPS[name](arguments, own=own))
        bodies[f"{what}_alone"] = partial(step, WRAPS[name](arguments, own=own, group=alone))
    found = medians(bodies, arguments, seconds)
    row = {f"{what}_us": round(found[what], 1) for what in bodies} | {"rounds": found["rounds"]}
    scaling = {what: found[f"{what}_alone"] / found[what] for what in ("te_fast", "torch")}
    row |= {f"{what}_scaling": round(value, 3) for what, value in scaling.items()}
    row["ratio"] = round(found["te_fast"] / found["torch"], 3)
    return row | {"scaling_ratio": round(scaling["torch"] / scaling["te_fast"], 3)}


# Sharded weights in FP8 -----------------------------------------------------------------------------


def counted(total: list[int]) -> AbstractContextManager[None]:
    """Add up the bytes of gathered tensors."""
    # torch 2.15 has renamed the function that FSDP2 calls.
    known = ("all_gather_into_tensor", "all_gather_single")

    def count(original: Any, *given: Any, **keywords: Any) -> Any:
        output: Any = given[0] if given else keywords.get("output_tensor", keywords.get("output"))
        total[0] += output.numel() * output.element_size()
        return original(*given, **keywords)

    return replaced([name for name in known if hasattr(dist, name)], count)


def train_sharded(
    recipe: Any, arguments: argparse.Namespace, seconds: float, *, in_fp8: bool
) -> dict[str, float]:
    """Train blocks that FSDP2 shards; return gathered bytes of a step, peak memory, growth and steps."""
    device, dtype = arguments.device, DTYPES[arguments.dtype]
    with te.quantized_model_init(enabled=in_fp8, recipe=recipe):
        model = sharded(arguments, own=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(arguments.rows, arguments.hidden, dtype=dtype, device=device)

    def step() -> None:
        with te.autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def memory() -> int:
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    gathered = [0]
    begin = time.perf_counter()
    for _ in range(FIRST_STEPS):
        gathered[0] = 0
        with counted(gathered):
            step()
    first = memory()
    (step_s,) = slowest([(time.perf_counter() - begin) / FIRST_STEPS], arguments)
    steps = max(FIRST_STEPS, min(STEPS, int(min(1e6, seconds / step_s)))) - FIRST_STEPS
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(steps):
        step()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    names = ("gathered", "peak", "growth")
    found = dict(zip(names, slowest([gathered[0], peak, memory() - first], arguments), strict=True))
    return found | {"steps": steps + FIRST_STEPS}


def measure_weights(name: str, arguments: argparse.Namespace, seconds: float) -> dict[str, float]:
    """FP8 weights over BF16 weights under FSDP2, at a quarter of the width."""
    arguments = argparse.Namespace(
        **vars(arguments) | {"hidden": arguments.hidden // 4, "rows": arguments.rows // 8}
    )
    fp8, bf16 = (
        train_sharded(RECIPES[name](), arguments, seconds / 2, in_fp8=in_fp8)
        for in_fp8 in (True, False)
    )
    row = {"gathered_ratio": round(fp8["gathered"] / bf16["gathered"], 3)}
    if bf16["peak"]:
        row["peak_ratio"] = round(fp8["peak"] / bf16["peak"], 3)
    return row | {"growth_bytes": fp8["growth"], "steps": fp8["steps"]}


# Processes ------------------------------------------------------------------------------------------


def worker(rank: int, arguments: argparse.Namespace, store: str) -> None:
    """Measure on one rank; the first one prints and writes."""
    if arguments.device.type == "cuda":
        arguments.device = torch.device("cuda", rank)
        torch.cuda.set_device(arguments.device)
    backend = "nccl" if arguments.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=arguments.ranks
    )
    as_in_training()
    te_fast.communication_chunks(arguments.chunks)
    figures = measure(arguments)
    if rank == 0:
        report(figures, arguments)
    dist.barrier()
    dist.destroy_process_group()


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the requested cases."""
    found: list[Case] = []
    if "layers" in arguments.parts:
        for kind, name in product(arguments.kinds, (None, *arguments.recipes)):
            case = partial(measure_layer, kind, name)
            found.append(("layers", f"{kind}, {name or arguments.dtype}", case))
    if "host" in arguments.parts:
        found.append(("host", "100 Linear(256)", measure_host))
    if "scaling" in arguments.parts:
        found += [("scaling", name, partial(measure_scaling, name)) for name in WRAPS]
    if "weights" in arguments.parts:
        found += [("weights", name, partial(measure_weights, name)) for name in arguments.recipes]
    return found


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by part and case, which the first rank prints as they come."""
    begin, all_cases = time.perf_counter(), cases(arguments)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for number, (part, name, case) in enumerate(all_cases):
        seconds = math.inf
        if arguments.seconds is not None:
            (spent,) = slowest([time.perf_counter() - begin], arguments)
            seconds = (arguments.seconds - spent) / (len(all_cases) - number)
        is_first = dist.get_rank() == 0
        if seconds <= 0:
            if is_first:
                print(f"no time left for {part}: {name}", flush=True)
            continue
        row = case(arguments, seconds)
        gc.collect()  # models in circles: the next case needs their memory
        figures.setdefault(part, {})[name] = row
        if is_first:
            print(json.dumps({"part": part, "case": name, **row}), flush=True)
    return figures


def report(figures: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print tables, write the figures, and say which bars are missed."""
    for part, table in figures.items():
        names = sorted({name for row in table.values() for name in row})
        rows = [[what, *(str(row.get(name, "")) for name in names)] for what, row in table.items()]
        show(f"{part}, {arguments.ranks} ranks", ["", *names], rows)
    for what, row in figures.get("layers", {}).items():
        if row.get("ratio", 0.0) > BAR_LAYERS:
            print(f"missed: {what}: {row['ratio']} of Transformer Engine's time > {BAR_LAYERS}")
        if arguments.ranks == 4 and row["hidden"] < BAR_HIDDEN:
            print(f"missed: {what}: {row['hidden']} of the communication hidden < {BAR_HIDDEN}")
    for what, row in figures.get("host", {}).items():
        if row["ratio"] > BAR_HOST:
            print(f"missed: {what}: {row['ratio']} > {BAR_HOST}")
    for what, row in figures.get("scaling", {}).items():
        if row["scaling_ratio"] > BAR_SCALING:
            print(f"missed: {what}: torch scales {row['scaling_ratio']} x as well > {BAR_SCALING}")
    for what, row in figures.get("weights", {}).items():
        if row["gathered_ratio"] > BAR_GATHERED or row["growth_bytes"] > 0:
            print(f"missed: {what}: {row}; bars: gathered {BAR_GATHERED}, growth 0")
    said = ("ranks", "hidden", "rows", "dtype", "chunks", "connections")
    sizes = {name: getattr(arguments, name) for name in said}
    write(f"ranks-{arguments.ranks}", arguments, {"sizes": sizes, **figures})


def main() -> int:
    """Start the ranks."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument(
        "--rows", type=int, default=8192, help="rows of all ranks together; in `scaling`, of each"
    )
    parser.add_argument("--blocks", type=int, default=4, help="blocks of the models of `scaling`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, help="time that all cases share")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=["delayed", "current"])
    parser.add_argument(
        "--chunks", type=int, help="as of te_fast.communication_chunks, which decides by default"
    )
    parser.add_argument(
        "--connections",
        default="1",
        help="CUDA_DEVICE_MAX_CONNECTIONS; with more than 1 collectives do not run beside products",
    )
    parser.set_defaults(calls=10)
    arguments = parser.parse_args()
    arguments.command = " ".join(["python", *sys.orig_argv[1:]])
    # NVLink multicast is off: shared machines do not have it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", arguments.connections)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn(worker, (arguments, store), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
