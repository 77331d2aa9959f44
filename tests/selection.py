"""Which cases of a test run when: plain ``pytest`` runs some, ``make test`` runs all of them.

The other cases are marked slow, and ``combination``: other releases of torch than the current one run without these.
"""

from __future__ import annotations

from itertools import product
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
