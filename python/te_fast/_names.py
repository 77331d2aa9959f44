"""Public names: the module that users see for a class, and the import of deferred names."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The public module of a deferred name, by the module that the name is loaded from and the name.
_outermost: dict[tuple[str, str], str] = {}
#: The other name of a public module, and the kind: only subclasses of the kind take the other name (`rename`).
_renamed: dict[str, tuple[str, type]] = {}


def publish(module: str, *others: str) -> None:
    """Set ``__module__`` of everything in a module's ``__all__``, and of `others`, to that module.

    Pickles, reprs and tracebacks then hold the name that users import, and files may move beneath it. A module that
    exports names of another public module imports that module first, so that the outermost module is set last. Names
    that another public module has deferred to this one (`defer`) get the other module.

    Parameters
    ----------
    module : str
        Name of the module, which has been imported as far as its ``__all__``.
    *others : str
        More names of it.
    """
    names = sys.modules[module]
    deferred = {name for (_, name), outer in _outermost.items() if outer == module}
    for name in (*names.__all__, *others):
        if name not in deferred:
            _tell(getattr(names, name), _outermost.get((module, name), module))


def defer(module: str, sources: Mapping[str, str]) -> None:
    """Note names of a public module that are loaded when they are first asked for.

    Parameters
    ----------
    module : str
        Name of the public module, which calls this before `publish`, and `load` in its ``__getattr__``.
    sources : Mapping
        The module that each name is loaded from.
    """
    _outermost.update({(source, name): module for name, source in sources.items()})


def load(module: str, name: str, source: str) -> object:
    """Return a deferred name of a module, and keep it there.

    Parameters
    ----------
    module : str
        Name of the public module.
    name : str
        The name that was asked for.
    source : str
        The module that has it.
    """
    loaded = importlib.import_module(source)
    # A submodule, or something that a module defines.
    thing = loaded if source == f"{module}.{name}" else getattr(loaded, name)
    _tell(thing, module)
    setattr(sys.modules[module], name, thing)
    return thing


def rename(module: str, other: str, kind: type) -> None:
    """Set ``__module__`` of a public module's classes to another name, now and when they are loaded.

    Parameters
    ----------
    module : str
        Name of the public module, which is imported.
    other : str
        The other name that it is registered under.
    kind : type
        Only its subclasses are renamed.
    """
    _renamed[module] = other, kind
    loaded = vars(sys.modules[module])
    for name in sys.modules[module].__all__:
        if name in loaded:
            _tell(loaded[name], module)


def _tell(thing: object, module: str) -> None:
    if getattr(thing, "__module__", "").startswith("te_fast."):
        other, kind = _renamed.get(module, (module, object))
        renamed = isinstance(thing, type) and issubclass(thing, kind)
        thing.__module__ = other if renamed else module
