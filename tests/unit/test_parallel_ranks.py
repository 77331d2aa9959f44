"""Layers that 2 and 4 ranks share, over gloo: each beside the whole layer in plain torch (``parallel_rank.py``)."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel_rank import SCENES

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)

# What a rank that fails leaves the others waiting for comes last.
SCENES_OF_FOUR = ("linear", "layernorm_linear", "layernorm_mlp", "scales_are_those_of_one_rank")


@pytest.fixture(scope="module")
def results(fresh, tmp_path_factory):
    """What each scene raised, by number of ranks and scene."""
    found = {}

    def run(size, scenes):
        if size not in found:
            folder = tmp_path_factory.mktemp(f"ranks{size}")
            program = (
                "import runpy, sys; sys.argv[1:] = {}; sys.path.insert(0, {!r}); "
                "runpy.run_module('parallel_rank', run_name='__main__')"
            )
            arguments = ([str(rank), str(size), str(folder), *scenes] for rank in range(size))
            fresh.together(*(program.format(given, str(TESTS)) for given in arguments))
            files = [folder / f"{rank}.json" for rank in range(size)]
            found[size] = [json.loads(file.read_text()) for file in files]
        return found[size]

    return run


@pytest.mark.parametrize("scene", SCENES)
def test_two_ranks(results, scene):
    assert [rank.get(scene, "did not run") for rank in results(2, SCENES)] == [""] * 2


@pytest.mark.parametrize("scene", SCENES_OF_FOUR)
def test_four_ranks(results, scene):
    assert [rank.get(scene, "did not run") for rank in results(4, SCENES_OF_FOUR)] == [""] * 4
