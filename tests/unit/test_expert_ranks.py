"""Mixtures of experts that 2 and 4 ranks share over gloo, against those of one rank (``expert_rank.py``)."""

import pytest
import torch.distributed as dist

from expert_rank import scenes
from ranks import run
from selection import quickly

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
LAST = "a_rank_that_stops"
SCENES = tuple(name for name in scenes.functions if name != LAST)


@pytest.fixture(scope="module", params=quickly([2, 4], 2))
def results(request, fresh, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"of{request.param}")
    return run(fresh, folder, "expert_rank", request.param, SCENES)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_ranks(results, scene):
    assert {rank.get(scene, "did not run") for rank in results} == {""}


def test_a_rank_that_stops(fresh, tmp_path):
    assert run(fresh, tmp_path, "expert_rank", 2, [LAST]) == [{LAST: ""}] * 2
