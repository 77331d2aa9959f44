"""Print pyproject.toml's build requirements, one a line, for the build environment that make keeps.

``pip install .`` makes a fresh environment for each build. Its path is new each time, so that every build would
compile the kernels again.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Print the list."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    print("\n".join(project["build-system"]["requires"]))


if __name__ == "__main__":
    main()
