"""Layers that GPUs share, over NCCL: each beside the whole layer in plain torch (``parallel_rank.py``)."""

import pytest
import torch

from compiled_parallel_rank import scenes as compiled_scenes
from context_rank import scenes as context_scenes
from expert_rank import scenes as expert_scenes
from overlap_rank import scenes as overlap_scenes
from parallel_attention_rank import scenes as attention_scenes
from parallel_rank import scenes
from ranks import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
#: The other scenes test the host's work, and NCCL's watchdog ends processes whose peers have stopped.
LAST = (
    "a_rank_that_stops",
    "a_rank_that_stops_before_backward",
    "a_rank_that_stops_before_it_reduces_maxima",
    "a_rank_with_another_group",
)
SCENES = tuple(name for name in scenes.functions if name not in LAST)
OF_CONTEXT = tuple(name for name in context_scenes.functions if name not in LAST)
OF_EXPERTS = tuple(name for name in expert_scenes.functions if name not in LAST)


def run_on(size, fresh, tmp_path_factory, script, scenes):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    return run(fresh, tmp_path_factory.mktemp(f"{script}{size}"), script, size, scenes, kind="cuda")


@pytest.fixture(scope="module", params=[2, 4])
def results(request, fresh, tmp_path_factory):
    return run_on(request.param, fresh, tmp_path_factory, "parallel_rank", SCENES)


@pytest.fixture(scope="module")
def of_graphs(fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    return run(fresh, folder, "compiled_parallel_rank", 2, compiled_scenes.functions, kind="cuda")


@pytest.mark.parametrize("scene", compiled_scenes.functions)
def test_gpus_that_compile(of_graphs, scene):
    assert {rank.get(scene, "did not run") for rank in of_graphs} == {""}


@pytest.fixture(scope="module")
def of_attention(fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    return run(fresh, folder, "parallel_attention_rank", 2, attention_scenes.functions, kind="cuda")


@pytest.mark.parametrize("scene", attention_scenes.functions)
def test_gpus_that_share_heads(of_attention, scene):
    assert {rank.get(scene, "did not run") for rank in of_attention} == {""}


@pytest.fixture(scope="module", params=[2, 4])
def of_context(request, fresh, tmp_path_factory):
    return run_on(request.param, fresh, tmp_path_factory, "context_rank", OF_CONTEXT)


@pytest.mark.parametrize("scene", OF_CONTEXT)
def test_gpus_that_share_tokens(of_context, scene):
    assert {rank.get(scene, "did not run") for rank in of_context} == {""}


@pytest.fixture(scope="module")
def of_cut_products(fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlap")
    return run(fresh, folder, "overlap_rank", 2, overlap_scenes.functions, kind="cuda")


@pytest.mark.parametrize("scene", overlap_scenes.functions)
def test_gpus_that_cut_products(of_cut_products, scene):
    assert {rank.get(scene, "did not run") for rank in of_cut_products} == {""}


@pytest.fixture(scope="module")
def of_experts(fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return run(fresh, folder, "expert_rank", 2, OF_EXPERTS, kind="cuda")


@pytest.mark.parametrize("scene", OF_EXPERTS)
def test_gpus_that_share_experts(of_experts, scene):
    assert {rank.get(scene, "did not run") for rank in of_experts} == {""}


@pytest.mark.parametrize("scene", SCENES)
def test_gpus(results, scene):
    assert {rank.get(scene, "did not run") for rank in results} == {""}
