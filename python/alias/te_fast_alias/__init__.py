"""te_fast for code that imports ``transformer_engine``.

The wheel of this package has a ``.pth`` file, by which every Python of the environment calls :func:`start`. It appends
one finder to all others. The finder answers if no other finder knows a ``transformer_engine``, also for its extension,
``transformer_engine_torch``. te_fast and torch are imported only when a program imports one of the names.
"""

from __future__ import annotations

import sys

from te_fast_alias.finder import EXTENSION, NAME, Finder, others_spec

__all__ = ["install", "is_installed", "start", "uninstall"]

_finder = Finder()


def _conflict() -> str | None:
    """Return another package of the name, which the alias must not hide."""
    for name in (NAME, EXTENSION):
        spec = others_spec(name)
        if spec is not None:
            return (
                f"te_fast_alias: another {name} is installed ({spec.origin or spec.submodule_search_locations}), and "
                f"`import {name}` gives that package; uninstall it to get te_fast, or uninstall te_fast_alias"
            )
    return None


def is_installed() -> bool:
    """Return whether the finder is in place."""
    return _finder in sys.meta_path


def install() -> None:
    """Let ``import transformer_engine`` give te_fast from now on, in this process.

    Raises
    ------
    te_fast.errors.StateError
        If there is another package of that name, or one has been imported already.

    Examples
    --------
    >>> import te_fast_alias
    >>> te_fast_alias.install()
    >>> import transformer_engine.pytorch as te
    >>> te.Linear.__module__
    'te_fast.pytorch'
    >>> te_fast_alias.uninstall()
    """
    if is_installed():
        return
    conflict = _conflict()
    if conflict is not None:
        from te_fast.errors import StateError

        raise StateError(conflict)
    sys.meta_path.append(_finder)


def uninstall() -> None:
    """Remove the alias: imports of ``transformer_engine`` fail as before.

    Imported modules still compute. If ``transformer_engine`` was imported, classes keep its name in this process, so
    that recipes and modules cannot be pickled until :func:`install` and another import of it.
    """
    if not is_installed():
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if name.partition(".")[0] in (NAME, EXTENSION)]:
        del sys.modules[name]


def start() -> None:
    """Install the alias as Python starts; if there is another package of the name, warn instead."""
    conflict = _conflict()
    if conflict is None:
        install()
    else:
        import warnings

        warnings.warn(conflict, RuntimeWarning, stacklevel=2)
