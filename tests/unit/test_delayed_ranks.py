"""Which layers of delayed scaling take part in the reduction over ranks: the same on every rank."""

import copy
import pickle
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

import te_fast.pytorch as te
from every_layer import every_layer
from te_fast.common.recipe import DelayedScaling
from te_fast.pytorch import _delayed


class Reductions:
    """Stands in for torch.distributed: notes what is reduced, with another rank that has no larger maxima."""

    def __init__(self, monkeypatch):
        self.seen = []
        # Layers of other tests may still live.
        monkeypatch.setattr(_delayed, "_states", WeakValueDictionary())
        monkeypatch.setattr(_delayed, "_is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor, op, group):
        self.seen.append(tensor.tolist())

    def of(self, layers, x, **options):
        """Return the maxima that a region with forwards of some layers reduces."""
        self.seen.clear()
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            for layer in layers:
                layer(x, **options)
        (maxima,) = self.seen
        return maxima


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
    assert len(reductions.of([layer], x)) == 3 * count


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
    """Another rank may have rows for it, as with experts."""
    reductions = Reductions(monkeypatch)
    layer = make()
    maxima = reductions.of([layer], torch.ones(0, 32))
    assert not any(maxima)
    assert len(reductions.of([layer], torch.ones(16, 32))) == len(maxima)
