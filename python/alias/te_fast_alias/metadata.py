"""The distribution that ``importlib.metadata`` finds for ``transformer_engine``."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, version
from typing import Any

from te_fast import TRANSFORMER_ENGINE_VERSION


def alias_version() -> str:
    """Return Transformer Engine's version whose names te_fast has, with te_fast's own as its local part."""
    try:
        own = "." + version("te_fast").replace("+", ".")
    except PackageNotFoundError:  # te_fast runs from a directory
        own = ""
    return f"{TRANSFORMER_ENGINE_VERSION}+te.fast{own}"


class AliasDistribution(Distribution):
    """A distribution without files, whose summary says what it is."""

    def read_text(self, filename: str) -> str | None:
        """Return the distribution's only file, its metadata."""
        if filename != "METADATA":
            return None
        return (
            "Metadata-Version: 2.1\n"
            "Name: transformer-engine\n"
            f"Version: {alias_version()}\n"
            "Summary: te_fast under the name transformer_engine, by te_fast_alias; not NVIDIA's package\n"
        )

    def locate_file(self, path: Any) -> Any:
        """Refuse: there are no files."""
        message = f"te_fast_alias: the distribution transformer-engine has no files, got {path}"
        raise FileNotFoundError(message)
