"""Numbers that tell the callables of recipes apart, without keeping the callables alive."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any


class Identity:
    """Stands for a callable as long as the callable lives.

    Attributes
    ----------
    number : int
        From 1. Another callable gets the number when this one has gone.
    """

    __slots__ = ("anchor", "number")

    def __init__(self, number: int, anchor: Callable[[], Any]) -> None:
        self.number = number
        self.anchor = anchor


_known: dict[tuple[int, int], Identity] = {}
_numbers = itertools.count(1)
_free: list[int] = []


def identity_of(function: Callable[..., Any]) -> Identity:
    """Return the identity of a callable; a method is the same callable as long as its object is the same.

    Parameters
    ----------
    function : Callable
        A factory of quantizers, or an algorithm of delayed scaling.
    """
    # A method is made anew each time that it is read.
    plain, owner = getattr(function, "__func__", None), getattr(function, "__self__", None)
    anchor = function if plain is None or owner is None else owner
    key = id(anchor), 0 if anchor is function else id(plain)
    known = _known.get(key)
    if known is not None and known.anchor() is anchor:
        return known
    number = _free.pop() if _free else next(_numbers)

    # Modules may have gone when the interpreter ends, but not what a function holds.
    def forget(_: Any, known: dict[Any, Identity] = _known, free: list[int] = _free) -> None:
        gone = known.pop(key, None)
        if gone is not None:
            free.append(gone.number)

    try:
        reference: Callable[[], Any] = weakref.ref(anchor, forget)
    except TypeError:  # such objects are kept
        reference = lambda: anchor  # noqa: E731
    made = _known[key] = Identity(number, reference)
    return made
