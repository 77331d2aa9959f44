"""FP8 parameters under FSDP2, on two ranks."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipes import RECIPES

TESTS = Path(__file__).parents[1]
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        _VERSION < (2, 11) or not dist.is_available() or not dist.is_gloo_available(),
        reason="needs gloo, and an FSDP2 that runs without a GPU (2.6's does not)",
    ),
]
WEIGHTS = 2 * 256 * 256


@pytest.fixture(scope="module")
def ranks(fresh, tmp_path_factory):
    """Run two ranks; return the results of each, by scene."""
    folder = tmp_path_factory.mktemp("fsdp")
    program = (
        "import runpy, sys; sys.argv[1:] = {}; sys.path.insert(0, {!r}); "
        "runpy.run_module('fsdp_rank', run_name='__main__')"
    )
    fresh.together(*(program.format([str(rank), str(folder)], str(TESTS)) for rank in (0, 1)))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("name", "reshard"), [*((name, True) for name in RECIPES), ("current", False)]
)
def test_sharded_training_has_the_bits_of_one_process(ranks, name, reshard):
    for rank in ranks:
        seen = rank[f"trains {name} {reshard}"]
        assert all(seen["alike"])
        kind = "Float8BlockwiseQTensor" if name == "block" else "Float8Tensor"
        assert seen["classes"] == [kind, "Tensor"]


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_weights_may_be_sharded_by_columns(ranks, name):
    for rank in ranks:
        assert all(rank[f"columns {name}"]["alike"])
        assert "shard rows" in rank["columns block"]


@pytest.mark.parametrize("name", RECIPES)
def test_memory_is_flat_and_bytes_are_gathered(ranks, name):
    for rank in ranks:
        seen = rank[f"flat {name}"]
        # A collective may hold a few numbers a moment longer.
        steps = seen["memory"][1:]
        assert max(steps) - min(steps) < 256
        # Forward and backward gather one byte per element, and a rank already has half of the elements. BF16 would be
        # two bytes per element.
        shares = {count / (2 * WEIGHTS * 2 / 2) for count in seen["gathered"]}
        assert max(shares) <= 0.55


def test_uneven_shards(ranks):
    for rank in ranks:
        assert rank["uneven delayed"] is True
        assert rank["uneven current"] is True
        assert "128 rows or a multiple a rank" in rank["uneven block"]
        assert rank["uneven identity"] is True


@pytest.mark.parametrize("name", RECIPES)
def test_distributed_checkpoints_resume_bit_for_bit(ranks, name):
    for rank in ranks:
        seen = rank[f"resumes {name}"]
        assert seen["losses"][0] == seen["losses"][1]
        assert seen["alike"]
        assert len(set(seen["losses"][0])) == 5


@pytest.mark.parametrize(
    ("rows", "columns"),
    [("tensor", "identity"), ("block", "identity"), ("identity", "identity"), ("identity", None)],
)
def test_weights_of_two_values_train_as_in_one_process(ranks, rows, columns):
    for rank in ranks:
        seen = rank[f"two {rows} {columns}"]
        assert all(seen["alike"])
        assert seen["classes"] == ["HybridQuantizedTensor" if columns else "IdentityTensor"]


@pytest.mark.parametrize("how", ["loads", "makes"])
def test_weights_of_two_values_are_measured_together_before_the_first_gather(ranks, how):
    for rank in ranks:
        assert all(rank[f"{how} two"])
