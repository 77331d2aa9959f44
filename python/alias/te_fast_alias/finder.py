"""The finder that answers for ``transformer_engine``: its module and its metadata.

It is imported whenever Python starts, so that what imports cost is paid where they are needed.
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


def others_spec() -> ModuleSpec | None:
    """Return what other finders know of a ``transformer_engine``."""
    for finder in sys.meta_path:
        if isinstance(finder, Finder) or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(NAME, None)
        # A directory without any code, left over by an uninstalled package, is none.
        if spec is not None and spec.origin is not None:
            return spec
    return None


class Finder:
    """Finds ``transformer_engine``, and its distribution, where nobody else does."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of the module; its submodules are te_fast's, which it registers."""
        if fullname != NAME:
            return None
        from importlib.util import find_spec, spec_from_file_location

        root = find_spec("te_fast_alias.root")
        if root is None or root.origin is None:
            return None
        return spec_from_file_location(
            NAME, root.origin, submodule_search_locations=root.submodule_search_locations
        )

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Return the distribution that code asks for by ``importlib.metadata``.

        Tools that manage packages look into folders of their choice; they are told of none.
        """
        options = {} if context is None else vars(context)
        wanted = options.get("name") or NAME
        if wanted.lower().replace("-", "_") != NAME or "path" in options:
            return ()
        if others_spec() is not None:
            return ()
        from te_fast_alias.metadata import AliasDistribution

        return (AliasDistribution(),)
