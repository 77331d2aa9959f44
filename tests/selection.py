"""Which cases of a test run: plain ``pytest`` and ``make test`` run some, ``make test CASES=all`` runs all of them.

The other cases are marked slow, and ``combination``.
"""

from __future__ import annotations

from itertools import combinations, cycle, islice, product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection

COMBINATION = (pytest.mark.slow, pytest.mark.combination)


def quickly(cases: Collection[Any], *quick: Any) -> list[Any]:
    """All cases, each a tuple if there are several arguments; cases that are not named are slow."""
    assert set(quick) <= set(cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else COMBINATION,
        )
        for case in cases
    ]


def pairs(first: Collection[Any], second: Collection[Any]) -> list[Any]:
    """Every pair; pairs off the diagonal are slow, since the diagonal has each value of either kind."""
    sizes = (len(first), len(second))
    diagonal = {(place % sizes[0], place % sizes[1]) for place in range(max(sizes))}
    return [
        pytest.param(one, other, marks=() if (row, column) in diagonal else COMBINATION)
        for (row, one), (column, other) in product(enumerate(first), enumerate(second))
    ]


def every_pair(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Some cases of the product, in which each two values of different axes occur together."""
    whole = list(product(*axes))

    def pairs_of(case: tuple[Any, ...]) -> set[tuple[int, int, Any, Any]]:
        places = combinations(range(len(case)), 2)
        return {(first, second, case[first], case[second]) for first, second in places}

    assert len(axes) > 1
    left = set().union(*map(pairs_of, whole))
    chosen = []
    while left:
        best = max(whole, key=lambda case: len(left & pairs_of(case)))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen


def every_value(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Some cases of the product, in which each value occurs."""
    length = max(map(len, axes))
    return list(zip(*(islice(cycle(axis), length) for axis in axes), strict=True))
