"""DDP, FSDP2, HSDP and distributed checkpoints on 2 and 4 ranks, over gloo (``sharded_rank.py``)."""

import pytest
import torch
import torch.distributed as dist

from checkpoint_rank import scenes as checkpoint_scenes
from ranks import run
from sharded_rank import scenes

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first test of a group runs all of its scenes
    pytest.mark.skipif(
        _VERSION < (2, 11) or not dist.is_available() or not dist.is_gloo_available(),
        reason="needs gloo, and an FSDP2 that runs without a GPU (2.6's does not)",
    ),
]
OF_FOUR = ("meshes", "checkpoints_of_other_meshes")
OF_THREE = ("shards_of_uneven_rows",)
OF_TWO = tuple(name for name in scenes.functions if name not in OF_THREE + OF_FOUR)


@pytest.fixture(scope="module")
def of_two(fresh, tmp_path_factory):
    return run(fresh, tmp_path_factory.mktemp("two"), "sharded_rank", 2, OF_TWO)


@pytest.fixture(scope="module")
def of_four(fresh, tmp_path_factory):
    return run(fresh, tmp_path_factory.mktemp("four"), "sharded_rank", 4, OF_FOUR)


@pytest.mark.parametrize("scene", OF_TWO)
def test_two_ranks(of_two, scene):
    assert [rank.get(scene, "did not run") for rank in of_two] == [""] * 2


def test_checkpoints_of_other_numbers_of_ranks(fresh, tmp_path):
    names = tuple(checkpoint_scenes.functions)
    assert run(fresh, tmp_path, "checkpoint_rank", 2, names) == [dict.fromkeys(names, "")] * 2


def test_three_ranks(fresh, tmp_path):
    expected = [dict.fromkeys(OF_THREE, "")] * 3
    assert run(fresh, tmp_path, "sharded_rank", 3, OF_THREE) == expected


@pytest.mark.parametrize("scene", OF_FOUR)
def test_four_ranks(of_four, scene):
    assert [rank.get(scene, "did not run") for rank in of_four] == [""] * 4
