"""Layers that 2 and 4 ranks share, over gloo: each beside the whole layer in plain torch (``parallel_rank.py``)."""

import pytest
import torch.distributed as dist

from compiled_parallel_rank import scenes as compiled_scenes
from graphs import needs_compile
from overlap_rank import scenes as overlap_scenes
from parallel_attention_rank import scenes as attention_scenes
from parallel_rank import scenes
from ranks import asked, run
from selection import quickly

pytestmark = [
    pytest.mark.timeout(300),  # the first test of a group runs all of its scenes
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
]
LAST = (
    "a_rank_that_stops",
    "a_rank_that_stops_before_backward",
    "a_rank_that_stops_before_it_reduces_maxima",
)
OF_TWO = tuple(name for name in scenes.functions if name not in LAST)
OF_GRAPHS = tuple(compiled_scenes.functions)
OF_ATTENTION = tuple(attention_scenes.functions)
OF_FOUR = ("layernorm_mlp", "layernorm_mlp_with_options", "scales_are_those_of_one_rank")


@pytest.fixture(scope="module")
def of_two(request, fresh, tmp_path_factory):
    names = asked(request, OF_TWO)
    return run(fresh, tmp_path_factory.mktemp("two"), "parallel_rank", 2, names)


@pytest.fixture(scope="module")
def of_four(fresh, tmp_path_factory):
    return run(fresh, tmp_path_factory.mktemp("four"), "parallel_rank", 4, OF_FOUR)


@pytest.fixture(scope="module")
def of_attention(request, fresh, tmp_path_factory):
    folder, names = tmp_path_factory.mktemp("attention"), asked(request, OF_ATTENTION)
    return run(fresh, folder, "parallel_attention_rank", 2, names)


@pytest.mark.parametrize(
    "scene",
    quickly(
        OF_TWO,
        "linear",
        "layernorm_mlp",
        "linear_operations",
        "what_travels",
        "steps_of_delayed_scaling",
        "ranks_that_disagree",
        "bad_input",
        slow=["layernorm_mlp_with_options"],
    ),
)
def test_two_ranks(of_two, scene):
    assert [rank.get(scene, "did not run") for rank in of_two] == [""] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene", quickly(OF_ATTENTION, "transformer_layers_in_fp8", "heads_of_attention")
)
def test_two_ranks_that_share_heads(of_attention, scene):
    assert [rank.get(scene, "did not run") for rank in of_attention] == [""] * 2


@pytest.mark.slow
@pytest.mark.parametrize("size", quickly([2, 4], 2))
def test_products_beside_collectives(fresh, tmp_path, size):
    names = (
        tuple(overlap_scenes.functions)
        if size == 2
        else ("products_are_cut", "collectives", "a_rank_in_the_middle")
    )
    assert run(fresh, tmp_path, "overlap_rank", size, names) == [dict.fromkeys(names, "")] * size


@needs_compile
@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.patience)])
def test_two_ranks_that_compile(fresh, tmp_path, every):
    names = [name for name in OF_GRAPHS if name.startswith("every") == every]
    assert (
        run(fresh, tmp_path, "compiled_parallel_rank", 2, names) == [dict.fromkeys(names, "")] * 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("scene", OF_FOUR)
def test_four_ranks(of_four, scene):
    assert [rank.get(scene, "did not run") for rank in of_four] == [""] * 4


@pytest.mark.parametrize("last", quickly(LAST, LAST[0], slow=LAST[1:]))
def test_a_rank_that_stops(fresh, tmp_path, last):
    assert run(fresh, tmp_path, "parallel_rank", 2, [last]) == [{last: ""}] * 2
