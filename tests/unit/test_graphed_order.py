"""The order in which runs of several callables are captured, and which runs share memory."""

import pytest

from te_fast.errors import ArgumentError, DtypeError, StateError
from te_fast.graphed.memory import Left, SharedMemory
from te_fast.graphed.order import from_chunks, shared_inputs, without_order

F, B, W = "forward", "backward", "weight gradients"


def test_without_an_order_backwards_come_in_reverse():
    order = without_order(2)
    assert order.callables == [0, 1]
    assert order.steps == [(F, 0), (F, 1), (B, 1), (W, 1), (B, 0), (W, 0)]
    assert order.last_steps() == [5, 3]


def test_chunks_of_several_callables_and_microbatches():
    """Runs are numbered by chunk, then microbatch, then callable, as Transformer Engine's samples are."""
    order = from_chunks([1, 1, 2, -2, -1, 2, -2, -1], [2, 1], callables=3, samples=6)
    assert order.callables == [0, 1, 0, 1, 2, 2]
    forwards = [run for kind, run in order.steps if kind == F]
    backwards = [run for kind, run in order.steps if kind == B]
    assert forwards == [0, 1, 2, 3, 4, 5]
    assert backwards == [4, 1, 0, 5, 3, 2]
    assert order.chunks[order.steps.index((B, 1))] == [0, 1]


@pytest.mark.parametrize("layers", [None, 2, [2, 2]])
def test_numbers_of_layers_are_one_or_one_for_each_chunk(layers):
    order = from_chunks([1, 2, -2, -1], layers, callables=4, samples=4)
    assert order.callables == [0, 1, 2, 3]
    assert [run for _, run in order.steps] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_halves_are_weight_gradients_of_the_oldest_backward():
    order = from_chunks([1, 1, -1, -1, -1.5, -1.5], [1], callables=1, samples=2)
    assert order.steps == [(F, 0), (F, 1), (B, 0), (B, 1), (W, 0), (W, 1)]
    order = from_chunks([1, 2, -2, -2.5, -1, -1.5], [1, 1], callables=2, samples=2)
    assert order.steps == [(F, 0), (F, 1), (B, 1), (W, 1), (B, 0), (W, 0)]
    # A chunk need not delay its weight gradients.
    order = from_chunks([1, 2, -2, -2.5, -1], [1, 1], callables=2, samples=2)
    assert order.steps[-1] == (B, 0)


@pytest.mark.parametrize(
    ("order", "layers", "callables", "samples", "error", "message"),
    [
        ([1, -1, 1], None, 1, 2, ArgumentError, "chunk 1 has 2 forwards and 1 backwards"),
        ([1, 2, -1, -1], None, 2, 2, ArgumentError, "chunk 1 has 1 forwards and 2 backwards"),
        ([-1, 1], None, 1, 1, ArgumentError, "has -1 where chunk 1 has no forward left"),
        ([1, -1.5, -1], [1], 1, 1, ArgumentError, "no backward left"),
        ([-1], None, 1, 1, ArgumentError, "must have forwards"),
        ([], None, 1, 1, ArgumentError, "must have forwards"),
        ([1, 0, -1], None, 1, 1, ArgumentError, "has 0"),
        ([1, -1, -1.25], [1], 1, 1, ArgumentError, "has -1.25"),
        ([1.5, -1], [1], 1, 1, DtypeError, "forwards in _order are integers, got 1.5"),
        ([1.0, -1], [1], 1, 1, DtypeError, "a float"),
        ([1, -1, -2.5], [1], 1, 1, ArgumentError, "weight gradients of a chunk that has no"),
        ([1, -1, -1.5], None, 1, 1, ArgumentError, "need _num_layers_per_chunk"),
        ([1, -1, -1.5], [2], 2, 2, ArgumentError, "need chunks of one layer"),
        ([1, -1, 1, -1, -1.5], [1], 1, 2, StateError, "has 1 weight gradients"),
        ([1, 2, -2, -1], [1, 1, 1], 3, 3, ArgumentError, "one for each of 2 chunks"),
        ([1, 2, -2, -1], [1, 0], 1, 1, ArgumentError, "number from 1 on"),
        ([1, 2, -2, -1], [1, 2], 2, 3, ArgumentError, "3 in all, got 2"),
        ([1, -1, 1, -1], [1], 1, 1, ArgumentError, "2 for 1 callables and 2 microbatches, got 1"),
        ([1, 2, -2, -1], None, 2, 3, ArgumentError, "do not make as many layers"),
    ],
)
def test_orders_that_cannot_be(order, layers, callables, samples, error, message):
    with pytest.raises(error, match=message):
        from_chunks(order, layers, callables, samples)


def test_inputs_are_shared_by_runs_whose_lives_do_not_meet():
    order = from_chunks([1, -1, 1, -1], None, 1, 2)
    assert shared_inputs(order, ["a", "a"]) == [0, 0]
    assert shared_inputs(order, ["a", "b"]) == [0, 1]
    order = from_chunks([1, 1, -1, -1], None, 1, 2)
    assert shared_inputs(order, ["a", "a"]) == [0, 1]
    order = from_chunks([1, 1, -1, 1, -1, -1], None, 1, 3)
    assert shared_inputs(order, ["a"] * 3) == [0, 1, 0]


def test_inputs_are_kept_until_weight_gradients_have_read_them():
    order = from_chunks([1, -1, 1, -1.5, -1, -1.5], [1], 1, 2)
    assert shared_inputs(order, ["a", "a"]) == [0, 1]
    order = from_chunks([1, -1, -1.5, 1, -1, -1.5], [1], 1, 2)
    assert shared_inputs(order, ["a", "a"]) == [0, 0]


def test_a_replay_overwrites_what_was_free_or_not_there_when_it_was_captured():
    """The order of capture is forward 0, forward 1, backward 1, backward 0."""
    memory = SharedMemory()
    first = memory.take_steps(4)
    assert memory.take_steps(1) == first + 4

    def left(begin, end):
        one = Left(begin, end)
        memory.leave(one)
        return one

    outer, inner = left(0, 3), left(1, 2)
    memory.replayed(1, "b")
    assert inner.by == "b"  # the same forward was replayed once more
    assert outer.by is None
    memory.replayed(2, "b")
    assert outer.by is None
    inner = left(1, 2)
    memory.replayed(3, "a")  # the backward of a runs before the backward of b
    assert (outer.by, inner.by) == (None, "a")
    late = left(1, 2)
    memory.forget(late)
    memory.replayed(0, "a")
    assert (outer.by, late.by) == ("a", None)
