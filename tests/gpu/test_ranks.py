"""Layers that GPUs share, over NCCL: each beside the whole layer in plain torch (``parallel_rank.py``)."""

import pytest
import torch

from parallel_attention_rank import scenes as attention_scenes
from parallel_rank import scenes
from ranks import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
#: The others are about what the host does: NCCL's watchdog ends processes whose peers have stopped.
SCENES = tuple(name for name in scenes.functions if name != "a_rank_that_stops")


@pytest.fixture(scope="module", params=[2, 4])
def results(request, fresh, tmp_path_factory):
    size = request.param
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    folder = tmp_path_factory.mktemp(f"gpus{size}")
    return run(fresh, folder, "parallel_rank", size, SCENES, kind="cuda")


@pytest.fixture(scope="module")
def of_attention(fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    return run(fresh, folder, "parallel_attention_rank", 2, attention_scenes.functions, kind="cuda")


@pytest.mark.parametrize("scene", attention_scenes.functions)
def test_gpus_that_share_heads(of_attention, scene):
    assert {rank.get(scene, "did not run") for rank in of_attention} == {""}


@pytest.mark.parametrize("scene", SCENES)
def test_gpus(results, scene):
    assert {rank.get(scene, "did not run") for rank in results} == {""}
