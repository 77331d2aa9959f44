"""The finder that answers for ``transformer_engine`` and its extension: their modules, and metadata.

Every start of Python imports this module, so functions import other modules when they need them.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution, DistributionFinder
    from types import ModuleType

NAME = "transformer_engine"
#: Transformer Engine's extension in C++, a module of its own.
EXTENSION = "transformer_engine_torch"
#: The module with the code of each.
_SOURCES = {NAME: "te_fast_alias.root", EXTENSION: "te_fast_alias.extension"}


def others_spec(name: str = NAME) -> ModuleSpec | None:
    """Return the spec that other finders have for ``transformer_engine`` or its extension."""
    for finder in sys.meta_path:
        if isinstance(finder, Finder) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, None)
        # A directory without code is left over from an uninstalled package and does not count.
        if spec is not None and spec.origin is not None:
            return spec
    return None


class Finder:
    """Finds ``transformer_engine``, its extension and its distribution if no other finder does."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a module; its submodules are te_fast's, which it registers.

        The extension belongs to the package: if another finder has the package, this one has no extension.
        """
        source = _SOURCES.get(fullname)
        if source is None or (fullname == EXTENSION and others_spec() is not None):
            return None
        from importlib.util import find_spec, spec_from_file_location

        code = find_spec(source)
        if code is None or code.origin is None:
            return None
        return spec_from_file_location(
            fullname, code.origin, submodule_search_locations=code.submodule_search_locations
        )

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Return the distribution that code asks for by ``importlib.metadata``.

        Package managers search folders that they name themselves; the finder reports no distribution there.
        """
        options = {} if context is None else vars(context)
        wanted = options.get("name") or NAME
        if wanted.lower().replace("-", "_") != NAME or "path" in options:
            return ()
        if others_spec() is not None:
            return ()
        from te_fast_alias.metadata import AliasDistribution

        return (AliasDistribution(),)
