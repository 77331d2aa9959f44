"""With delayed scaling the same layers take part in the reduction on every rank."""

import copy
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import te_fast.pytorch as te
from every_layer import every_layer
from te_fast.common.recipe import DelayedScaling
from te_fast.runtime import delayed, native

TESTS = Path(__file__).parents[1]


class Group:
    """A group of this file's own, because layers of other tests may still live."""


class Reductions:
    """A stand-in for torch.distributed that notes reductions; the other rank has no larger maxima."""

    def __init__(self, monkeypatch):
        self.group = Group()
        self.seen = []
        monkeypatch.setattr(delayed, "_is_initialized", lambda: True)
        monkeypatch.setattr(
            dist, "get_world_size", lambda group=None: 2 if group is self.group else 1
        )
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist, "all_gather_into_tensor", self.all_gather)

    def all_gather(self, everyones, own, group):
        everyones.view(2, -1).copy_(own.expand(2, -1))

    def all_reduce(self, tensor, op, group):
        assert op is dist.ReduceOp.MAX
        assert group is self.group
        self.seen.append(tensor.tolist())

    def of(self, layers, x, recipe=None, **options):
        """Run layers in a region; return the maxima that are reduced, and count freed layers' maxima in `gone`."""
        self.seen.clear()
        recipe = recipe or DelayedScaling(amax_history_len=4)
        with te.autocast(recipe=recipe, amax_reduction_group=self.group):
            for layer in layers:
                layer(x, **options)
        (maxima,) = self.seen
        self.gone = sum(maximum < 0.0 for maximum in maxima)
        return [maximum for maximum in maxima if maximum >= 0.0]


@every_layer
def test_copies_and_loaded_layers_are_reduced_once_they_run(monkeypatch, make):
    reductions = Reductions(monkeypatch)
    layer, x = make(), torch.ones(16, 32)
    count = len(reductions.of([layer], x))
    copied, pickled, loaded = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), make()
    loaded.load_state_dict(layer.state_dict())
    assert len(reductions.of([layer], x)) == count
    assert len(reductions.of([copied], x)) == 2 * count
    assert len(reductions.of([pickled, loaded], x)) == 4 * count
    del copied
    for _ in range(16):  # ranks look for freed layers at every 16th reduction
        assert len(reductions.of([layer], x)) == 3 * count
    assert len(reductions.of([layer], x)) == 3 * count
    assert reductions.gone == 0


@every_layer
def test_maxima_are_reduced_in_the_order_of_first_forwards(monkeypatch, make):
    reductions = Reductions(monkeypatch)
    trained = make()
    reductions.of([trained], torch.ones(16, 32))
    state = trained.state_dict()
    del trained
    first, second = make(), make()
    for layer in (second, first):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(1.0 if layer is first else 2.0)
    second.load_state_dict(
        {**second.state_dict(), **{k: v for k, v in state.items() if "_extra" in k}}
    )
    maxima = reductions.of([first, second], torch.ones(16, 32))
    half = len(maxima) // 2
    weights = [place for place, maximum in enumerate(maxima) if maximum == 2.0]
    assert weights
    assert min(weights) >= half


@every_layer
def test_a_layer_without_rows_is_reduced(monkeypatch, make):
    """Another rank may have rows for the layer, as with experts."""
    reductions = Reductions(monkeypatch)
    layer = make()
    maxima = reductions.of([layer], torch.ones(0, 32))
    assert not any(maxima)
    assert len(reductions.of([layer], torch.ones(16, 32))) == len(maxima)


def test_layers_of_one_recipe_are_one_collective_and_two_launches(monkeypatch):
    reductions = Reductions(monkeypatch)
    layers, x = [te.Linear(16, 16, device="cpu") for _ in range(70)], torch.ones(16, 16)
    assert len(reductions.of(layers, x)) == 70 * 3
    native.reset_counters()
    maxima = reductions.of([], x)
    assert maxima == [0.0] * 70 * 3
    assert native.counters()["launches"] == 2


def test_a_failed_collective_leaves_the_maxima_for_the_next_update(monkeypatch):
    reductions = Reductions(monkeypatch)
    layer, x = te.Linear(16, 16, device="cpu"), torch.full((16, 16), 4.0)

    def fails(tensor, op, group):
        message = "another rank is gone"
        raise ConnectionError(message)

    recipe = DelayedScaling(amax_history_len=4)
    with monkeypatch.context() as broken:
        broken.setattr(dist, "all_reduce", fails)
        with pytest.raises(ConnectionError, match="another rank"):
            reductions.of([layer], x, recipe)
    state = layer.fp8_meta["scaling_fwd"]
    assert state.scale.tolist() == [1.0] * 3
    assert state.amax_history[0, 0] == 4.0
    assert reductions.of([], x, recipe)[0] == 4.0
    assert state.scale[0] == 448 / 4


def test_the_collective_may_use_layers_and_regions(monkeypatch):
    """While ranks wait for each other, other threads run, and so may any other code."""
    reductions = Reductions(monkeypatch)
    layer, x = te.Linear(16, 16, device="cpu"), torch.ones(16, 16)
    recipe = DelayedScaling(amax_history_len=4)
    reductions.of([layer], x, recipe)

    def all_reduce(tensor, op, group):
        monkeypatch.setattr(dist, "all_reduce", reductions.all_reduce)
        layer.adjust_amax_history_length(2)
        with torch.no_grad(), te.autocast(recipe=recipe, amax_reduction_group=group):
            layer(x)
        tensor.fill_(7.0)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with te.autocast(recipe=recipe, amax_reduction_group=reductions.group):
        layer(2 * x)
    # The reduced maxima belong to tensors that were replaced. The new tensors ran too, and have their own maxima.
    state = layer.fp8_meta["scaling_fwd"]
    assert state.scale[0] == 448 / 2
    assert state.amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0]
    assert reductions.of([], x, recipe) == [0.0] * 3


