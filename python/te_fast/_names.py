"""Public names: what users see of classes, whichever file they are written in."""

from __future__ import annotations

import sys


def publish(module: str, *others: str) -> None:
    """Let what a module's ``__all__`` lists, and `others`, say that it is of that module.

    Pickles, reprs and tracebacks then hold the name that users import, and files may move beneath it. A module that
    names things of another public one imports it first: the outermost name is the last to be told.

    Parameters
    ----------
    module : str
        Name of the module, which has been imported as far as its ``__all__``.
    *others : str
        More names of it.
    """
    names = sys.modules[module]
    for name in (*names.__all__, *others):
        thing = getattr(names, name)
        if getattr(thing, "__module__", "").startswith("te_fast."):
            thing.__module__ = module
