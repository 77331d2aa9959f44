"""The order in which forwards and backwards of several callables are captured and replayed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from te_fast.errors import ArgumentError, DtypeError, StateError

_NAME = "make_graphed_callables"

Kind = Literal["forward", "backward", "weight gradients"]


class Step(NamedTuple):
    """One graph."""

    kind: Kind
    #: Number of the run: one forward of one callable, with its backward.
    run: int


@dataclass(frozen=True)
class Order:
    """The runs of a capture, in their order."""

    #: The callable of each run.
    callables: list[int]
    steps: list[Step]
    #: For each step, the runs of its chunk; a step of weight gradients has none.
    chunks: list[list[int]]
    #: Whether the caller's order has the weight gradients; otherwise they follow their backward directly.
    places_weight_gradients: bool = False

    def last_steps(self) -> list[int]:
        """Return, for each run, the last step that reads tensors of its forward."""
        last = [0] * len(self.callables)
        for number, step in enumerate(self.steps):
            last[step.run] = number
        return last


def without_order(count: int) -> Order:
    """Return all forwards, then all backwards from the last to the first.

    Parameters
    ----------
    count : int
        Number of callables.
    """
    steps = [Step("forward", run) for run in range(count)]
    for run in reversed(range(count)):
        steps += [Step("backward", run), Step("weight gradients", run)]
    chunks = [[step.run] for step in steps]
    return Order(list(range(count)), steps, chunks)


def from_chunks(
    order: Sequence[float],
    layers_per_chunk: int | Sequence[int] | None,
    callables: int,
    samples: int,
) -> Order:
    """Return the steps of a pipeline's order.

    Parameters
    ----------
    order : sequence of int or float
        Chunks by their numbers from 1: ``c`` is a forward of all of its layers, ``-c`` a backward, ``-c -
        0.5`` the weight gradients of a chunk with one layer.
    layers_per_chunk : int or sequence of int, optional
        Number of callables of each chunk; all chunks have as many by default.
    callables, samples : int
        Numbers of callables, and of tuples of sample arguments: one for each forward of each callable.

    Raises
    ------
    ArgumentError
        If the numbers do not fit each other.
    StateError
        If weight gradients and backwards differ in number, or a weight gradient precedes its backward.
    """
    chunks, microbatches = _count(order)
    has_halves = any(ceil(number) != number for number in order)
    sizes = _sizes(layers_per_chunk, chunks, microbatches, samples, has_halves)
    if sum(sizes) != callables:
        _refuse(f"_order has chunks of {sizes} callables, {sum(sizes)} in all, got {callables}")
    if callables * microbatches != samples:
        _refuse(
            f"sample_args must have a tuple for each callable and microbatch, {callables * microbatches} for "
            f"{callables} callables and {microbatches} microbatches, got {samples}"
        )
    starts = [sum(sizes[:chunk]) for chunk in range(chunks)]

    def runs(chunk: int, microbatch: int) -> list[int]:
        first = starts[chunk] * microbatches + microbatch * sizes[chunk]
        return list(range(first, first + sizes[chunk]))

    steps: list[Step] = []
    groups: list[list[int]] = []
    done: dict[tuple[Kind, int], int] = {}
    for number in order:
        kind, chunk = _kind_of(number), abs(ceil(number)) - 1
        microbatch = done.get((kind, chunk), 0)
        before: Kind = "backward" if kind == "weight gradients" else "forward"
        if kind != "forward" and microbatch >= done.get((before, chunk), 0):
            _refuse(f"_order has {number} where chunk {chunk + 1} has no {before} left for it")
        done[kind, chunk] = microbatch + 1
        of_chunk = runs(chunk, microbatch)
        for run in of_chunk if kind == "forward" else reversed(of_chunk):
            steps.append(Step(kind, run))
            groups.append(of_chunk)
    for chunk in range(chunks):
        halves = done.get(("weight gradients", chunk), 0)
        if halves not in (0, microbatches):
            message = (
                f"{_NAME}: _order has {halves} weight gradients ({-chunk - 1.5}) of chunk {chunk + 1} and "
                f"{microbatches} backwards; every backward needs its own"
            )
            raise StateError(message)
    of_runs = [0] * samples
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            for layer, run in enumerate(runs(chunk, microbatch)):
                of_runs[run] = starts[chunk] + layer
    return Order(of_runs, steps, groups, places_weight_gradients=True)


def _kind_of(number: float) -> Kind:
    if number > 0:
        return "forward"
    return "backward" if ceil(number) == number else "weight gradients"


def _count(order: Sequence[float]) -> tuple[int, int]:
    """Return the numbers of chunks and microbatches; every chunk must have as many forwards as backwards."""
    for number in order:
        if not isinstance(number, int | float):
            message = f"{_NAME}: _order has {number!r}, a {type(number).__name__}; its entries are numbers"
            raise DtypeError(message)
        if number > 0 and not isinstance(number, int):
            message = f"{_NAME}: forwards in _order are integers, got {number!r}, a {type(number).__name__}"
            raise DtypeError(message)
        if number == 0 or ceil(number) - number not in (0, 0.5):
            _refuse(
                f"_order has {number!r}; chunk c has c for its forward, -c for its backward and -c - 0.5 for the "
                "weight gradients"
            )
    whole = [int(number) for number in order if ceil(number) == number]
    chunks = max(whole, default=0)
    if chunks < 1:
        _refuse(f"_order must have forwards, numbers from 1 on, got {list(order)}")
    microbatches = len(whole) // chunks // 2
    for chunk in range(1, chunks + 1):
        forwards, backwards = whole.count(chunk), whole.count(-chunk)
        if not forwards == backwards == microbatches:
            _refuse(
                f"_order must have each of its {chunks} chunks as often, forward and backward: {len(whole)} "
                "whole numbers "
                f"make {microbatches} microbatches, and chunk {chunk} has {forwards} forwards and {backwards} backwards"
            )
    if any(abs(ceil(number)) > chunks for number in order):
        _refuse(f"_order has weight gradients of a chunk that has no forward: {list(order)}")
    return chunks, microbatches


def _sizes(
    layers: int | Sequence[int] | None,
    chunks: int,
    microbatches: int,
    samples: int,
    has_halves: bool,
) -> list[int]:
    """Return the number of callables of each chunk."""
    if layers is None:
        if has_halves:
            _refuse("weight gradients in _order need _num_layers_per_chunk, with 1 for every chunk")
        if samples % (chunks * microbatches) != 0:
            _refuse(
                f"{samples} sample_args do not make as many layers in each of {chunks} chunks and {microbatches} "
                "microbatches; pass _num_layers_per_chunk"
            )
        sizes = [samples // chunks // microbatches] * chunks
    elif isinstance(layers, int):
        sizes = [layers] * chunks
    else:
        sizes = list(layers)
    if len(sizes) != chunks or any(not isinstance(size, int) or size < 1 for size in sizes):
        _refuse(
            f"_num_layers_per_chunk must be a number from 1 on, or one for each of {chunks} chunks, got {layers!r}"
        )
    if has_halves and any(size != 1 for size in sizes):
        _refuse(
            f"weight gradients in _order need chunks of one layer, got _num_layers_per_chunk={layers!r}"
        )
    return sizes


def _refuse(message: str) -> None:
    message = f"{_NAME}: {message}"
    raise ArgumentError(message)


def shared_inputs(order: Order, signatures: Sequence[Hashable]) -> list[int]:
    """Return, for each run, the run whose static inputs it takes over: one of the same kind that is over by then.

    Parameters
    ----------
    order : Order
        The steps.
    signatures : sequence of hashable
        Signatures of the inputs of each run; inputs with equal signatures can be shared.
    """
    owner = list(range(len(signatures)))
    free: dict[Hashable, list[int]] = {}
    last = order.last_steps()
    for number, (kind, run) in enumerate(order.steps):
        known = free.setdefault(signatures[run], [])
        if kind == "forward" and known:
            owner[run] = known.pop(0)
        elif number == last[run]:
            known.append(owner[run])
    return owner
