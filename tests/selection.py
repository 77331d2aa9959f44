"""Plain ``pytest`` runs some cases of a test, ``make test`` runs all: the other cases are marked slow."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection


def quickly(cases: Collection[Any], *quick: Any) -> list[Any]:
    """All cases, each a tuple if there are several arguments; cases that are not named are slow."""
    assert set(quick) <= set(cases)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]


def pairs(first: Collection[Any], second: Collection[Any]) -> list[Any]:
    """Every pair; pairs off the diagonal are slow, since the diagonal has each value of either kind."""
    sizes = (len(first), len(second))
    diagonal = {(place % sizes[0], place % sizes[1]) for place in range(max(sizes))}
    return [
        pytest.param(one, other, marks=() if (row, column) in diagonal else pytest.mark.slow)
        for (row, one), (column, other) in product(enumerate(first), enumerate(second))
    ]