@pytest.mark.parametrize("weakly", [True, False])
def test_a_group_is_not_taken_for_one_that_had_its_address(weakly):
    kind = Group if weakly else object
    recipe = DelayedScaling(amax_history_len=4)
    known = {}
    for _ in range(20):
        group = kind()
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            epoch = native.autocast_region()[5]
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            assert native.autocast_region()[5] == epoch
        assert epoch not in known.values()
        known[id(group)] = epoch
        del group
    # Unless a group gets the address of an earlier group, the test shows nothing.
    assert len(known) < 20 or not weakly


def test_layers_are_reduced_over_the_group_that_they_ran_in_last(monkeypatch):
    layer, x = te.Linear(16, 16, device="cpu"), torch.ones(16, 16)
    for _ in range(3):
        with monkeypatch.context() as patched:
            assert len(Reductions(patched).of([layer], x)) == 3


# Two ranks.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, fresh):
    """Run two ranks; return the results of each, by scene."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    folder = tmp_path_factory.mktemp("ranks")
    program = (
        "import runpy, sys; sys.argv[1:] = {}; sys.path.insert(0, {!r}); "
        "runpy.run_module('delayed_rank', run_name='__main__')"
    )
    fresh.together(*(program.format([str(rank), str(folder)], str(TESTS)) for rank in (0, 1)))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_scales_come_from_the_maxima_of_all_ranks(ranks):
    (reducing, local, idle), (_, other_local, _) = (rank["maxima_of_all_ranks"] for rank in ranks)
    assert ranks[0]["maxima_of_all_ranks"][::2] == ranks[1]["maxima_of_all_ranks"][::2]
    assert reducing == [[28.0] * 3, [[0.0] * 3, [0.0] * 3, [2.0, 4.0, 0.0], [16.0] * 3]]
    assert (local[0], other_local[0]) == ([448.0] * 3, [224.0] * 3)
    assert idle[0] == [56.0] * 3


def test_maxima_are_reduced_within_their_group(ranks):
    for rank in ranks:
        both, alone, default = rank["groups"]
        assert both == default == [[224.0], [[0.0], [2.0]]]
        # The first reduction is in the rank's own group, the second with the other rank.
        assert alone == [[112.0], [[0.0], [4.0]]]


def test_copies_of_one_rank_are_not_reduced_with_layers_of_the_other(ranks):
    assert ranks[0]["copies"] == ranks[1]["copies"]
    (((inputs, weights, *_), history),) = ranks[0]["copies"]
    assert (inputs, weights) == (448 / 4, 448.0)
    assert [row[0] for row in history] == [0.0, 4.0]


def test_layers_that_are_gone_leave_the_others_where_they_were(ranks):
    assert ranks[0]["deaths"] == ranks[1]["deaths"]
    assert ranks[0]["deaths"] == [[[224.0], [[0.0], [2.0]]]] * 2


def test_ranks_may_free_layers_at_different_times(ranks):
    """Maxima of a freed layer keep their place until no rank has the layer; ranks compare nothing more for this."""
    assert ranks[0]["garbage"] == ranks[1]["garbage"]
    first, last, inputs, reduced, compared = ranks[0]["garbage"]
    third = torch.tensor(448 / 3).item()
    assert (first, last) == ([[224.0], [[0.0], [2.0]]], [[third], [[0.0], [3.0]]])
    assert inputs == [112.0]
    # The freed layer and the new layer have three maxima each, the two states have one each. Ranks look for freed
    # layers at every 16th reduction.
    assert reduced == [5] + [8] * 31 + [5] * 9
    assert compared <= 3


def test_layers_that_one_rank_alone_runs_are_named(ranks):
    for rank in ranks:
        message = rank["others"]
        assert "rank 0 has 3, there b" in message
        assert "rank 1 has 2, there c" in message


def test_recipes_may_change_between_regions(ranks):
    *first, other = ranks[0]["changes"]
    *second, second_other = ranks[1]["changes"]
    assert other == second_other
    assert other[0] == [448 / 0.5, 448.0, 448.0]
    assert [one == two for one, two in zip(first, second, strict=True)] == [
        *(True, True),
        *(
            False,
            False,
        ),  # one region reduced nothing; the next history still has its maximum
        True,
    ]
    scales = [[scale for scale, _ in steps] for steps in (first, second)]
    last = [torch.tensor(448 / 3).item(), 112.0, 1.0]
    assert scales[0] == [[112.0, 56.0, 1.0], *([[224.0, 112.0, 1.0]] * 3), last]
    assert scales[1] == scales[0]


def test_own_algorithms_see_the_maxima_of_all_ranks(ranks):
    assert ranks[0]["own_algorithms"] == ranks[1]["own_algorithms"]
    own, plain = ranks[0]["own_algorithms"]
    assert own[0] == [448 / 4, 448 / 8, 1.0]
    assert plain[0] == [448 / 2, 448 / 4, 1.0]


def test_models_have_the_same_scales_on_all_ranks(ranks):
    first, second = (rank["layers"] for rank in ranks)
    assert first == second
    for scale, history in first:
        newest = history[-1]
        used = [place for place, maximum in enumerate(newest) if maximum > 0]
        assert used
        assert all(scale[place] != 1.0 and math.isfinite(scale[place]) for place in used)
