"""Attention of 2 and 4 ranks that share the tokens of sequences, over gloo (``context_rank.py``)."""

import pytest
import torch.distributed as dist

from context_rank import scenes
from ranks import asked, run
from selection import quickly

pytestmark = [
    pytest.mark.timeout(300),  # the first test of a group runs all of its scenes
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
]
LAST = ("a_rank_that_stops_before_backward",)
SCENES = tuple(name for name in scenes.functions if name not in LAST)


@pytest.fixture(scope="module", params=[2, 4])
def results(request, fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    return run(fresh, folder, "context_rank", request.param, asked(request, SCENES))


@pytest.mark.parametrize(
    "scene",
    quickly(
        SCENES,
        "values_may_have_other_channels",
        "whole_layers_rotate_by_positions",
        "some_tensors_want_no_gradient",
        "bad_input",
        "packed_values_may_have_other_channels",
        "bad_packed_input",
        slow=["results_are_those_of_whole_sequences", "packed_sequences_are_whole_ones"],
    ),
)
def test_ranks(results, scene):
    assert {rank.get(scene, "did not run") for rank in results} == {""}


@pytest.mark.slow
@pytest.mark.parametrize("scene", LAST)
def test_a_rank_that_stops(fresh, tmp_path, scene):
    *others, last = run(fresh, tmp_path, "context_rank", 2, [scene])
    assert last == {scene: ""}
    assert [rank.get(scene, "did not run") for rank in others] == [""]
