"""Compiled models on two ranks, by DDP and FSDP2: they train as eager ones do, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graphs import needs_compile

TESTS = Path(__file__).parents[1]
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.slow,
    needs_compile,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
]


def run(fresh, folder, *scenes):
    """Run two ranks; return the results of each, by scene."""
    program = (
        "import runpy, sys; sys.argv[1:] = {}; sys.path.insert(0, {!r}); "
        "runpy.run_module('compiled_rank', run_name='__main__')"
    )
    arguments = ([str(rank), str(folder), *scenes] for rank in (0, 1))
    fresh.together(*(program.format(given, str(TESTS)) for given in arguments))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def check(ranks, scene):
    """Return the gradients of either rank, after seeing that all ways of compiling trained alike."""
    first, second = (rank[scene] for rank in ranks)
    gradients = {name for name in first if "gradients" in name}
    for name in first.keys() - gradients:
        for rank in (first, second):
            alike, operators = rank[name]
            assert alike, name
            # The graphs contain the layers' operators.
            assert operators > 0, name
    assert gradients
    assert first.keys() - gradients
    return [(first[name], second[name]) for name in gradients]


EVERY = "none+delayed+current+block:3"


@pytest.mark.parametrize(
    ("data_parallel", "sharded"),
    [
        ("delayed:2", "block:2"),
        pytest.param(EVERY, EVERY, marks=[pytest.mark.patience, pytest.mark.timeout(600)]),
    ],
    ids=["one", "every"],
)
def test_compiled_models_train_as_eager_ones(fresh, tmp_path, data_parallel, sharded):
    """Maxima are reduced over the ranks at the end of the region; FSDP2 gathers parameters into new memory."""
    scenes = [f"ddp:{data_parallel}"]
    if _VERSION >= (2, 11):  # FSDP2 runs without a GPU
        scenes.append(f"fsdp:{sharded}")
    ranks = run(fresh, tmp_path, *scenes)
    for one, two in check(ranks, "ddp"):
        assert one == two  # gradients are averaged over both ranks
    if _VERSION >= (2, 11):
        for one, two in check(ranks, "fsdp"):
            assert one != two  # each rank has its own shard
