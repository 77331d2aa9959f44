"""Which cases of a test run: plain ``pytest`` and ``make test`` run some, ``make test CASES=all`` runs all of them.

Cases that ``make test`` adds to those of plain ``pytest`` are marked ``slow``; the rest is marked ``combination``, too.
"""

from __future__ import annotations

from itertools import combinations, cycle, islice, product
from math import comb
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

COMBINATION = (pytest.mark.slow, pytest.mark.combination)


def quickly(cases: Collection[Any], *quick: Any, slow: Collection[Any] = ()) -> list[Any]:
    """All cases, each a tuple if there are several arguments.

    Cases that are not named are combinations, but those in `slow` are only slow.
    """
    assert {*quick, *slow} <= set(cases)
    marks = dict.fromkeys(slow, pytest.mark.slow) | dict.fromkeys(quick, ())
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=marks.get(case, COMBINATION)
        )
        for case in cases
    ]


def pairs(
    first: Collection[Any], second: Collection[Any], quick: Collection[Any] | None = None
) -> list[Any]:
    """Every pair; pairs off the diagonal are combinations, since the diagonal has each value of either kind.

    Of the diagonal, pairs whose first value is not `quick` are slow, if that is given.
    """
    sizes = (len(first), len(second))
    diagonal = {(place % sizes[0], place % sizes[1]) for place in range(max(sizes))}

    def marks(place: tuple[int, int], one: Any) -> Any:
        if place not in diagonal:
            return COMBINATION
        return () if quick is None or one in quick else pytest.mark.slow

    return [
        pytest.param(one, other, marks=marks((row, column), one))
        for (row, one), (column, other) in product(enumerate(first), enumerate(second))
    ]


def every_pair(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Some cases of the product, in which each two values of different axes occur together."""
    whole = list(product(*axes))

    def pairs_of(case: tuple[Any, ...]) -> set[tuple[int, int, Any, Any]]:
        places = combinations(range(len(case)), 2)
        return {(first, second, case[first], case[second]) for first, second in places}

    assert len(axes) > 1
    of_cases = [(case, pairs_of(case)) for case in whole]
    left = set().union(*(own for _, own in of_cases))
    chosen = []
    # A case never brings more pairs than it did before, so the best cases are those that still bring `most`.
    for most in range(comb(len(axes), 2), 0, -1):
        for case, own in of_cases:
            if len(left & own) == most:
                chosen.append(case)
                left -= own
    return chosen


def every_value(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Some cases of the product, in which each value occurs."""
    length = max(map(len, axes))
    return list(zip(*(islice(cycle(axis), length) for axis in axes), strict=True))


def sampled(
    *axes: Collection[Any],
    quick: Callable[..., list[tuple[int, ...]]] | Collection[tuple[Any, ...]] = every_value,
) -> list[Any]:
    """Every case of the product.

    Plain pytest runs those that `quick` chooses or lists, by default some with each value. `make test` runs some with
    each pair of values, too. A ``pytest.param`` in an axis has values of several arguments.
    """
    values = [list(axis) for axis in axes]
    places = [range(len(axis)) for axis in values]
    listed = [] if callable(quick) else [tuple(map(list.index, values, case)) for case in quick]
    chosen = quick(*places) if callable(quick) else listed
    marks: dict[tuple[int, ...], Any] = dict.fromkeys(every_pair(*places), pytest.mark.slow)
    marks |= dict.fromkeys(chosen, ())

    def arguments(place: tuple[int, ...]) -> list[Any]:
        parts = [axis[one] for axis, one in zip(values, place, strict=True)]
        return [
            value
            for part in parts
            for value in (part.values if isinstance(part, type(pytest.param())) else (part,))
        ]

    return [
        pytest.param(*arguments(place), marks=marks.get(place, COMBINATION))
        for place in product(*places)
    ]
